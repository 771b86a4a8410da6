"""LoRA in the vision tower and the language model at once, on every engine, against peft on transformers' model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascend.config import Adapters, Lora, Parallel, Recompute
from megascend.errors import ConfigError
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend, case_checkpoint, first_of_equals
from megascend.training.batch.sample import Sample
from megascend.training.lora import peft_format
from support.image_programs import run_program
from support.images import TOKEN, TOWER, image_fields, image_samples, image_tokens, tower_adapter
from support.lora_parity import PeftTrajectory, adapter_differences, first_gradients, peft_reference
from support.model_checks import assert_within
from support.stacks import family_params

pytestmark = pytest.mark.usefixtures("megatron_imported")

STEPS = 3
SHARES = ((0, 3, 2, 4), (1, 5, 7, 6))
"""Samples of two tenants; each has some with one or several images, and some without."""
TOWER_LAYERS = ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")
"""Every linear layer of the towers of Qwen3-VL and Qwen3.5: of their blocks and of what merges patches."""
LAYOUTS = (
    Case("qwen3_vl: single", arch="qwen3_vl"),
    Case("qwen3_vl: padded", packing=False, micro_batch_tokens=200, arch="qwen3_vl"),
    Case("qwen3_vl: full recompute", recompute=Recompute(granularity="full"), arch="qwen3_vl"),
    Case("qwen3_vl: TP2 + SP", 2, Parallel(tensor=2, sequence=True), arch="qwen3_vl"),
    Case("qwen3_vl: PP2", 2, Parallel(pipeline=2), arch="qwen3_vl"),
    Case("qwen3_vl: TP2 x PP2 + SP", 4, Parallel(tensor=2, pipeline=2, sequence=True), arch="qwen3_vl"),
    Case("qwen3_vl_moe: EP2", 2, Parallel(expert=2), arch="qwen3_vl_moe"),
    Case("qwen3_5: single", arch="qwen3_5"),
    Case("qwen3_5: TP2 + SP", 2, Parallel(tensor=2, sequence=True), arch="qwen3_5"),
)
IN_CI = ("qwen3_vl: single", "qwen3_vl: TP2 + SP", "qwen3_vl: PP2", "qwen3_5: single")


def tenant_samples(tenants: int) -> list[Sample]:
    """Return the samples of all tenants; a single one has all."""
    samples = image_samples()
    if tenants == 1:
        return [dataclasses.replace(sample, adapter="tenant-0") for sample in samples]
    return [
        dataclasses.replace(samples[index], adapter=f"tenant-{number}")
        for number in range(tenants)
        for index in SHARES[number]
    ]


def train(case: Case, checkpoint: Path, adapters: Sequence[Path], out: Path) -> list[PeftTrajectory]:
    """Train adapters in the same batches on one rank of a layout."""
    names = [f"tenant-{number}" for number in range(len(adapters))]
    losses: dict[str, list[float]] = {name: [] for name in names}
    norms: dict[str, list[float]] = {name: [] for name in names}
    with case_backend(case, checkpoint, adapters=Adapters(), vision_tower="train") as backend:
        for name, path in zip(names, adapters, strict=True):
            backend.load_adapter(name, path, optimizer=False)
        share = backend.shard(tenant_samples(len(adapters)))
        for step in range(STEPS):
            result, step_result = backend.forward_backward(share), backend.optimizer_step()
            for name in names:
                losses[name].append(result.adapters[name].loss)
                norms[name].append(step_result.adapters[name].grad_norm)
                if step == 0:
                    backend.save_adapter(name, out / f"{name}-first")
        for name in names:
            backend.save_adapter(name, out / name)
    return [
        PeftTrajectory(
            losses[name],
            norms[name],
            [],
            peft_format.read(out / name)[1],
            first_gradients(out / f"{name}-first"),
        )
        for name in names
    ]


def assert_equals_peft(
    run: PeftTrajectory, folder: Path, checkpoint: Path, adapter: Path, share: Sequence[int] | None = None
) -> None:
    """Compare with peft's training on the samples ``share``, by default on all."""
    share = range(len(image_tokens())) if share is None else share
    tokens, fields = ([items[index] for index in share] for items in (image_tokens(), image_fields()))
    fields = [{**extra, "image_token": TOKEN} for extra in fields]  # type: ignore[dict-item]
    reference = peft_reference(folder, checkpoint, adapter, tokens, STEPS, fields=fields)  # type: ignore[arg-type]
    difference = adapter_differences(run, reference)
    assert_within(difference, loss=1e-5, grad_norm=1e-4, factors=5e-3)
    if difference.gradients is not None:
        assert difference.gradients <= 1e-3, difference


@pytest.mark.nightly_cases(
    "1-*",  # covered: two adapters
    "2-qwen3_vl: single",  # covered: TP2 + SP
    "2-qwen3_5: single",  # covered: qwen3_vl, which has the same tower
)
@pytest.mark.parametrize("case", family_params(LAYOUTS, IN_CI))
@pytest.mark.parametrize("tenants", [1, 2])
def test_adapters_in_the_tower_equal_peft(case: Case, tenants: int, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, case.arch)
    adapters = [tower_adapter(checkpoint, seed) for seed in range(tenants)]
    ranks = run_distributed(train, case.world_size, case, checkpoint, adapters, tmp_path, init=False, timeout_s=120)
    runs = [first_of_equals(case.name, [rank[number] for rank in ranks]) for number in range(tenants)]
    for number, run in enumerate(runs):
        tower_names = [name for name in run.factors if name.startswith(TOWER)]
        assert {name.rpartition(".")[2] for name in tower_names} == {"qkv", "proj", "linear_fc1", "linear_fc2"}
        share = None if tenants == 1 else SHARES[number]
        assert_equals_peft(run, parity_folder, checkpoint, adapters[number], share)


@pytest.mark.parametrize(
    ("engine", "arch", "processes", "tenants"),
    [
        ("single", "qwen3_vl", 1, 1),
        pytest.param("single", "qwen3_vl", 1, 2, marks=pytest.mark.nightly),
        pytest.param("single", "qwen3_5", 1, 1, marks=pytest.mark.nightly),
        pytest.param("fsdp", "qwen3_vl", 1, 2, marks=pytest.mark.nightly),  # covered: single
        pytest.param("fsdp", "qwen3_vl", 2, 2, marks=pytest.mark.nightly),
        pytest.param("fsdp", "qwen3_vl_moe", 2, 2, marks=pytest.mark.nightly),
        pytest.param("fsdp", "qwen3_5", 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_engines_of_transformers_train_adapters_in_the_tower(
    engine: str, arch: str, processes: int, tenants: int, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint = case_checkpoint(parity_folder, arch)
    adapters = [tower_adapter(checkpoint, seed) for seed in range(tenants)]
    job = {"engine": engine, "checkpoint": checkpoint, "steps": STEPS, "tower": "train"}
    shares = [list(share) for share in (SHARES if tenants > 1 else [range(len(image_tokens()))])]
    result = run_program(processes, tmp_path, **job, tenants=[*map(str, adapters)], shares=shares)
    for number, (adapter, share) in enumerate(zip(adapters, shares, strict=True)):
        factors = peft_format.read(tmp_path / f"result.pt.tenant-{number}")[1]
        run = PeftTrajectory(result["tenant_losses"][number], result["tenant_norms"][number], [], factors)
        assert_equals_peft(run, parity_folder, checkpoint, adapter, share)


@pytest.mark.parametrize("arch", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.nightly)])
def test_saved_and_merged_adapters_equal_peft(arch: str, parity_folder: Path, tmp_path: Path) -> None:
    """Load a saved adapter in peft, under the names that it uses itself, and compare its merge with the exported model."""
    checkpoint = case_checkpoint(parity_folder, arch)
    adapter = tower_adapter(checkpoint, 0, TOWER_LAYERS)

    def on_rank() -> dict[str, torch.Tensor]:
        with case_backend(Case("single"), checkpoint, adapters=Adapters(), vision_tower="train") as backend:
            backend.load_adapter("it", adapter, optimizer=False)
            backend.save_adapter("it", tmp_path / "saved")
            backend.export_hf(tmp_path / "merged", adapter="it")
            return {name: tensor.clone() for name, tensor in backend.named_weights("it", receivers="main")}

    [pushed] = run_distributed(on_rank, 1, init=False, timeout_s=120)
    exported = load_file(tmp_path / "merged" / "model.safetensors")
    expected = merged_by_peft(checkpoint, tmp_path / "saved")
    assert pushed.keys() == exported.keys() == expected.keys()
    moved = set()
    source = load_file(checkpoint / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.allclose(exported[name], tensor, rtol=0, atol=1e-6), name
        assert torch.equal(exported[name], pushed[name])
        if not torch.equal(exported[name], source[name]):
            moved.add(name)
    adapted = {
        name for name in source if name.startswith(TOWER) and name.removesuffix(".weight").endswith(TOWER_LAYERS)
    }
    assert moved == {name for name in adapted if name.endswith(".weight") and source[name].ndim == 2}


def merged_by_peft(checkpoint: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the weights of transformers' model with an adapter merged by peft; its loading must match every name."""
    import warnings

    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing and of unexpected keys
        merged: Any = PeftModel.from_pretrained(model, adapter)
    return {name: tensor.detach().clone() for name, tensor in merged.merge_and_unload().state_dict().items()}


REFUSALS = (
    (
        "frozen",
        ("q_proj", "qkv"),
        "adapters.targets names 'qkv', which is model.visual.blocks.0.attn.qkv, in the vision tower",
    ),
    ("train", ("proj",), "adapters.targets names 'proj', which is model.visual.patch_embed.proj, no linear layer"),
    ("train", ("patch_embed.proj",), "which is model.visual.patch_embed.proj, no linear layer and not adapted"),
    ("train", ("pos_embed",), "which is model.visual.pos_embed, no linear layer and not adapted"),
    ("train", ("norm1",), "adapters.targets names 'norm1', which is not a layer that can be adapted in this model"),
)


def test_targets_that_cannot_be_adapted_are_refused(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_vl")

    def on_rank() -> list[str]:
        messages = []
        for tower, targets, _ in REFUSALS:
            with pytest.raises(ConfigError) as raised:
                case_backend(Case("single"), checkpoint, adapters=Adapters(targets=targets), vision_tower=tower)
            messages.append(str(raised.value))
        return messages

    [messages] = run_distributed(on_rank, 1, init=False, timeout_s=60)
    for message, (_, _, problem) in zip(messages, REFUSALS, strict=True):
        assert problem in message


def test_adapter_of_a_frozen_tower_is_refused_and_the_language_model_named_alone(
    parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_vl")
    adapter = tower_adapter(checkpoint, 0)

    def on_rank() -> tuple[str, str]:
        with case_backend(Case("single"), checkpoint, adapters=Adapters()) as backend:
            with pytest.raises(Exception) as loading:
                backend.load_adapter("it", adapter, optimizer=False)
            with pytest.raises(ConfigError) as adding:
                backend.add_adapter("it", Lora(targets=("qkv",)))
            backend.add_adapter("text", Lora(rank=2))
            backend.save_adapter("text", tmp_path / "text")
        return str(loading.value), str(adding.value)

    [(loading, adding)] = run_distributed(on_rank, 1, init=False, timeout_s=60)
    assert "adapts model.visual.blocks.0" in loading
    assert "set vision_tower: train" in adding
    assert {name.partition(".layers.")[0] for name in peft_format.read(tmp_path / "text")[1]} == {
        "model.language_model"
    }
