"""Heads for multi-token prediction: trained in every layout, against a plain one made of transformers' layers."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend.config import Moe, Parallel, Recompute
from megascend.errors import CheckpointError, ConfigError, DataError
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.memory.parameters import stages
from megascend.testing import run_distributed
from megascend.testing.parity import Case, first_of_equals
from megascend.training.batch.loss import Loss
from megascend.training.batch.losses import cross_entropy
from megascend.training.batch.sample import Sample
from megascend.training.checkpoint import hf_slices
from support.forked_programs import run_forked
from support.prediction_head import (
    HEAD,
    LAYERS,
    SEPARATE,
    Trained,
    checkpoint_with_head,
    compare,
    head_backend,
    plain_run,
    train_head,
    weighted_samples,
)
from support.stacks import first_stack_required

pytestmark = [pytest.mark.usefixtures("megatron_imported"), first_stack_required]

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
ENGINES = Path(__file__).with_name("engine_exports.py")
LAYOUTS = {
    "single": Case("single"),
    "padded": Case("padded", packing=False, micro_batch_tokens=200),
    "one micro batch": Case("one micro batch", micro_batch_tokens=4096),
    "full recompute": Case("full recompute", recompute=Recompute(granularity="full", layers=2)),
    "saved and loaded": Case("saved and loaded", resumes=True),
    "TP2 + SP": Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    "PP2": Case("PP2", 2, Parallel(pipeline=2)),
    "PP2, saved and loaded": Case("PP2, saved and loaded", 2, Parallel(pipeline=2), resumes=True),
    "PP2 x VPP2": Case("PP2 x VPP2", 2, Parallel(pipeline=2, virtual_pipeline=2)),
    "PP2, uneven": Case("PP2, uneven", 2, Parallel(pipeline=2, pipeline_layout="Et*3|tmL")),
    "PP2 x VPP2, uneven": Case(
        "PP2 x VPP2, uneven", 2, Parallel(pipeline=2, virtual_pipeline=2, pipeline_layout="E|tt|t|tmL"), resumes=True
    ),
    "CP2": Case("CP2", 2, Parallel(context=2)),
    "CP2, padded": Case("CP2, padded", 2, Parallel(context=2), packing=False, micro_batch_tokens=200),
    "DP2": Case("DP2", 2),
    "DP2, overlapped": Case(
        "DP2, overlapped", 2, optimizer={"overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    "EP2": Case("EP2", 2, Parallel(expert=2)),
    "grouped experts": Case("grouped experts", experts="grouped"),
    "TP2 x EP2 + SP": Case("TP2 x EP2 + SP", 2, Parallel(tensor=2, expert=2, expert_tensor=1)),
    "TP2 x PP2 + SP": Case("TP2 x PP2 + SP", 4, Parallel(tensor=2, pipeline=2, sequence=True)),
    "PP2 x CP2": Case("PP2 x CP2", 4, Parallel(pipeline=2, context=2)),
}


IN_CI = (
    ("deepseek_v3", "single"),
    ("deepseek_v3", "PP2, uneven"),
    ("deepseek_v3", "CP2"),
    ("deepseek_v3", "TP2 x EP2 + SP"),
    ("glm4_moe", "full recompute"),
    ("glm4_moe_lite", "TP2 + SP"),
)
"""Each family, and each way in which a layout divides the head; the others are nightly."""


def layouts() -> list[Any]:
    """Return (architecture, layout) of every case."""
    return [
        pytest.param(arch, layout, marks=() if (arch, layout) in IN_CI else pytest.mark.nightly)
        for arch in FAMILIES
        for layout in LAYOUTS
    ]


@pytest.mark.nightly_cases(
    "deepseek_v3-single",  # covered: CP2; TP2 x EP2 + SP
    "glm4_moe_lite-TP2 + SP",  # covered: deepseek_v3-TP2 x EP2 + SP
)
@pytest.mark.parametrize(("arch", "layout"), layouts())
def test_head_trains_like_a_plain_one(arch: str, layout: str, parity_folder: Path, tmp_path: Path) -> None:
    case, checkpoint = LAYOUTS[layout], checkpoint_with_head(parity_folder, arch)
    ranks = run_distributed(train_head, case.world_size, case, checkpoint, tmp_path, init=False, timeout_s=120)
    expected = compare(first_of_equals(layout, ranks), parity_folder, checkpoint)
    source, exported = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "hf"))
    assert exported.keys() == source.keys()
    trained = {name.removeprefix("weights."): w for name, w in expected.items() if name.startswith("weights.")}
    assert len([name for name in trained if name.startswith(HEAD)]) > 20
    # Adam moves a weight whose gradient is near 0 by up to a learning rate either way.
    assert max(float((exported[name] - weight).abs().mean()) for name, weight in trained.items()) < 1e-5
    changed = {name for name in source if not torch.equal(exported[name], source[name])}
    assert changed == {name for name in source if not name.endswith("correction_bias")}
    assert torch.equal(exported[f"{HEAD}embed_tokens.weight"], exported["model.embed_tokens.weight"])
    assert torch.equal(exported[f"{HEAD}shared_head.head.weight"], exported["lm_head.weight"])


SEPARATE_CASES = [
    ("qwen3_next", "TP2 x EP2 + SP"),
    *(
        pytest.param(arch, layout, marks=pytest.mark.nightly)
        for arch, layout in (
            ("qwen3_5_text", "PP2"),  # covered: deepseek_v3, PP2, uneven; parameters of the last stage
            ("qwen3_next", "single"),
            ("qwen3_next", "padded"),
            ("qwen3_next", "EP2"),
            ("qwen3_5_text", "single"),
            ("qwen3_5_text", "TP2 + SP"),
            ("qwen3_5_text", "saved and loaded"),
            ("qwen3_5_text", "full recompute"),
            ("qwen3_5_moe_text", "single"),
            ("qwen3_5_moe_text", "PP2"),
        )
    ),
]


@pytest.mark.parametrize(("arch", "layout"), SEPARATE_CASES)
def test_head_beside_the_layers_trains_like_a_plain_one(
    arch: str, layout: str, parity_folder: Path, tmp_path: Path
) -> None:
    case, checkpoint = LAYOUTS[layout], checkpoint_with_head(parity_folder, arch)
    ranks = run_distributed(train_head, case.world_size, case, checkpoint, tmp_path, init=False, timeout_s=120)
    expected = compare(first_of_equals(layout, ranks), parity_folder, checkpoint)
    source, exported = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "hf"))
    assert exported.keys() == source.keys()
    trained = {name.removeprefix("weights."): w for name, w in expected.items() if name.startswith("weights.")}
    assert {name for name in source if name.startswith("mtp.")} <= trained.keys()
    # Adam moves a weight whose gradient is near 0 by up to a learning rate either way.
    assert max(float((exported[name] - weight).abs().mean()) for name, weight in trained.items()) < 1e-5
    assert [name for name in source if torch.equal(exported[name], source[name])] == []


def test_parameters_of_a_head_beside_the_layers_are_those_of_the_last_stage(parity_folder: Path) -> None:
    checkpoint, case = checkpoint_with_head(parity_folder, "qwen3_5_text"), LAYOUTS["PP2"]

    def on_rank() -> tuple[int, list[int]]:
        with head_backend(case, checkpoint) as backend:
            info, topology = inspect_checkpoint(checkpoint, mtp="train"), backend.topology
            parameters = stages(info.tensors, topology, info.shape.num_layers, tied=False, prediction_head=True)
            built = sum(p.numel() for chunk in backend.engine.bare_chunks for p in chunk.parameters())
            return built, [stage.total for stage in parameters]

    (first, estimate), (last, _) = run_distributed(on_rank, 2, init=False, timeout_s=120)
    assert estimate == [first, last]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["single", "PP2", "TP2 + SP"])
def test_head_of_a_tied_model_trains_like_a_plain_one(layout: str, parity_folder: Path, tmp_path: Path) -> None:
    case, checkpoint = LAYOUTS[layout], checkpoint_with_head(parity_folder, "deepseek_v3", tied=True)
    ranks = run_distributed(train_head, case.world_size, case, checkpoint, tmp_path, init=False, timeout_s=120)
    compare(first_of_equals(layout, ranks), parity_folder, checkpoint)
    source, exported = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "hf"))
    assert exported.keys() == source.keys()
    for copy in ("embed_tokens", "shared_head.head"):
        assert torch.equal(exported[f"{HEAD}{copy}.weight"], exported["model.embed_tokens.weight"])


def figures_and_export(case: Case, checkpoint: Path, folder: Path) -> tuple[list[Trained], dict[str, torch.Tensor]]:
    ranks = run_distributed(train_head, case.world_size, case, checkpoint, folder, init=False, timeout_s=120)
    return ranks, load_file(folder / "hf" / "model.safetensors")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.nightly
def test_head_trains_in_16_bits(precision: Any, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_with_head(parity_folder, "glm4_moe")
    (run,), _ = figures_and_export(Case(precision, precision=precision), checkpoint, tmp_path)
    expected = plain_run(parity_folder, checkpoint, weights=True)
    assert run.losses == pytest.approx(expected["losses"].tolist(), abs=0.15)
    assert run.mtp_losses == pytest.approx(expected["mtp_losses"].tolist(), abs=0.15)
    assert run.grad_norms == pytest.approx(expected["grad_norms"].tolist(), rel=0.1)


@pytest.mark.parametrize(("saved", "loading"), [("train", "keep"), ("keep", "train")])
def test_checkpoint_of_another_choice_is_refused(saved: str, loading: str, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_with_head(parity_folder, "deepseek_v3")

    def on_rank() -> str:
        with head_backend(Case("single"), checkpoint, mtp=saved) as backend:
            backend.save(tmp_path / "saved", wait=True)
        with head_backend(Case("single"), checkpoint, mtp=loading) as backend:
            with pytest.raises(CheckpointError) as error:
                backend.load(tmp_path / "saved")
            return str(error.value)

    (message,) = run_distributed(on_rank, 1, init=False, timeout_s=120)
    heads = {"train": "1", "keep": "none"}
    assert f"heads for multi-token prediction {heads[saved]} in the checkpoint, {heads[loading]} in this run" in message


def signed(sample: Sample, seed: int) -> Sample:
    """Return a sample some of whose weights are negative, others 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(-2, 3, (len(sample),), generator=generator) / 40
    return Sample(sample.input_ids, sample.target_ids, weights)


def test_summed_loss_adds_the_sum_over_targets_that_have_a_weight(parity_folder: Path) -> None:
    checkpoint = checkpoint_with_head(parity_folder, "deepseek_v3")
    samples = [signed(sample, index) for index, sample in enumerate(weighted_samples())]

    def on_rank() -> tuple[float, float, float]:
        with head_backend(Case("single"), checkpoint) as backend:
            result = backend.forward_backward(samples, Loss("summed", cross_entropy, reduction="sum"))
            return result.loss, result.metrics["mtp_loss"], backend.optimizer_step().grad_norm

    ((loss, mtp_loss, norm),) = run_distributed(on_rank, 1, init=False, timeout_s=120)
    expected = plain_run(parity_folder, checkpoint, samples, steps=1, reduction="sum")
    targets = sum(int((sample.weights[1:] != 0).sum()) for sample in samples)
    assert loss == pytest.approx(float(expected["losses"]), rel=1e-5, abs=1e-5)
    assert mtp_loss == pytest.approx(float(expected["mtp_losses"]) / targets, abs=1e-5)
    assert norm == pytest.approx(float(expected["grad_norms"]), rel=1e-5)


def test_policy_loss_leaves_the_head_its_cross_entropy(parity_folder: Path) -> None:
    checkpoint = checkpoint_with_head(parity_folder, "deepseek_v3")
    samples = [
        replace(sample, advantages=torch.linspace(-1, 1, len(sample)), old_logprobs=torch.full((len(sample),), -5.0))
        for sample in weighted_samples()
    ]

    def on_rank() -> list[Any]:
        figures = []
        for mtp in ("train", "keep"):
            with head_backend(Case("single"), checkpoint, mtp=mtp) as backend:
                result = backend.forward_backward(samples, "ppo")
                figures.append((result.loss, result.metrics, backend.forward(samples).logprobs))
        return figures

    (((loss, metrics, logprobs), (loss_without, metrics_without, logprobs_without)),) = run_distributed(
        on_rank, 1, init=False, timeout_s=120
    )
    expected = plain_run(parity_folder, checkpoint, weights=True)["mtp_losses"]
    assert metrics.pop("mtp_loss") == pytest.approx(float(expected[0]), abs=1e-5)
    assert (loss, metrics) == (loss_without, metrics_without)
    assert all(torch.equal(a, b) for a, b in zip(logprobs, logprobs_without, strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        name if name == "CP2" else pytest.param(name, marks=pytest.mark.nightly)  # covered: CP2
        for name in ("single", "padded", "full recompute", "CP2", "TP2 + SP", "PP2", "TP2 x EP2 + SP")
    ],
)
def test_router_of_the_head_is_balanced_over_tokens_with_a_next_one(
    layout: str, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint, rate = checkpoint_with_head(parity_folder, "deepseek_v3"), 0.01
    # The loss is one of a micro batch: the reference has the whole batch in one.
    case = replace(LAYOUTS[layout], micro_batch_tokens=4096)
    moe = Moe(aux_loss="megatron", aux_loss_coefficient=0.5, bias_update_rate=rate)

    def on_rank() -> Trained:
        return train_head(case, checkpoint, tmp_path, moe=moe)

    ranks = run_distributed(on_rank, case.world_size, init=False, timeout_s=120)
    run = first_of_equals(layout, ranks)
    expected = plain_run(parity_folder, checkpoint, aux_loss=0.5, bias_update_rate=rate)
    baseline = plain_run(parity_folder, checkpoint, weights=True)
    assert abs(float(expected["grad_norms"][0] - baseline["grad_norms"][0])) > 1e-2
    assert run.losses == pytest.approx(expected["losses"].tolist(), rel=0, abs=5e-5)
    assert run.mtp_losses == pytest.approx(expected["mtp_losses"].tolist(), rel=0, abs=5e-5)
    assert run.grad_norms == pytest.approx(expected["grad_norms"].tolist(), rel=0, abs=3e-4)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    biases = {name.removeprefix("biases."): bias for name, bias in expected.items() if name.startswith("biases.")}
    assert f"{HEAD}mlp.gate.e_score_correction_bias" in biases
    for name, bias in biases.items():
        torch.testing.assert_close(exported[name], bias, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("engine", "arch"),
    [
        ("megatron", "deepseek_v3"),
        pytest.param("single", "deepseek_v3", marks=pytest.mark.nightly),
        pytest.param("fsdp", "qwen3_next", marks=pytest.mark.nightly),  # covered: megatron-deepseek_v3
        pytest.param("single", "qwen3_5_text", marks=pytest.mark.nightly),
    ],
)
def test_head_that_is_not_trained_is_copied_or_left_out(
    engine: str, arch: str, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint = checkpoint_with_head(parity_folder, arch)
    completed = run_forked(ENGINES, engine, checkpoint, tmp_path, timeout_s=240)
    assert completed.returncode == 0, completed.stderr[-3000:]
    report = json.loads(completed.stdout.splitlines()[-1])
    source = load_file(checkpoint / "model.safetensors")
    unchanged, dropped = (load_file(tmp_path / mtp / "model.safetensors") for mtp in ("keep", "drop"))
    assert unchanged.keys() == source.keys()
    assert [name for name, tensor in source.items() if not torch.equal(unchanged[name], tensor)] == []
    prefix, count = ("mtp.", "mtp_num_hidden_layers") if arch in SEPARATE else (HEAD, "num_nextn_predict_layers")
    assert dropped.keys() == {name for name in source if not name.startswith(prefix)}
    assert [sorted(report[mtp]) for mtp in ("keep", "drop")] == [sorted(dropped)] * 2
    counts = [
        json.loads((tmp_path / mtp / "config.json").read_text(encoding="utf-8"))[count] for mtp in ("keep", "drop")
    ]
    assert counts == [1, 0]
    if engine != "megatron":
        assert f"mtp: train with engine {engine}: it is a setting of engine megatron" in report["train"]


def test_copies_that_differ_from_the_model_are_reported_and_replaced(
    parity_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = checkpoint_with_head(parity_folder, "deepseek_v3")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{HEAD}embed_tokens.weight"] += 1.0
    checkpoint = tmp_path / "stale"
    checkpoint.mkdir()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    (checkpoint / "config.json").write_text((source / "config.json").read_text(encoding="utf-8"), encoding="utf-8")

    def on_rank() -> list[str]:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("megascend.engines.megatron.mtp").addHandler(handler)
        with head_backend(Case("single"), checkpoint) as backend:
            backend.export_hf(tmp_path / "hf")
        return records

    ((record,),) = run_distributed(on_rank, 1, init=False, timeout_s=120)
    assert f"{HEAD}embed_tokens.weight differs from model.embed_tokens.weight" in record
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(exported[f"{HEAD}embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_call_that_the_head_does_not_fit_is_refused(parity_folder: Path) -> None:
    checkpoint = checkpoint_with_head(parity_folder, "deepseek_v3")
    chosen, rejected = ([1, 2, 3], [1, 2, 4])

    def on_rank() -> list[str]:
        messages = []
        with head_backend(Case("single"), checkpoint) as backend:
            pair = [
                Sample(ids[:-1], ids[1:], [0.0, 1.0], pair=0, chosen=ids is chosen, ref_logprobs=[0.0, 0.0])
                for ids in (chosen, rejected)
            ]
            with pytest.raises(ConfigError) as error:
                backend.forward_backward(pair, "dpo")
            messages.append(str(error.value))
            routed = Sample([1, 2], [2, 3], [1.0, 1.0], routed_experts=torch.zeros(2, LAYERS, 2, dtype=torch.int16))
            with pytest.raises(DataError) as error:
                backend.forward_backward([routed])
            return [*messages, str(error.value)]

    ((pairs, replay),) = run_distributed(on_rank, 1, init=False, timeout_s=120)
    assert "mtp: train with the loss 'dpo'" in pairs
    assert "a layer with a router of its own" in replay


def test_flops_count_the_layer_of_the_head(parity_folder: Path) -> None:
    checkpoint = checkpoint_with_head(parity_folder, "deepseek_v3")
    baseline, trained = (inspect_checkpoint(checkpoint, mtp=mtp) for mtp in ("keep", "train"))
    tensors = load_file(checkpoint / "model.safetensors")
    matrices = {name: t.numel() for name, t in tensors.items() if name.startswith(HEAD) and t.dim() == 2}
    output = matrices.pop(f"{HEAD}shared_head.head.weight")
    matrices.pop(f"{HEAD}embed_tokens.weight")
    # Of eight experts a token is sent to two.
    active = sum(size / 4 if ".experts." in name else size for name, size in matrices.items())
    extra = trained.flops_per_token(100) - baseline.flops_per_token(100)
    assert extra == 6 * (active + output) + 6 * baseline.attention_width * 100
    samples = [t.numel() for name, t in tensors.items() if name.startswith(HEAD) and name not in trained.copies]
    assert trained.parameter_count - baseline.parameter_count == sum(samples)


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), [("single", "PP2"), ("TP2 x EP2 + SP", "single"), ("PP2", "CP2")])
def test_run_continues_in_another_layout(first: str, second: str, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_with_head(parity_folder, "deepseek_v3")

    def step(backend: Any) -> tuple[float, float, float]:
        result = backend.forward_backward(backend.shard(weighted_samples()))
        return result.loss, result.metrics["mtp_loss"], backend.optimizer_step().grad_norm

    def begin() -> list[tuple[float, float, float]]:
        with head_backend(LAYOUTS[first], checkpoint) as backend:
            rows = [step(backend)]
            backend.save(tmp_path / "saved", wait=True)
            return rows

    def resume() -> list[tuple[float, float, float]]:
        with head_backend(LAYOUTS[second], checkpoint) as backend:
            backend.load(tmp_path / "saved")
            return [step(backend) for _ in range(2)]

    rows = [
        row
        for run, layout in ((begin, first), (resume, second))
        for row in run_distributed(run, LAYOUTS[layout].world_size, init=False, timeout_s=120)[0]
    ]
    compare(Trained(*map(list, zip(*rows, strict=True))), parity_folder, checkpoint)
    # Tensors of the checkpoint as slices of Hugging Face's, the head's under its own names.
    slices = (tmp_path / "saved" / hf_slices.NAME).read_text(encoding="utf-8")
    assert f"{HEAD}eh_proj.weight" in slices
    assert "shared_head.head" not in slices
