"""Whole distributions of a teacher on the ranks: loss, gradients and metrics against float64 by transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megascend import Sample
from megascend.apps.data.samples import SampleLimits
from megascend.apps.train.teacher_model import TeacherModel, check_context, check_teacher_model
from megascend.config import Lora, Parallel
from megascend.config.run import TrainerConfig
from megascend.errors import ConfigError, DataError
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.testing import run_distributed
from megascend.testing.parity import PROMPT, Case, case_backend, case_checkpoint, token_lists
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.forked_programs import run_forked
from support.gradients import Gradients, differences, step_gradients

pytestmark = pytest.mark.usefixtures("megatron_imported")
PROGRAM = Path(__file__).with_name("taught_gradients.py")
BETA = 0.3
LOSSES = ("forward_kl", "reverse_kl", "jsd")
VOCABULARY = 301
"""No multiple of two: tensor parallel ranks have padding rows."""
CASES = [
    Case("single"),
    Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    Case("CP2", 2, Parallel(context=2)),
    Case("PP2, padded", 2, Parallel(pipeline=2), packing=False, micro_batch_tokens=200),
    Case("DP2", 2),
]
Models = SimpleNamespace
"""``student``, ``like`` (a teacher of its architecture) and ``other`` (of another one), directories."""


def samples() -> list[Sample]:
    batch = [Sample.causal(tokens, PROMPT) for tokens in token_lists()]
    for sample in batch:
        sample.weights[-1] = 0.5
    return batch


@pytest.fixture(scope="module")
def models(parity_folder: Path) -> Models:
    student = case_checkpoint(parity_folder, "qwen3", vocab_size=VOCABULARY)
    like = write_tiny_checkpoint(parity_folder / "teacher-like", "qwen3", seed=1, vocab_size=VOCABULARY)
    other = write_tiny_checkpoint(
        parity_folder / "teacher-other", "llama", seed=2, vocab_size=VOCABULARY, hidden_size=96, num_hidden_layers=2
    )
    return Models(student=student, like=like, other=other)


def plain_results(models: Models, name: str, batch: list[Sample], folder: Path) -> dict[str, torch.Tensor]:
    """Return losses and gradients of a batch by transformers in float64, in a process of its own."""
    job, result = folder / f"{name}-job.safetensors", folder / f"{name}.safetensors"
    tensors = {}
    for index, sample in enumerate(batch):
        tokens = torch.cat([sample.input_ids, sample.target_ids[-1:]])
        tensors |= {f"tokens.{index}": tokens, f"weights.{index}": sample.weights}
    save_file(tensors, job)
    completed = run_forked(PROGRAM, models.student, vars(models)[name], job, BETA, result, timeout_s=240)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return load_file(result)


@pytest.fixture(scope="module")
def expected(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("taught")
    return {name: plain_results(models, name, samples(), folder) for name in ("like", "other")}


def gradients_of(expected: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}/"): value for key, value in expected.items() if key.startswith(f"{name}/")}


def taught(teacher: TeacherModel, batch: list[Sample]) -> list[Sample]:
    return [
        replace(sample, teacher_states=output.states)
        for sample, output in zip(batch, teacher.outputs(batch), strict=True)
    ]


@pytest.mark.nightly_cases("DP2")  # covered: a rank without samples
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_megatron_are_those_of_plain_float64(
    case: Case, models: Models, expected: dict[str, dict[str, torch.Tensor]]
) -> None:
    """The teacher takes the student's place for its pass: the student's gradients show that its weights are back."""

    def on_rank() -> dict[str, tuple[Gradients, float, float]]:
        results = {}
        # Steps without a change of the weights.
        still = replace(case, optimizer={"lr": 0.0, "weight_decay": 0.0, "max_grad_norm": 1e9, "distributed": False})
        with case_backend(still, models.student) as backend:
            teacher = TeacherModel(backend, models.like, "teacher.model")
            for name in LOSSES:
                batch, losses = taught(teacher, backend.shard(samples())), []
                loss = teacher.loss(cast("Any", name), BETA)
                values = backend.divergences(batch, loss)
                total = sum(float((s.weights * value).double().sum()) for s, value in zip(batch, values, strict=True))
                weight = sum(float(s.weights.sum()) for s in batch)
                sums = backend.gather_by_data_rank((total, weight))
                gradients = step_gradients(
                    backend,
                    lambda: losses.append(backend.forward_backward(batch, loss).loss),  # noqa: B023
                )
                measured = sum(part for part, _ in sums) / sum(part for _, part in sums)
                results[name] = gradients, losses[0], measured
        return results

    ranks = run_distributed(on_rank, case.world_size, init=False, timeout_s=240)
    for name in LOSSES:
        reference = expected["like"]
        assert differences([rank[name][0] for rank in ranks], gradients_of(reference, name), {}) == {}, name
        for rank in ranks:
            assert rank[name][1:] == pytest.approx([float(reference[name])] * 2, rel=2e-6), name


def test_rank_without_samples_has_its_part_in_the_gradients(models: Models, tmp_path: Path) -> None:
    """The teacher's first batch has no sample for the second rank, and its second one has."""
    case = Case("DP2", 2)
    still = replace(case, optimizer={"lr": 0.0, "weight_decay": 0.0, "max_grad_norm": 1e9, "distributed": False})

    def on_rank() -> dict[int, tuple[Gradients, float]]:
        results = {}
        with case_backend(still, models.student) as backend:
            teacher = TeacherModel(backend, models.like, "teacher.model")
            for count in (1, len(samples())):
                losses: list[float] = []
                batch = taught(teacher, backend.shard(samples()[:count]))
                assert count > 1 or bool(batch) == (backend.rank == 0)
                loss = teacher.loss("reverse_kl", BETA)
                gradients = step_gradients(
                    backend,
                    lambda: losses.append(backend.forward_backward(batch, loss).loss),  # noqa: B023
                )
                results[count] = gradients, losses[0]
        return results

    ranks = run_distributed(on_rank, case.world_size, init=False, timeout_s=240)
    for count in (1, len(samples())):
        reference = plain_results(models, "like", samples()[:count], tmp_path)
        gradients = [rank[count][0] for rank in ranks]
        assert differences(gradients, gradients_of(reference, "reverse_kl"), {}) == {}, count
        assert ranks[0][count][1] == pytest.approx(float(reference["reverse_kl"]), rel=2e-6)


TRANSFORMERS_PROGRAM = """
import sys
from pathlib import Path
import torch
from torch.distributed.tensor import DTensor
import megascend
from megascend.apps.train.teacher_model import TeacherModel
from megascend.testing import run_distributed
sys.path.insert(0, sys.argv[5])
from test_teacher_model import BETA, LOSSES, samples, taught
checkpoint, like, other, result = sys.argv[1:5]
batching = megascend.Batching(micro_batch_tokens=64)
def on_rank():
    gradients = {}
    with megascend.make_backend("fsdp", model=checkpoint, precision="fp32", platform="cpu", batching=batching,
                                optimizer=megascend.Adam(lr=0.0, max_grad_norm=1e9), self_check=False) as backend:
        for kind, path in (("like", like), ("other", other)):
            teacher = TeacherModel(backend, Path(path), "teacher.model")
            assert (teacher._engine is None) == (kind == "like")
            for name in LOSSES:
                batch = taught(teacher, backend.shard(samples()))
                gradients[f"{kind}/{name}"] = backend.forward_backward(batch, teacher.loss(name, BETA)).loss
                for key, parameter in backend.engine.model.named_parameters():
                    gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                    gradients[f"{kind}/{name}/{key}"] = gradient.clone()
                backend.optimizer_step()
            teacher.close()
        if backend.rank == 0:
            torch.save(gradients, result)
run_distributed(on_rank, 2, init=False, timeout_s=240)
"""


def test_gradients_of_fsdp_are_those_of_plain_float64(
    models: Models, expected: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """One teacher takes the student's place, the other is a second model, of other sizes, on the same ranks."""
    program, result = tmp_path / "program.py", tmp_path / "result.pt"
    program.write_text(TRANSFORMERS_PROGRAM, encoding="utf-8")
    arguments = (models.student, models.like, models.other, result, Path(__file__).parent)
    completed = run_forked(program, *arguments)
    assert completed.returncode == 0, completed.stderr[-3000:]
    results = torch.load(result)
    for kind in ("like", "other"):
        for name in LOSSES:
            assert results[f"{kind}/{name}"] == pytest.approx(float(expected[kind][name]), rel=2e-6), (kind, name)
            for key, gradient in gradients_of(expected[kind], name).items():
                difference = (results[f"{kind}/{name}/{key}"].double() - gradient).norm() / gradient.norm()
                assert float(difference) < 1e-4, (kind, name, key)


BESIDE_PROGRAM = """
import sys
from pathlib import Path
import torch
import megascend
from megascend.apps.train.teacher_model import TeacherModel
sys.path.insert(0, sys.argv[4])
from test_teacher_model import samples
checkpoint, other, result = sys.argv[1:4]
settings = {"optimizer": megascend.Adam(kind="muon"), "platform": "cpu", "precision": "fp32", "self_check": False}
settings["fsdp"] = megascend.Fsdp(compile=True)
with megascend.make_backend("fsdp", model=checkpoint, **settings) as backend:
    teacher = TeacherModel(backend, Path(other), "teacher.model")
    torch.save([output.states for output in teacher.outputs(samples())], result)
    teacher.close()
"""


def test_frozen_engine_beside_muon_and_compile_matches_transformers(models: Models, tmp_path: Path) -> None:
    program, result = tmp_path / "program.py", tmp_path / "result.pt"
    program.write_text(BESIDE_PROGRAM, encoding="utf-8")
    completed = run_forked(program, models.student, models.other, result, Path(__file__).parent)
    assert completed.returncode == 0, completed.stderr[-3000:]
    reference = AutoModelForCausalLM.from_pretrained(models.other, dtype=torch.float32)
    for sample, states in zip(samples(), torch.load(result), strict=True):
        with torch.no_grad():
            expected = reference.model(sample.input_ids[None]).last_hidden_state[0]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


def config(model: Path, **changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"model": model, "output": "out", "steps": 1, **changes})


def test_teacher_that_cannot_be_compared_or_held_is_refused(models: Models, tmp_path: Path) -> None:
    info = inspect_checkpoint(models.student)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})

    def refusal(directory: Path, **changes: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)
            with pytest.raises(ConfigError) as error:
                check_teacher_model(
                    config(models.student, **changes), directory, "teacher.model", info, cast("Any", tokenizer)
                )
        return str(error.value)

    larger = tmp_path / "larger"
    larger.mkdir()
    values = json.loads((models.other / "config.json").read_text(encoding="utf-8")) | {"vocab_size": 400}
    (larger / "config.json").write_text(json.dumps(values), encoding="utf-8")
    assert "has a vocabulary of 400 tokens, and" in refusal(larger)
    assert "one of 301" in refusal(larger)
    assert "engine megatron holds one model to a process" in refusal(models.other)
    assert "(lora is set)" in refusal(models.like, lora=Lora(rank=4))
    assert "is not a directory" in refusal(tmp_path / "missing")


def test_samples_longer_than_the_teachers_context_are_refused(models: Models, tmp_path: Path) -> None:
    values = json.loads((models.other / "config.json").read_text(encoding="utf-8")) | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    limits = SampleLimits(64, "batching.max_length: 64", VOCABULARY, None, 1, True)
    check_context(tmp_path, "teacher.model", limits)
    with pytest.raises(
        ConfigError, match=r"has a context of 64 tokens, and samples may have 65 \(batching.max_length: 65\)"
    ):
        check_context(tmp_path, "teacher.model", replace(limits, length=65, setting="batching.max_length: 65"))


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "at temperature 1, and the temperature 0.7"),
    ({"teacher_states": torch.zeros(1, 64)}, "must have one length"),
    ({"teacher_states": torch.zeros(1, dtype=torch.int64)}, "must be a tensor of floats"),
    (
        {"teacher_states": torch.zeros(len(token_lists()[0]) - 1, 8)},
        "8 numbers a token, and the teacher's output layer",
    ),
    ({"teacher_states": None}, "needs teacher_states, which sample 0 does not have"),
]


def test_samples_that_do_not_fit_the_teacher_are_refused(models: Models) -> None:
    def on_rank() -> None:
        with case_backend(Case("single"), models.student) as backend:
            teacher = TeacherModel(backend, models.like, "teacher.model")
            batch = taught(teacher, samples())
            loss = teacher.loss("jsd", BETA)
            for change, message in UNFIT:
                with pytest.raises(DataError, match=message):
                    backend.forward_backward([replace(batch[0], **change), *batch[1:]], loss)

    run_distributed(on_rank, 1, init=False)
