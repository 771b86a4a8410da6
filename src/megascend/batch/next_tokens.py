"""A micro batch of single tokens, each of which continues a sequence of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megascend.batch.micro_batch import MicroBatch
from megascend.batch.packing import round_up
from megascend.kernels.host_copy import to_device


def next_tokens(
    tokens: Sequence[int],
    places: Sequence[int],
    adapter_index: Sequence[int],
    device: torch.device,
    *,
    multiple: int = 1,
    cached: Any = None,
) -> MicroBatch:
    """One row [1, n] of tokens that do not see each other: attention is that of ``cached``.

    Args:
        tokens: token ids.
        places: of each in its sequence.
        adapter_index: of each, as in :class:`MicroBatch`, ascending.
        multiple: that n is padded to with copies of the last token.
        cached: see ``MicroBatch.cached``; None: a micro batch that only keeps other ranks company.
    """
    count = len(tokens)
    total = round_up(count, multiple)
    members = [min(number, count - 1) for number in range(total)]
    ids, positions = (to_device(torch.tensor([of[member] for member in members]), device) for of in (tokens, places))
    numbers = to_device(torch.arange(total), device)
    return MicroBatch(
        members=members,
        lengths=[1] * total,
        padded_lengths=[1] * total,
        input_ids=ids[None],
        position_ids=positions[None],
        packed=None,
        targets=ids,
        weights=torch.zeros(total, device=device),
        fields={},
        sample=numbers,
        place=numbers,
        pairs=torch.empty(0, 2, dtype=torch.int64, device=device),
        adapter_index=[adapter_index[member] for member in members],
        positions=[torch.zeros(1, dtype=torch.int64)] * total,
        padding=numbers >= count,
        dummy=cached is None,
        cached=cached,
    )
