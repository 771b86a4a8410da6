"""What a step computes on, for the estimate of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Items = dict[str, int]
"""Bytes by what they are for."""

Kernels = Literal["fused", "plain"]
"""``fused``: Transformer Engine's and Triton's, on CUDA; also taken for NPUs, where nothing was measured. ``plain``: PyTorch's on
a CPU."""

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Workload:
    """The largest micro batch of a run.

    Attributes:
        tokens: padding included, over all context parallel ranks.
        micro_batches: most that a rank has in a step.
        packed: samples of different length lie one after the other; False: a padded batch, which samples of one length are, too.
        longest: tokens of the longest sample; None: one sample may fill the micro batch.
    """

    tokens: int
    micro_batches: int = 1
    packed: bool = True
    longest: int | None = None
