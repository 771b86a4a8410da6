"""Corrections of attention dropout: for MindSpeed's fused attention, which draws its own masks, and for models without it.

MindSpeed passes ``keep_prob = 1 - dropout`` to the kernel in training and in evaluation, and draws from the device's default
random stream, which is the same on all tensor parallel ranks: heads of different ranks would drop the same positions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megascend.changes import patch, patched


@contextlib.contextmanager
def switched_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Switch attention dropout off in all modules of ``chunks`` within the context."""
    attributes: list[tuple[Any, str]] = []
    for chunk in chunks:
        for module in chunk.modules():
            value = getattr(module, "attention_dropout", None)
            # A probability or a Dropout module, depending on the implementation.
            if isinstance(value, float):
                attributes.append((module, "attention_dropout"))
            elif isinstance(value, torch.nn.Dropout):
                attributes.append((value, "p"))
    with contextlib.ExitStack() as stack:
        for owner, name in attributes:
            stack.enter_context(patched(owner, name, 0.0, "attention dropout is off in evaluation"))
        yield


def use_own_stream(chunks: Sequence[torch.nn.Module], config: Any) -> None:
    """Draw dropout from each tensor parallel rank's own random stream, as Megatron's and Transformer Engine's attention do."""
    # With sequence parallelism the ranks' default streams differ already.
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


def skip_stream_switch(chunks: Sequence[torch.nn.Module]) -> None:
    """Disable the switch to the dropout stream in models without attention dropout.

    Transformer Engine's attention switches in every layer, by copies of the generator's state that cost host time and cannot be
    captured in a CUDA graph.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "attention_dropout_ctx", None) is not None:
                reason = "there is no dropout to draw: the random stream is not switched"
                patch(module, "attention_dropout_ctx", contextlib.nullcontext, reason)


def _forked(forward: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    @functools.wraps(forward)
    def function(*args: Any, **kwargs: Any) -> Any:
        # Megatron forks this stream around attention dropout, but not around MindSpeed's fused kernel.
        with get_cuda_rng_tracker().fork():  # type: ignore[reportOptionalMemberAccess]
            return forward(*args, **kwargs)

    return function
