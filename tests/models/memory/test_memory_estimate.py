"""Formulas of the memory estimate, without a process: compared with peaks measured on an H200, and for consistency."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from shapes import QWEN3_1_7B, QWEN3_4B, SIX_LAYERS_OF_30B_A3B, info_of

from megascend.config import Lora, Parallel, RunConfig
from megascend.models.base import LinearAttention
from megascend.models.memory import activations
from megascend.models.memory.estimate import Estimate, estimate
from megascend.models.memory.parameters import stages
from megascend.models.memory.sizes import Kernels, LayerKey, ModelSizes, TeacherSizes, Workload
from megascend.runtime.topology.topology import plan
from megascend.training.kernels import linear_logprobs

GIB = 2**30
USUAL: dict[str, Any] = {"model": "m", "output": "o", "data": {"path": "d"}}


def estimated(
    model: dict[str, Any],
    tokens: int,
    world_size: int = 1,
    kernels: Kernels = "fused",
    micro_batches: int = 4,
    longest: int | None = None,
    packed: bool = False,
    **settings: Any,
) -> Estimate:
    config = RunConfig(**USUAL | settings)
    info = info_of(model)
    topology = plan(config.parallel, world_size, info.shape)
    result = estimate(config, info, model, topology, Workload(tokens, micro_batches, packed, longest), kernels)
    assert result is not None
    return result


# Peaks of torch's allocator: benchmarks/performance/training.json and lora.json; the mixture of experts by the same script.
MEASURED = [
    ("1.7B, 8192 tokens", QWEN3_1_7B, 8192, {}, 47.0),
    ("1.7B, 12288 tokens", QWEN3_1_7B, 12288, {}, 55.4),
    ("4B, 8192 tokens", QWEN3_4B, 8192, {}, 102.1),
    ("MoE, 8192 tokens", SIX_LAYERS_OF_30B_A3B, 8192, {}, 80.4),
    ("MoE, 16384 tokens", SIX_LAYERS_OF_30B_A3B, 16384, {}, 86.3),
    ("LoRA, 8192 tokens", QWEN3_1_7B, 8192, {"lora": {"rank": 16}}, 21.7),
    ("LoRA, 16384 tokens", QWEN3_1_7B, 16384, {"lora": {"rank": 16}}, 38.6),
]


@pytest.mark.parametrize(("name", "model", "tokens", "settings", "gib"), MEASURED, ids=[case[0] for case in MEASURED])
def test_peaks_measured_on_an_h200(name: str, model: dict[str, Any], tokens: int, settings: dict[str, Any], gib: float):
    result = estimated(model, tokens, **settings)
    assert result.tensors / GIB == pytest.approx(gib, rel=0.03)
    assert result.total > result.tensors


SMALLER = QWEN3_1_7B | {"num_hidden_layers": 12}
SMALLER_EXPERTS = SIX_LAYERS_OF_30B_A3B | {"num_hidden_layers": 4, "num_experts": 32}
LORA: dict[str, Any] = {"lora": {"rank": 16}}
FULL: dict[str, Any] = {"recompute": {"granularity": "full"}}

# Peaks of torch's allocator in MiB that scripts/bench.py memory read on an H200.
MEASURED_CASES = [
    ("dense", SMALLER, {}, 24546.7),
    ("fp32", SMALLER, {"precision": "fp32"}, 59850.5),
    ("recomputed", SMALLER, FULL, 17618.9),
    ("moe", SMALLER_EXPERTS, {}, 27853.7),
    ("lora", SMALLER, LORA, 10717.5),
    ("moe lora", SMALLER_EXPERTS, LORA, 8256.9),
    ("fsdp", SMALLER, {"engine": "fsdp"}, 24917.6),
    ("fsdp recomputed", SMALLER, {"engine": "fsdp"} | FULL, 15294.6),
    ("fsdp moe", SMALLER_EXPERTS, {"engine": "fsdp"}, 24796.3),
    ("fsdp lora", SMALLER, {"engine": "fsdp"} | LORA, 13240.5),
    ("single", SMALLER, {"engine": "single"}, 27780.5),
]


@pytest.mark.parametrize(("name", "model", "settings", "mib"), MEASURED_CASES, ids=[case[0] for case in MEASURED_CASES])
def test_cases_measured_on_an_h200(name: str, model: dict[str, Any], settings: dict[str, Any], mib: float):
    result = estimated(model, 8192, micro_batches=1, longest=4096, **settings)
    assert -0.05 <= result.tensors / 2**20 / mib - 1 <= 0.15


def test_the_chunks_of_the_head_are_those_of_its_kernel():
    assert activations.CHUNK_BYTES == linear_logprobs.CHUNK_BYTES
    from megascend.models.memory.activations import LayerKind

    kind = LayerKind(fused=True, bytes=2, packed=False, frozen=True, rank=0, longest=64)
    rows, hidden = 151936, 2048
    chunk = linear_logprobs.chunk_size(rows, 2)
    size = activations.head_bytes(hidden, rows, 8192, kind, trained=False)
    assert size == 2 * chunk * rows + 2 * hidden * 8192


@pytest.mark.parametrize(
    ("model", "world_size", "parallel"),
    [
        (QWEN3_1_7B, 2, Parallel(tensor=2)),
        (QWEN3_4B, 8, Parallel(tensor=2, pipeline=4, virtual_pipeline=3)),
        (QWEN3_4B, 8, Parallel(tensor=2, pipeline=2, virtual_pipeline=2, pipeline_layout="E|t*11|t*24|tL")),
        (SIX_LAYERS_OF_30B_A3B, 8, Parallel(tensor=2, expert=4, expert_tensor=1)),
    ],
)
def test_ranks_together_hold_every_parameter(model: dict[str, Any], world_size: int, parallel: Parallel):
    info = info_of(model)
    topology = plan(parallel, world_size, info.shape)
    per_stage = stages(info.tensors, topology, info.shape.num_layers, tied=model["tie_word_embeddings"])
    assert sorted(layer for stage in per_stage for layer in stage.layers) == list(range(info.shape.num_layers))
    experts = sum(math.prod(header.shape) for name, header in info.tensors.items() if ".experts." in name)
    assert sum(stage.experts for stage in per_stage) * topology.expert * topology.expert_tensor == experts
    replicated = sum(
        math.prod(header.shape)
        for name, header in info.tensors.items()
        if len(header.shape) == 1 or ".gate.weight" in name
    )
    sharded = info.parameter_count - experts - replicated
    if model["tie_word_embeddings"] and topology.pipeline > 1:
        sharded += model["vocab_size"] * model["hidden_size"]  # on the first stage and on the last
    assert sum(stage.dense for stage in per_stage) == sharded / topology.tensor + replicated


@pytest.mark.parametrize(("tensor", "expert_tensor"), [(1, 1), (4, 1), (4, 4)])
def test_recomputing_an_activation_frees_the_rows_of_a_rank(tensor: int, expert_tensor: int):
    parallel = {"tensor": tensor, "expert": 4 // expert_tensor, "expert_tensor": expert_tensor}
    plain, recomputed = (
        estimated(SIX_LAYERS_OF_30B_A3B, 8192, 4, parallel=parallel, recompute=recompute)
        for recompute in ({}, {"granularity": "selective", "modules": ["moe_act"]})
    )
    # Every token is computed by eight experts, each on one rank, or by all ranks, each with its part of the expert.
    rows, width = 8 * 8192 // tensor * expert_tensor, 768 // expert_tensor
    freed = plain.items["activations"] - recomputed.items["activations"]
    assert freed == pytest.approx(6 * 2 * rows * width, rel=1e-6)


def test_recomputing_attention_frees_nothing_of_layers_without_softmax():
    info = info_of(QWEN3_4B)
    sizes = replace(ModelSizes.of(info, QWEN3_4B), linear=LinearAttention((True,), 16, 32, 128, 128, 4))
    config = RunConfig(**USUAL | {"precision": "fp32"})
    workload = Workload(8192, 1, packed=False)
    kind = activations.LayerKind.of(config, workload, "fused")
    topology = plan(Parallel(), 1, info.shape)
    softmax, linear = (
        activations.layer_bytes(sizes, topology, kind, LayerKey(False, linear, "")) for linear in (False, True)
    )
    assert softmax.probabilities > 4 * 32 * 8192
    assert linear.probabilities == 0


def test_states_are_shared_by_data_parallel_ranks():
    single, four = (estimated(QWEN3_1_7B, 4096, world_size) for world_size in (1, 4))
    for item in ("main parameters", "moments"):
        assert four.items[item] == pytest.approx(single.items[item] / 4, rel=1e-6)
    for item in ("parameters", "gradients", "activations"):
        assert four.items[item] == single.items[item]
    unsharded = estimated(QWEN3_1_7B, 4096, 4, optimizer={"distributed": False})
    assert unsharded.items == single.items


def test_shards_of_engine_fsdp():
    parameters = info_of(QWEN3_1_7B).parameter_count
    for replicate in (1, 2):
        result = estimated(QWEN3_1_7B, 4096, 8, engine="fsdp", fsdp={"replicate": replicate})
        assert result.items["parameters"] == pytest.approx(4 * parameters * replicate / 8)
        assert result.items["moments"] == 2 * result.items["parameters"]
    offloaded = estimated(QWEN3_1_7B, 4096, 8, engine="fsdp", fsdp={"offload": True})
    assert not {"parameters", "moments", "gradients"} & offloaded.items.keys()


@pytest.mark.parametrize(
    "names", [{}, {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}], ids=["qwen", "mixtral"]
)
def test_gate_and_up_of_an_expert_have_one_a(names):
    info = info_of(SIX_LAYERS_OF_30B_A3B)
    topology = plan(Parallel(), 1, info.shape)
    tensors = {
        name
        if ".experts." not in name
        else re.sub(r"\w+_proj", lambda match: names.get(match[0], match[0]), name): header
        for name, header in info.tensors.items()
    }
    lora = Lora(rank=16, targets=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
    [parameters] = stages(tensors, topology, 6, tied=False, lora=lora)
    factors = 6 * 128 * 16 * ((2048 + 2 * 768) + (768 + 2048))
    assert parameters.adapter.factors == factors
    assert parameters.adapter.bytes(2) == (16 + 6) * factors


@pytest.mark.parametrize("swapped", [True, False])
def test_teacher_on_a_gpu_has_its_weights_in_host_memory_or_on_the_device(swapped: bool):
    config = RunConfig(**USUAL, engine="megatron" if swapped else "fsdp")
    info, large = info_of(QWEN3_1_7B), info_of(QWEN3_4B)
    teacher = TeacherSizes(large, ModelSizes.of(large, QWEN3_4B), swapped, "jsd")
    topology = plan(Parallel(), 8, info.shape)
    plain, taught = (
        estimate(config, info, QWEN3_1_7B, topology, Workload(8192, 4, step_tokens=20000, teacher=other), "fused")
        for other in (None, teacher)
    )
    assert plain is not None
    assert taught is not None
    assert plain.host == {}
    states = {"teacher's states": 2 * 2 * 2560 * 20000}
    if swapped:
        assert taught.host == states | {"teacher": 2 * taught.items["parameters"]}
        assert "teacher" not in taught.items
    else:
        assert taught.host == states
        assert taught.items["teacher"] == 2 * large.parameter_count // 8
    assert taught.items["teacher's output layer"] == 2 * 151936 * 2560
    # Two buffers in bf16 and six copies in fp32 of a chunk of 384 tokens, a multiple of 128.
    assert taught.items["output head"] == (2 * 2 + 6 * 4) * 384 * 151936 + 2 * (2048 + 2560) * 8192
    # Its log-probabilities alone need no states, and no logits beside the model's.
    scored = Workload(8192, 4, step_tokens=20000, teacher=replace(teacher, loss=None))
    policy = estimate(config, info, QWEN3_1_7B, topology, scored, "fused")
    assert policy is not None
    assert policy.items["output head"] == plain.items["output head"]
    assert "teacher's states" not in policy.host


def test_8bit_moments_are_counted_with_their_scales():
    plain, eight = (
        estimated(QWEN3_1_7B, 8192, optimizer={"moments": moments}).items["moments"] for moments in ("fp32", "8bit")
    )
    assert eight / plain == pytest.approx((1 + 4 / 256) / 4)


def test_offloaded_state_is_counted_in_host_memory():
    parameters = info_of(QWEN3_1_7B).parameter_count
    plain = estimated(QWEN3_1_7B, 8192, 2)
    offloaded, half = (estimated(QWEN3_1_7B, 8192, 2, optimizer={"offload": offload}) for offload in (True, 0.5))
    assert offloaded.host == {"optimizer state": pytest.approx(12 * parameters / 2, rel=1e-6)}
    assert half.host["optimizer state"] == pytest.approx(offloaded.host["optimizer state"] / 2, rel=1e-6)
    buffers = 3 * 3 * 4 * 2**22
    assert plain.tensors - offloaded.tensors == pytest.approx(12 * parameters / 2 - buffers, rel=1e-6)
    assert not {"moments", "main parameters"} & offloaded.items.keys()
    # With few activations the peak is at the start, when Megatron makes the main parameters.
    assert (
        estimated(QWEN3_1_7B, 128, optimizer={"offload": True}).items["main parameters at the start"] == 4 * parameters
    )


@pytest.mark.parametrize(("method", "size"), [("fp8", 1 + 4 / 128), ("nf4", 0.5 + 4 / 64)])
def test_quantised_base_weights_are_counted_with_their_scales(method: str, size: float):
    model = SIX_LAYERS_OF_30B_A3B
    settings: dict[str, Any] = LORA | {"base_weights": method}
    info = info_of(model)
    quantised = sum(
        math.prod(header.shape)
        for name, header in info.tensors.items()
        if name.removesuffix(".weight").endswith(
            ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        )
    )
    plain, items = (estimated(model, 8192, **options).items for options in (LORA, settings))
    assert plain["parameters"] - items["parameters"] == pytest.approx((2 - size) * quantised, rel=1e-6)
    experts = math.prod((model["num_experts"], 2 * model["moe_intermediate_size"], model["hidden_size"]))
    assert items["dequantised weights"] > 2 * experts
    assert "dequantised weights" not in plain


def test_constants_are_those_of_the_modules_that_import_torch():
    from megascend.engines.common import blockwise_adamw
    from megascend.models.memory import parameters
    from megascend.training.lora import quantised_weights

    assert (blockwise_adamw.BLOCK, blockwise_adamw.CHUNK) == (parameters.QUANTISED_BLOCK, parameters.QUANTISED_CHUNK)
    assert quantised_weights.CHUNK == parameters.DEQUANTISED_CHUNK
    assert parameters.BASE_BYTES == {"fp8": 1 + 4 / 128, "nf4": 0.5 + 4 / 64}
    assert quantised_weights.BLOCKS == {"fp8": 128, "nf4": 64}
