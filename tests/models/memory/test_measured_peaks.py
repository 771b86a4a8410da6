"""The memory estimate against peaks of real training steps on the CPU: bytes of all tensors (support.memory_cases)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megascend import Parallel
from megascend.apps.plan.search import joined_experts
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.memory.activations import CHUNK, LayerKind, experts_bytes, norm_bytes
from megascend.models.memory.estimate import Estimate
from megascend.models.memory.parameters import stages
from megascend.models.memory.sizes import ModelSizes
from megascend.reference.fla import delta_rule
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed, write_tiny_checkpoint
from megascend.testing.parity import Case, case_backend, case_checkpoint
from support import memory_cases
from support.model_checks import saved_bytes
from support.stacks import first_stack_required


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("memory")
    for name in ("dense", "moe"):
        memory_cases.write_model(name, "cpu", folder / name)
    return {name: folder / name for name in ("dense", "moe")}


def assert_close_to_the_peak(name: str, model: Path) -> Estimate:
    """Compare the estimate of a case with the highest peak of its ranks; return the estimate."""
    case = memory_cases.CASES[name]
    expected = memory_cases.estimate_of(case, "cpu", model)
    ranks = run_distributed(memory_cases.measure, case.ranks, case, "cpu", model, init=False)
    peak = max(rank.peak for rank in ranks)
    assert memory_cases.LOWEST <= expected.tensors / peak - 1 <= memory_cases.HIGHEST, (expected.items, peak)
    return expected


SCRIPT = Path(__file__).parents[3] / "scripts" / "bench.py"


NIGHTLY = ("dp2", "muon dp2", "8bit dp2", "offload dp2", "lora nf4", "moe lora fp8")


@pytest.mark.nightly_cases("lora", "dp2")  # covered: tp2 sequence, moe
@pytest.mark.parametrize(
    "name",
    ["moe", "lora", "tp2 sequence", *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)],
)
def test_the_estimate_is_close_to_the_peak(megatron_imported, models: dict[str, Path], name: str):
    assert_close_to_the_peak(name, models[memory_cases.CASES[name].model])


@pytest.mark.parametrize(
    ("arch", "sizes", "parallel", "shape"),
    [
        # Experts are the largest: EP divides their number, not their matrices.
        ("qwen3_moe", {"moe_intermediate_size": 256}, Parallel(expert=2), (512, 64)),
        ("qwen3_moe", {"moe_intermediate_size": 256}, Parallel(tensor=2, expert=2), (256, 64)),
        ("qwen3", {"intermediate_size": 256}, Parallel(tensor=2), (256, 64)),
    ],
    ids=["ep2", "ep2 etp2", "tp2"],
)
def test_largest_matrix_of_a_layer_is_the_engine_s(
    megatron_imported,
    parity_folder: Path,
    arch: str,
    sizes: dict[str, Any],
    parallel: Parallel,
    shape: tuple[int, int],
) -> None:
    checkpoint = case_checkpoint(parity_folder, arch, **sizes)
    world = parallel.tensor * parallel.expert
    case = Case("matrix", world, parallel, arch=arch)

    def largest() -> tuple[int, ...]:
        with case_backend(case, checkpoint) as backend:
            weights = [w for chunk in backend.engine.bare_chunks for w in chunk.decoder.layers.parameters()]
            return tuple(max(weights, key=torch.numel).shape)

    assert run_distributed(largest, world, init=False) == [shape] * world
    info = inspect_checkpoint(checkpoint)
    for tensors in (info.tensors, joined_experts(info.tensors)):
        [stage] = stages(tensors, plan(parallel, world, info.shape), info.shape.num_layers, info.shape.tied)
        assert stage.layer_matrix == math.prod(shape)


HYBRIDS = {
    "as many value heads": {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64},
    "four for a key head": {"linear_num_value_heads": 16, "linear_key_head_dim": 16, "linear_conv_kernel_dim": 3},
}
"""Settings of linear attention that differ from those of ``support.memory_cases``."""


@first_stack_required
@pytest.mark.parametrize("heads", HYBRIDS)
@pytest.mark.parametrize(
    "name",
    [
        "hybrid packed",
        *(
            pytest.param(f"hybrid {name}", marks=pytest.mark.nightly)
            for name in ("lora", "fp32", "recomputed", "tp2 sequence")
        ),
    ],
)
@pytest.mark.nightly_cases("hybrid packed-as many value heads")  # covered: four for a key head
def test_estimate_of_linear_attention_is_close_to_the_peak(
    megatron_imported, tmp_path_factory: pytest.TempPathFactory, name: str, heads: str
):
    model = tmp_path_factory.mktemp("hybrid") / "model"
    # Built in a process of its own: transformers' classes are mcore-bridge's here.
    sizes = memory_cases.SMALL_HYBRID | HYBRIDS[heads] | {"torch_dtype": "bfloat16", "max_position_embeddings": 4096}
    write_tiny_checkpoint(model, "qwen3_5_text", **sizes)
    assert_close_to_the_peak(name, model)


def test_chunks_are_those_of_the_reference() -> None:
    assert CHUNK == delta_rule.CHUNK


LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 96,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "name", ["packed", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("dense", "lora", "tp2"))]
)
def test_estimate_of_latent_attention_is_close_to_the_peak(
    megatron_imported, tmp_path_factory: pytest.TempPathFactory, name: str
):
    sizes = {name: memory_cases.SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    model = tmp_path_factory.mktemp("latent") / "model"
    write_tiny_checkpoint(model, "deepseek_v3", max_position_embeddings=4096, **sizes, **LATENT)
    expected = assert_close_to_the_peak(name, model)
    assert not any("MLA" in remark for remark in expected.remarks)


@pytest.mark.parametrize(
    ("arch", "precision"),
    [
        ("gpt_oss", "bf16"),  # whose activation is no fused SwiGLU
        pytest.param("gpt_oss", "fp32", marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", "bf16", marks=pytest.mark.nightly),
    ],
)
def test_experts_save_the_counted_bytes(parity_folder: Path, arch: str, precision: Literal["fp32", "bf16"]):
    checkpoint, lengths = case_checkpoint(parity_folder, arch), (256, 192)
    case = Case("saved", precision=precision, micro_batch_tokens=4096)

    def on_rank() -> int:
        with case_backend(case, checkpoint) as backend:
            return saved_bytes(backend, lambda chunk: chunk.decoder.layers[0].mlp, lengths)

    (measured,) = run_distributed(on_rank, 1, init=False, timeout_s=60)
    info = inspect_checkpoint(checkpoint)
    sizes = ModelSizes.of(info, json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
    kind = LayerKind(
        fused=False, bytes=2 if precision == "bf16" else 4, packed=True, frozen=False, rank=0, longest=max(lengths)
    )
    layer = experts_bytes(sizes, plan(Parallel(), 1, info.shape), kind)
    assert sum(lengths) * (layer - norm_bytes(sizes.hidden, kind)) == pytest.approx(measured, rel=0.01)


@pytest.mark.nightly
def test_every_case_of_every_engine(tmp_path: Path):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "memory", "--platform", "cpu", "--json", str(tmp_path / "found.json")],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr[-3000:]
    results = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert {"dense", "fsdp moe", "single lora", "pp2"} <= results.keys()
