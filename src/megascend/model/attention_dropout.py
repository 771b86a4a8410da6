"""Attention dropout that follows ``eval()`` where the attention itself does not.

MindSpeed hands ``keep_prob = 1 - dropout`` to the fused kernel in training and in evaluation alike, so that log-probabilities
of a forward pass without gradients would be noisy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def switched_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """No attention dropout in any module of ``chunks`` until the block ends."""
    undo = []
    for chunk in chunks:
        for module in chunk.modules():
            value = getattr(module, "attention_dropout", None)
            if isinstance(value, float):
                undo.append((module, "attention_dropout", value))
            elif isinstance(value, torch.nn.Dropout):
                undo.append((value, "p", value.p))
    try:
        for owner, name, _ in undo:
            setattr(owner, name, 0.0)
        yield
    finally:
        for owner, name, value in undo:
            setattr(owner, name, value)
