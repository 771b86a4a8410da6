"""Which layouts the parity section trains, and how far from Hugging Face each may be. Pure."""

from __future__ import annotations

from dataclasses import replace

from megascend.config import Parallel
from megascend.testing.parity import Case, matrix

FROM_MATRIX = (
    "single",
    "full recompute",
    "MoE single",
    "bf16",
    "fp16",
    "TP2",
    "TP2 + SP",
    "PP2",
    "CP2, ring",
    "CP2, all_gather",
    "DP2, distributed optimizer",
    "MoE EP2",
    "MoE TP2 x EP2 + SP",
    "bf16 TP2 + SP",
    "TP2 x PP2",
    "TP2 x CP2, ring",
    "TP2 x DP2, distributed optimizer",
    "MoE TP2 x PP2 x EP2",
)
QUICK = ("single", "TP2 + SP", "MoE EP2")
PADDED = {"packing": False, "micro_batch_tokens": 200}
ON_EIGHT = (
    Case("TP2 x PP2 x DP2", 8, Parallel(tensor=2, pipeline=2)),
    Case("TP2 x PP2 x CP2, ring", 8, Parallel(tensor=2, pipeline=2, context=2), packing=False, micro_batch_tokens=200),
    Case("MoE TP2 x EP4 + SP", 8, Parallel(tensor=2, expert=4, expert_tensor=1), arch="qwen3_moe", logits_bound=2e-5),
)

CARD_BOUNDS = {"fp32": (2e-3, 1e-2), "fp16": (0.05, 0.3), "bf16": (0.15, 0.6)}
"""Largest differences of loss and gradient norm on cards, by precision. No card has been seen: they are what two GPUs stay
within ten times (fp32), or what tiny models lose to 16 bits anywhere."""
CARD_LOGITS_BOUND = 2e-3


def cases(simulated: bool, quick: bool) -> list[Case]:
    """Every layout, by world size; with the bounds of a card, or, simulated, those of docs/numerics.md."""
    known = {case.name: case for case in matrix("npu")}
    wanted = [known[name] for name in (QUICK if quick else FROM_MATRIX)] + ([] if quick else list(ON_EIGHT))
    wanted.sort(key=lambda case: case.world_size)
    return wanted if simulated else [on_cards(case) for case in wanted]


def on_cards(case: Case) -> Case:
    """The case with the bounds of a card."""
    loss, norm = CARD_BOUNDS[case.precision]
    return replace(case, loss_bound=loss, norm_bound=norm, logits_bound=CARD_LOGITS_BOUND)


def largest_power_of_two(cards: int) -> int:
    """How many of the cards a layout of powers of two can use, up to eight."""
    return max(size for size in (1, 2, 4, 8) if size <= cards)
