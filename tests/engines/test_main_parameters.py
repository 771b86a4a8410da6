"""Main parameters begin with the numbers of the checkpoint's files, whatever the run's precision makes of them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optimizer_ranks
import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend import Adam, Parallel
from megascend.models.registry import proven
from megascend.testing import parity
from megascend.testing.parity import MAX_GRAD_NORM, PROMPT, case_checkpoint, token_lists
from support.forked_programs import run_forked
from support.stacks import stack_marks

pytestmark = pytest.mark.usefixtures("megatron_imported")
FOLDER = Path(__file__).parent
LR, STEPS = 1e-5, 6
"""Steps that change a weight by less than half the distance of two numbers of bf16."""


@dataclass(frozen=True)
class Run:
    """An engine on some ranks."""

    engine: str = "megatron"
    world_size: int = 1
    arch: str = "qwen3"
    stored: torch.dtype = torch.float32
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def adam(**settings: Any) -> dict[str, Any]:
    return {"optimizer": Adam(**settings)}


TIED = {"tie_word_embeddings": True}
PADDED = {"vocab_size": 321}
RUNS = {
    "megatron": Run(),
    "megatron, tied": Run(overrides=TIED),
    "megatron, plain optimizer": Run(options=adam(distributed=False)),
    "megatron, muon": Run(options=adam(kind="muon")),
    "megatron, 8-bit": Run(options=adam(moments="8bit")),
    "megatron, offloaded": Run(options=adam(offload=True)),
    "megatron, half offloaded": Run(options=adam(offload=0.5)),
    "megatron, TP2, padded vocabulary": Run(
        world_size=2, overrides=PADDED, options={"parallel": Parallel(tensor=2, sequence=True)}
    ),
    "megatron, PP2 x VPP2, tied": Run(
        world_size=2, overrides=TIED, options={"parallel": Parallel(pipeline=2, virtual_pipeline=2)}
    ),
    "megatron, DP2": Run(world_size=2),
    "megatron, DP2, gathers overlap": Run(
        world_size=2, options=adam(overlap_grad_reduce=True, overlap_param_gather=True)
    ),
    "megatron, DP2, offloaded": Run(world_size=2, options=adam(offload=True)),
    "megatron, EP2": Run(world_size=2, arch="qwen3_moe", options={"parallel": Parallel(expert=2)}),
    "megatron, fp16": Run(options={"precision": "fp16"}),
    "megatron, fp16 of bf16": Run(stored=torch.bfloat16, options={"precision": "fp16"}),
    "megatron, bf16 of fp16": Run(stored=torch.float16),
    "megatron, bf16 of bf16": Run(stored=torch.bfloat16),
    "megatron, tower": Run(arch="qwen3_vl", options={"vision_tower": "train"}),
    "single": Run("single"),
    "single, tied": Run("single", overrides=TIED),
    "single, muon": Run("single", options=adam(kind="muon")),
    "single, 8-bit": Run("single", options=adam(moments="8bit")),
    "single, experts": Run("single", arch="qwen3_moe"),
    "single, bf16 of fp16": Run("single", stored=torch.float16),
    "single, fp16 of bf16": Run("single", stored=torch.bfloat16, options={"precision": "fp16"}),
    "single, tower": Run("single", arch="qwen3_vl", options={"vision_tower": "train"}),
    "fsdp, 2 ranks, bf16 of fp16": Run("fsdp", 2, stored=torch.float16),
}
IN_CI = (
    "megatron, offloaded",
    "megatron, TP2, padded vocabulary",
    "megatron, PP2 x VPP2, tied",
    "megatron, EP2",
    "single, fp16 of bf16",
    "fsdp, 2 ranks, bf16 of fp16",
)
FAMILIES = {
    f"{engine}: {family.model_type}": Run(engine, arch=family.model_type)
    for engine in ("megatron", "single")
    for family in proven()
}


def stored_as(folder: Path, checkpoint: Path, dtype: torch.dtype) -> Path:
    """Return a copy of a checkpoint in ``dtype``, with numbers that 16 bits cannot hold where it can."""
    copy = folder / "stored"
    shutil.copytree(checkpoint, copy)
    (copy / "tiny_checkpoint.json").unlink()
    weights = load_file(copy / "model.safetensors")
    if dtype == torch.bfloat16:  # fp16 has no numbers as small
        weights = {
            name: weight * torch.where(weight.abs() < weight.abs().median(), 1e-6, 1.0)
            for name, weight in weights.items()
        }
    save_file(
        {name: weight.to(dtype) for name, weight in weights.items()}, copy / "model.safetensors", {"format": "pt"}
    )
    return copy


def results(tmp_path: Path, run: Run, checkpoint: Path, **options: Any) -> dict[str, dict[str, torch.Tensor]]:
    arguments = (str(checkpoint), run.engine, run.world_size)
    options = {"precision": "bf16"} | run.options | options
    if run.engine == "megatron":
        return optimizer_ranks.mains(*arguments, **options)
    torch.save([("mains", arguments, options)], tmp_path / "job")
    completed = run_forked(FOLDER / "optimizer_ranks.py", tmp_path / "job", tmp_path / "result", timeout_s=300)
    assert completed.returncode == 0, completed.stderr[-6000:]
    return torch.load(tmp_path / "result", weights_only=False)[0]


def differing(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name, values in actual.items() if not torch.equal(values, expected[name].double())]


def cases(runs: dict[str, Run], in_ci: tuple[str, ...]) -> list[Any]:
    assert set(in_ci) <= runs.keys()
    return [
        pytest.param(run, id=name, marks=([] if name in in_ci else [pytest.mark.nightly]) + stack_marks(run.arch))
        for name, run in runs.items()
    ]


@pytest.mark.parametrize("run", cases(RUNS, IN_CI))
def test_main_parameters_begin_with_the_numbers_of_the_files(run: Run, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, run.arch, **run.overrides)
    if run.stored != torch.float32:
        checkpoint = stored_as(tmp_path, checkpoint, run.stored)
    assert differing(results(tmp_path, run, checkpoint)["mains"], load_file(checkpoint / "model.safetensors")) == []


HEADS = {engine: Run(engine, options={"head": "reward_model"}) for engine in ("megatron", "single")}


@pytest.mark.parametrize("run", cases(FAMILIES | HEADS, ("megatron: gpt_oss", *HEADS)))
def test_families_and_new_heads_begin_with_the_numbers_of_fp32(run: Run, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, run.arch)
    actual, expected = (
        results(tmp_path, run, checkpoint, by_weight=False, precision=precision)["mains"]
        for precision in ("bf16", "fp32")
    )
    assert differing(actual, expected) == []


@pytest.mark.parametrize(
    "run",
    cases({name: RUNS[name] for name in ("megatron, DP2", "single")}, ("megatron, DP2",)),
)
def test_steps_smaller_than_the_rounding_equal_those_of_a_plain_loop(
    run: Run, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint = case_checkpoint(parity_folder, run.arch)
    optimizer = {"lr": LR, "weight_decay": 0.1, "max_grad_norm": MAX_GRAD_NORM}
    actual = results(tmp_path, run, checkpoint, steps=STEPS, optimizer=Adam(**optimizer))
    job = {
        "checkpoint": str(checkpoint),
        "samples": [{"token_ids": ids, "prompt_length": PROMPT} for ids in token_lists()],
        "loss": "cross_entropy",
        "steps": STEPS,
        "dtype": "bfloat16",  # of the computation: the parameters are fp32
        "weights": True,
        "aux_loss": 0.0,
        **optimizer,
    }
    trained = load_file(parity.reference(parity_folder, "hf_reference.py", job))
    before = load_file(checkpoint / "model.safetensors")
    for name, weight in before.items():
        expected, values = trained[f"weights.{name}"].double(), actual["mains"][name]
        # Adam's steps of gradients near 0 may differ in sign; a beginning that is rounded is farther away than all steps lead.
        assert (values - expected).norm() < 0.3 * (expected - weight.double()).norm(), name
        assert torch.equal(actual["exports"][name], values.to(torch.bfloat16)), name
