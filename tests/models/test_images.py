"""Qwen3-VL with images, on every engine and in every layout, against transformers."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend.config import Parallel, Recompute
from megascend.errors import CheckpointError, ConfigError, DataError
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    TrainingCurve,
    case_backend,
    case_checkpoint,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from megascend.training.batch.images import SampleImages
from megascend.training.batch.sample import Sample
from megascend.training.checkpoint.hf_slices import read as read_slices
from support.image_programs import run_program
from support.images import (
    TOKEN,
    TOWER,
    image_reference,
    image_samples,
    image_tokens,
)
from support.model_checks import assert_within

pytestmark = pytest.mark.usefixtures("megatron_imported")

STEPS = 3
LAYOUTS = (
    Case("single"),
    Case("padded", packing=False, micro_batch_tokens=200),
    Case("full recompute", recompute=Recompute(granularity="full")),
    Case("saved and loaded", resumes=True),
    Case("TP2", 2, Parallel(tensor=2)),
    Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    Case("TP2 + SP, padded", 2, Parallel(tensor=2, sequence=True), packing=False, micro_batch_tokens=200),
    Case("PP2", 2, Parallel(pipeline=2)),
    Case("DP2", 2),
    Case("DP2, overlapped", 2, optimizer={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Case("TP2 x PP2 + SP", 4, Parallel(tensor=2, pipeline=2, sequence=True)),
)
WITH_EXPERTS = (
    Case("EP2", 2, Parallel(expert=2)),
    Case("TP2 x EP2 + SP", 2, Parallel(tensor=2, expert=2, expert_tensor=1)),
)
ARCHS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
IN_CI = (
    ("qwen3_5_moe", "TP2 x EP2 + SP", "train"),
    ("qwen3_vl", "padded", "train"),
    ("qwen3_vl", "TP2 + SP", "train"),
    ("qwen3_vl", "PP2", "frozen"),
)
"""Both ways in which the tower is used, and each way in which a layout divides the model; the others are nightly. DP2:
:func:`test_rank_without_images_changes_no_number`; experts and linear attention: qwen3_5_moe."""
MATRIX = [
    pytest.param(
        dataclasses.replace(case, arch=arch),
        tower,
        id=f"{arch}: {case.name}, {tower}",
        marks=[] if (arch, case.name, tower) in IN_CI else pytest.mark.nightly,
    )
    for arch in ARCHS
    for case in (*LAYOUTS, *(WITH_EXPERTS if arch.endswith("_moe") else ()))
    if (arch, case.name) != ("qwen3_5_moe", "TP2")  # experts need sequence parallelism under TP
    for tower in ("frozen", "train")
]


def assert_equals(trajectory: TrainingCurve, reference: TrainingCurve, *, frozen: bool) -> None:
    """Compare losses, norms, logits and trained weights with the reference's."""
    difference = differences(trajectory, reference)
    assert abs(trajectory.losses[0] - reference.losses[0]) <= 1e-5, difference
    # Adam amplifies rounding, which depends on the processor: 1.11e-5 on an AMD EPYC, below 1e-5 on others.
    assert_within(difference, loss=1.5e-5, grad_norm=1e-4)
    if difference.logits is not None:
        assert difference.logits <= 2e-5, difference
    assert reference.weights.keys() == trajectory.weights.keys()
    distances = {
        name: float((trajectory.weights[name] - tensor).abs().mean()) for name, tensor in reference.weights.items()
    }
    # Adam moves a weight whose gradient is near 0 by up to a learning rate either way.
    assert max(distances.values()) < 2e-5, max(distances, key=lambda name: distances[name])
    if frozen:
        assert {name: distance for name, distance in distances.items() if name.startswith(TOWER) and distance} == {}


@pytest.mark.parametrize(("case", "tower"), MATRIX)
def test_training_with_images_equals_transformers(case: Case, tower: str, parity_folder: Path) -> None:
    checkpoint, frozen = case_checkpoint(parity_folder, case.arch), tower == "frozen"
    reference = image_reference(parity_folder, checkpoint, frozen=frozen, steps=STEPS, weights=True)
    trained = train_case(case, checkpoint, image_tokens(), STEPS, True, image_samples(), vision_tower=tower)
    assert_equals(trained, reference, frozen=frozen)


@pytest.mark.nightly_cases("fsdp-qwen3_5-train-2")  # covered: single; the frozen tower of qwen3_vl on fsdp
@pytest.mark.parametrize(
    ("engine", "arch", "tower", "processes"),
    [
        pytest.param(engine, arch, tower, processes, marks=[] if (arch, tower) in in_ci else pytest.mark.nightly)
        for engine, processes, in_ci in (
            ("single", 1, [("qwen3_vl", "train")]),
            ("fsdp", 1, [("qwen3_vl", "frozen")]),
            ("fsdp", 2, [("qwen3_5", "train")]),
        )
        for arch in ARCHS
        for tower in ("frozen", "train")
    ],
)
def test_engines_of_transformers_train_with_images(
    engine: str, arch: str, tower: str, processes: int, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint, frozen = case_checkpoint(parity_folder, arch), tower == "frozen"
    job = {"engine": engine, "checkpoint": checkpoint, "steps": STEPS, "tower": tower}
    result = run_program(processes, tmp_path, **job)
    reference = image_reference(parity_folder, checkpoint, frozen=frozen, steps=STEPS, weights=True)
    assert_equals(
        TrainingCurve(result["losses"], result["grad_norms"], [], result["weights"]), reference, frozen=frozen
    )
    for logprobs, logits, tokens in zip(result["logprobs"], reference.logits, image_tokens(), strict=False):
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert float((logprobs - expected).abs().max()) <= 2e-5
    if processes == 1:
        trained, *frozen_parts = result["moved"]
        assert trained > 0.01
        assert frozen_parts == [0.0] * len(frozen_parts)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_fsdp_divides_experts_of_models_with_images(arch: str, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, arch)
    result = run_program(2, tmp_path, engine="fsdp", checkpoint=checkpoint, steps=STEPS, tower="train", expert=2)
    reference = image_reference(parity_folder, checkpoint, frozen=False, steps=STEPS, weights=True)
    assert_equals(TrainingCurve(result["losses"], result["grad_norms"], [], result["weights"]), reference, frozen=False)


def test_text_alone_trains_as_transformers(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_vl")
    reference = hf_reference(
        parity_folder, checkpoint, token_lists(), STEPS, weights=True, image_token=TOKEN, frozen=[TOWER]
    )
    assert_equals(train_case(Case("single"), checkpoint, token_lists(), STEPS, True), reference, frozen=True)


def test_rank_without_images_changes_no_number(parity_folder: Path) -> None:
    """Give one data parallel rank all images, and the other one text."""
    checkpoint, samples = case_checkpoint(parity_folder, "qwen3_vl"), image_samples()
    reference = image_reference(parity_folder, checkpoint, frozen=False, steps=STEPS)

    def on_rank() -> tuple[list[float], list[float]]:
        losses, norms = [], []
        with case_backend(Case("DP2", 2), checkpoint, vision_tower="train") as backend:
            is_second = os.environ["RANK"] == "1"
            share = [sample for sample in samples if (sample.images is None) == is_second]
            for _ in range(STEPS):
                losses.append(backend.forward_backward(share).loss)
                norms.append(backend.optimizer_step().grad_norm)
        return losses, norms

    for losses, norms in run_distributed(on_rank, 2, init=False, timeout_s=120):
        assert max(abs(a - b) for a, b in zip(losses, reference.losses, strict=True)) <= 1e-5
        assert max(abs(a - b) for a, b in zip(norms, reference.grad_norms, strict=True)) <= 1e-4


@pytest.mark.parametrize("packing", [True, False])
def test_image_of_another_sample_changes_no_logprob(packing: bool, parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_vl")
    samples = image_samples()
    first = samples[0].images
    assert isinstance(first, SampleImages)
    other = dataclasses.replace(samples[0], images=SampleImages(first.pixel_values * -3.0 + 1.0, first.grids))

    def on_rank() -> list[list[torch.Tensor]]:
        case = Case("single", packing=packing, micro_batch_tokens=512)  # all samples in one micro batch
        with case_backend(case, checkpoint) as backend:
            return [backend.forward(batch).logprobs for batch in (samples, [other, *samples[1:]])]

    before, after = run_distributed(on_rank, 1, init=False, timeout_s=120)[0]
    assert not torch.equal(before[0], after[0])
    assert [index for index in range(1, len(samples)) if not torch.equal(before[index], after[index])] == []


@pytest.mark.parametrize("arch", ["qwen3_vl", pytest.param("qwen3_vl_moe", marks=pytest.mark.nightly)])
def test_export_loads_in_transformers(arch: str, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint, samples = case_checkpoint(parity_folder, arch), image_samples()

    def on_rank() -> list[torch.Tensor]:
        with case_backend(Case("single"), checkpoint, vision_tower="train") as backend:
            backend.export_hf(tmp_path / "before")
            backend.forward_backward(samples)
            backend.optimizer_step()
            backend.export_hf(tmp_path / "after")
            logits = backend.forward(samples, logits=True).logits
            assert logits is not None
            return logits

    logits = run_distributed(on_rank, 1, init=False, timeout_s=120)[0]
    source, before = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "before"))
    assert before.keys() == source.keys()
    assert [name for name, tensor in source.items() if not torch.equal(before[name], tensor)] == []
    reference = image_reference(parity_folder, tmp_path / "after", frozen=True, steps=0)
    assert max(float((a - b).abs().max()) for a, b in zip(logits, reference.logits, strict=True)) <= 2e-5


@pytest.mark.nightly
def test_experts_are_exported_as_their_authors_store_them(parity_folder: Path, tmp_path: Path) -> None:
    """Train from experts stored as [experts, in, out] and as transformers 5 saves them: the same numbers, each its own form."""
    plain = case_checkpoint(parity_folder, "qwen3_vl_moe", moe_intermediate_size=48)
    transposed = tmp_path / "transposed"
    shutil.copytree(plain, transposed)
    tensors = load_file(plain / "model.safetensors")
    fused = [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    tensors |= {name: tensors[name].mT.contiguous() for name in fused}
    save_file(tensors, transposed / "model.safetensors", metadata={"format": "pt"})
    samples = image_samples()

    def on_rank() -> list[tuple[float, float]]:
        figures = []
        for checkpoint in (plain, transposed):
            with case_backend(Case("EP2", 2, Parallel(expert=2)), checkpoint, vision_tower="train") as backend:
                share = backend.shard(samples)
                backend.export_hf(tmp_path / f"{checkpoint.name}-before")
                figures.append((backend.forward_backward(share).loss, backend.optimizer_step().grad_norm))
                backend.export_hf(tmp_path / f"{checkpoint.name}-after")
                backend.save(tmp_path / f"{checkpoint.name}-saved", wait=True)
        return figures

    figures = run_distributed(on_rank, 2, init=False, timeout_s=120)[0]
    assert figures[0] == figures[1]
    reference = image_reference(parity_folder, transposed, frozen=False, steps=1, weights=True)
    assert abs(figures[1][0] - reference.losses[0]) <= 1e-5
    assert abs(figures[1][1] - reference.grad_norms[0]) <= 1e-4
    exports = {
        (folder, stage): load_file(tmp_path / f"{folder}-{stage}" / "model.safetensors")
        for folder in (plain.name, transposed.name)
        for stage in ("before", "after")
    }
    assert [name for name in tensors if not torch.equal(exports["transposed", "before"][name], tensors[name])] == []
    for name, tensor in exports[plain.name, "after"].items():
        other = exports["transposed", "after"][name]
        assert torch.equal(other, tensor.mT if name in fused else tensor)
    job = {"checkpoint": transposed, "steps": 1, "tower": "train"}
    runs = [
        run_program(1, tmp_path, engine="single", **job),
        run_program(1, tmp_path, engine="fsdp", **job, save=tmp_path / "saved"),
        run_program(2, tmp_path, engine="fsdp", **job),
        run_program(2, tmp_path, engine="fsdp", **job, expert=2),
    ]
    for trained in runs:
        assert abs(trained["losses"][0] - reference.losses[0]) <= 1e-5
        assert abs(trained["grad_norms"][0] - reference.grad_norms[0]) <= 1e-4
        for name, tensor in exports["transposed", "after"].items():
            assert trained["weights"][name].shape == tensor.shape
            assert float((trained["weights"][name] - tensor).abs().mean()) < 2e-5
    # Rows of a transposed weight are columns of the parameter: engines of other kinds refuse the checkpoints.
    assert read_slices(tmp_path / f"{plain.name}-saved")
    for folder, problem in {
        "saved": r"is stored as \[experts, in, out\], not as ",
        "transposed-saved": "does not consist of complete rows",
    }.items():
        with pytest.raises(CheckpointError, match=problem):
            read_slices(tmp_path / folder)


def test_samples_and_settings_that_do_not_fit_are_refused(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_vl")
    samples = image_samples()
    images, tokens = samples[0].images, image_tokens()[0]
    assert isinstance(images, SampleImages)
    text = Sample.causal(token_lists()[0])
    short = Sample.causal([token for number, token in enumerate(tokens) if number != 3], images=images)
    cases = {
        "sample 1 has 5 tokens that stand for an image (id 314), and its 1 images need 6 (6)": [text, short],
        "sample 0 has 6 tokens that stand for an image (id 314) and no images: set images": [Sample.causal(tokens)],
        "sample 0 has patches of 48 numbers, and the model's have 96: use the image processor of this checkpoint": [
            Sample.causal(tokens, images=SampleImages(images.pixel_values[:, :48], images.grids))
        ],
        "sample 0 has an image of 3 x 8 patches, which 2 x 2 do not divide": [
            Sample.causal(tokens, images=SampleImages(images.pixel_values, torch.tensor([[1, 3, 8]])))
        ],
    }

    def on_rank() -> dict[str, str]:
        problems = {}
        with case_backend(Case("single"), checkpoint) as backend:
            for expected, batch in cases.items():
                with pytest.raises(DataError) as raised:
                    backend.forward_backward(batch)
                problems[expected] = str(raised.value)
        return problems

    for expected, problem in run_distributed(on_rank, 1, init=False, timeout_s=120)[0].items():
        assert expected in problem


def test_undeclared_model_with_images_is_refused_by_every_engine() -> None:
    from transformers import AutoConfig

    from megascend.engines.common.heads import model_class
    from megascend.engines.megatron.build import check_output_layer

    meta = SimpleNamespace(loader=lambda config: SimpleNamespace(model_cls=None))
    in_megatron: Any = SimpleNamespace(model_meta=meta, is_multimodal=True, hf_model_type="qwen2_5_vl")
    message = r"qwen2_5_vl is a multimodal model that megascend does not declare \(its vision"
    with pytest.raises(ConfigError, match=message):
        check_output_layer(in_megatron)
    with pytest.raises(ConfigError, match=message):
        model_class(AutoConfig.for_model("qwen2_5_vl"), None)


def test_rotary_frequencies_of_the_tower_stay_fp32(parity_folder: Path) -> None:
    checkpoint, samples = case_checkpoint(parity_folder, "qwen3_vl"), image_samples()

    def on_rank() -> tuple[list[str], float]:
        with case_backend(Case("bf16", precision="bf16"), checkpoint) as backend:
            visual = backend.engine.bare_chunks[0].visual  # type: ignore[attr-defined]
            wrong = [name for name, buffer in visual.named_buffers() if buffer.dtype != torch.float32]
            return wrong, backend.forward_backward(samples).loss

    wrong, loss = run_distributed(on_rank, 1, init=False, timeout_s=120)[0]
    assert wrong == []
    reference = image_reference(parity_folder, checkpoint, frozen=True, steps=STEPS)
    assert abs(loss - reference.losses[0]) < 0.05
