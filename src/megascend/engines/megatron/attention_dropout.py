"""Attention dropout where there is none, and where the fused attention draws its masks itself (MindSpeed).

MindSpeed hands ``keep_prob = 1 - dropout`` to the kernel in training and in evaluation alike, and draws from the device's default
stream, which is the same on all tensor parallel ranks: heads of different ranks would lose the same positions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megascend.changes import patch, restore


@contextlib.contextmanager
def switched_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """No attention dropout in any module of ``chunks`` until the block ends."""
    found: list[tuple[Any, str]] = []
    for chunk in chunks:
        for module in chunk.modules():
            value = getattr(module, "attention_dropout", None)
            if isinstance(value, float):
                found.append((module, "attention_dropout"))
            elif isinstance(value, torch.nn.Dropout):
                found.append((value, "p"))
    undo = []
    try:
        for owner, name in found:
            undo.append((owner, name, patch(owner, name, 0.0, "attention dropout is off in evaluation")))
        yield
    finally:
        for owner, name, before in reversed(undo):
            restore(owner, name, before)


def use_own_stream(chunks: Sequence[torch.nn.Module], config: Any) -> None:
    """Let every tensor parallel rank draw its own masks, as Megatron's and Transformer Engine's attention do.

    With sequence parallelism the ranks' default streams differ already.
    """
    if config.attention_dropout == 0 or config.tensor_model_parallel_size == 1 or config.sequence_parallel:
        return
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if name.endswith("core_attention"):
                patch(
                    module,
                    "forward",
                    _forked(module.forward),
                    "draws dropout from the tensor parallel rank's own stream",
                )


def leave_streams_alone(chunks: Sequence[torch.nn.Module]) -> None:
    """Of models without attention dropout: do not switch to the stream that it would be drawn from.

    Transformer Engine's attention does so in every layer, by copies of the generator's state that cost the host time and that no
    CUDA graph can hold.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "attention_dropout_ctx", None) is not None:
                why = "there is no dropout to draw: the random stream is not switched"
                patch(module, "attention_dropout_ctx", contextlib.nullcontext, why)


def _forked(forward: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    @functools.wraps(forward)
    def function(*args: Any, **kwargs: Any) -> Any:
        with get_cuda_rng_tracker().fork():  # type: ignore[reportOptionalMemberAccess]
            return forward(*args, **kwargs)

    return function
