"""Time of a step on a device with a flat efficiency: compared with FLOPs and bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from apps.plan.devices import BYTES, RATE, flat, without_traffic
from megascend.apps.plan.hardware import BACKWARD_ATTENTION
from megascend.apps.plan.layers import ALL_LAYERS, BF16, Cost
from megascend.apps.plan.step import ADAM_BYTES, HOST_BYTES_PER_S, StepTime, StepWork, step_time
from megascend.config import Parallel, Recompute
from megascend.models.memory.parameters import StageParameters
from megascend.models.memory.sizes import ModelSizes
from megascend.runtime.topology.model_shape import ModelShape
from megascend.runtime.topology.topology import Topology, plan

H, LAYERS, HEADS, KEYS, WIDTH, FFN, VOCABULARY = 1024, 4, 8, 4, 128, 4096, 32000
LENGTH = 2048
DENSE = ModelSizes(
    hidden=H,
    heads=HEADS,
    head_dim=WIDTH,
    query=HEADS * WIDTH,
    key_value=KEYS * WIDTH,
    ffn=FFN,
    expert_ffn=0,
    shared_ffn=0,
    experts=0,
    topk=0,
    vocabulary=VOCABULARY,
    tied=False,
    qk_norm=False,
    gated=True,
    latent=None,
    with_experts=(False,) * LAYERS,
)
EXPERTS = replace(DENSE, ffn=0, experts=16, topk=4, expert_ffn=512, with_experts=(True,) * LAYERS)
LAYER_WEIGHTS = H * (HEADS + 2 * KEYS) * WIDTH + HEADS * WIDTH * H + 3 * H * FFN
ATTENTION = 2 * LENGTH * HEADS * WIDTH
"""FLOPs of a token in one layer's attention, forward."""


def topology(world: int = 1, experts: int | None = None, **sizes: Any) -> Topology:
    shape = ModelShape(H, LAYERS, HEADS, KEYS, VOCABULARY, FFN, experts, 512 if experts else None)
    expert_tensor = 1 if sizes.get("expert", 1) > 1 else None
    return plan(
        Parallel(**sizes, expert_tensor=expert_tensor, sequence=True if sizes.get("tensor", 1) > 1 else None),
        world,
        shape,
    )


def parameters(dense: int = 0, experts: int = 0, stages: int = 1) -> list[StageParameters]:
    return [StageParameters(dense, experts, VOCABULARY, 0, 0, ()) for _ in range(stages)]


def products(time: StepTime) -> float:
    return sum(time.parts.get(part, 0.0) for part in ("products", "attention", "output head", "recomputation"))


@pytest.mark.parametrize(("frozen", "factor"), [(False, 6), (True, 4)])
def test_products_are_six_flops_for_a_weight_or_four_if_frozen(frozen: bool, factor: int) -> None:
    work = StepWork(2 * LENGTH, LENGTH, 3, rank=8 if frozen else 0, adapted=frozenset())
    time = step_time(DENSE, topology(), parameters(), work, without_traffic(flat()))
    weights = LAYERS * LAYER_WEIGHTS + H * VOCABULARY
    attention = LAYERS * ATTENTION * (1 + BACKWARD_ATTENTION)
    assert products(time) == pytest.approx(6 * LENGTH * (factor * weights + attention) / RATE)
    assert time.parts["output head"] == pytest.approx(6 * LENGTH * factor * H * VOCABULARY / RATE)


def test_full_recomputation_repeats_the_forward_pass_of_layers() -> None:
    work = StepWork(LENGTH, LENGTH, 2, Recompute(granularity="full"))
    time = step_time(DENSE, topology(), parameters(), work, without_traffic(flat()))
    forward = LAYERS * (2 * LAYER_WEIGHTS + ATTENTION)
    assert time.parts["recomputation"] == pytest.approx(2 * LENGTH * forward / RATE)


def test_selective_recomputation_repeats_its_modules() -> None:
    work = StepWork(LENGTH, LENGTH, 1, Recompute(granularity="selective", modules=("mlp",)))
    time = step_time(DENSE, topology(), parameters(), work, without_traffic(flat()))
    assert time.parts["recomputation"] == pytest.approx(LENGTH * LAYERS * 2 * 3 * H * FFN / RATE)


def test_adapters_add_two_products_forward_and_four_backward() -> None:
    plain, adapted = (
        step_time(DENSE, topology(), parameters(), work, without_traffic(flat()))
        for work in (
            StepWork(LENGTH, LENGTH, 1, rank=8, adapted=frozenset()),
            StepWork(LENGTH, LENGTH, 1, rank=8, adapted=ALL_LAYERS),
        )
    )
    qkv, out = (HEADS + 2 * KEYS) * WIDTH, HEADS * WIDTH
    # A of each slice has the layer's input, and B a part of its output.
    elements = 8 * ((3 * H + qkv) + (out + H) + (2 * H + 2 * FFN) + (FFN + H))
    assert products(adapted) - products(plain) == pytest.approx(6 * LENGTH * LAYERS * elements / RATE)


def test_experts_multiply_the_rows_that_arrive() -> None:
    device = without_traffic(flat())
    single = Cost(EXPERTS, topology(1, 16), device, LENGTH, LENGTH).layer(0)
    four = Cost(EXPERTS, topology(4, 16, expert=4), device, LENGTH, LENGTH).layer(0)
    rows = 4 * LENGTH
    assert single.forward["moe"]["experts"] == pytest.approx(2 * rows * 3 * H * 512 / RATE)
    # Equal loads: as many rows arrive as are sent, for a quarter of the experts.
    assert four.forward["moe"]["experts"] == pytest.approx(single.forward["moe"]["experts"])
    exchange = device.collective("all_to_all", BF16 * rows * H, [0, 1, 2, 3])
    assert four.forward["moe"]["expert parallel"] == pytest.approx(2 * exchange)
    assert four.backward["expert parallel"] == pytest.approx(2 * exchange)


def test_window_limits_attention() -> None:
    all_tokens, window = (
        Cost(DENSE, topology(), without_traffic(flat()), 8192, 8192, windows=(reach,) * LAYERS).layer(0)
        for reach in (None, 512)
    )
    # 512 tokens and two tiles of 128 on each row, of 4096 on average.
    assert window.forward_costs["attention"] == pytest.approx(all_tokens.forward_costs["attention"] * 768 / 4096)


def test_update_moves_the_share_of_the_optimizer_and_reduces_gradients() -> None:
    count = 10**9
    work = StepWork(LENGTH, LENGTH, 1)
    time = step_time(DENSE, topology(4), parameters(count), work, flat())
    assert time.parts["optimizer"] == pytest.approx(((ADAM_BYTES + 4) * count / 4 + 4 * count) / BYTES)
    assert time.parts["gradient reduction"] == pytest.approx(flat().collective("reduce_scatter", 4 * count, range(4)))
    assert time.parts["parameter gathering"] == pytest.approx(flat().collective("all_gather", 2 * count, range(4)))
    offloaded = step_time(DENSE, topology(4), parameters(count), replace(work, offloaded=0.5), flat())
    # Main parameter and moments of half the share; both directions at once.
    assert offloaded.parts["optimizer"] == pytest.approx(0.5 * 12 * count / 4 / HOST_BYTES_PER_S)
    hidden = step_time(
        DENSE, topology(4), parameters(count), replace(work, overlap_grad_reduce=True, micro_batches=4), flat()
    )
    assert hidden.parts["gradient reduction"] < time.parts["gradient reduction"]
    assert hidden.parts["gradient reduction"] >= time.parts["gradient reduction"] / 8 * 0.999
