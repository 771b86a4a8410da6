"""A Hugging Face directory from an engine's stream of weights: one rank writes, all of them learn how it went."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.distributed.objects import raise_on_all_ranks
from megascend.errors import CheckpointError
from megascend.huggingface.writer import CheckpointWriter

if TYPE_CHECKING:
    from torch import Tensor

    from megascend.distributed.process_groups import ProcessGroups
    from megascend.huggingface.scalar_head import ScalarHead


def export(
    weights: Iterator[tuple[str, Tensor]],
    source: Path,
    target: Path,
    dtype: str,
    groups: ProcessGroups,
    *,
    tied: bool,
    head: ScalarHead | None = None,
) -> None:
    """Write ``weights`` as a Hugging Face directory; ``target`` appears only when it is complete. Collective.

    It holds the tensors of ``source``, by name, shape and dtype; those that are not built here are copied from it.

    Args:
        weights: a stream that nobody has begun, with the main rank (0) as its receiver.
        dtype: ``float32``, ``float16`` or ``bfloat16``: what the parameters have.
        tied: the output layer is the embedding.
        head: the model's scalar head, which may stand in the place of the source's output layer.

    Raises:
        CheckpointError: on every rank, if ``target`` exists and is not a Hugging Face directory (it would be replaced),
            cannot be written, or would have other tensors than ``source``; what was there before is still there then.
    """
    with contextlib.ExitStack() as stack:
        writer, problem = None, None
        if groups.rank == 0:
            try:
                writer = stack.enter_context(CheckpointWriter(source, target, dtype, tied=tied, head=head))
            except CheckpointError as error:
                problem = error
        raise_on_all_ranks(problem, groups, f"whether there is room for {target}")
        raise_on_all_ranks(_write(weights, writer), groups, f"whether {target} could be written")


def _write(weights: Iterator[tuple[str, Tensor]], writer: CheckpointWriter | None) -> CheckpointError | None:
    """What went wrong, on the rank that writes; raising at once would leave the others waiting."""
    try:
        with contextlib.closing(weights):  # type: ignore[reportArgumentType]  a generator
            for name, tensor in weights:
                if writer is not None:
                    writer.add(name, tensor)
        if writer is not None:
            writer.finish()
    except CheckpointError as error:
        return error
    return None
