"""Export of an engine's weights to a Hugging Face directory: one rank writes, and all ranks raise if it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.engines.common.weight_stream import header_of
from megascend.errors import CheckpointError, CollectiveTimeoutError, ProcessGroupError
from megascend.models.checkpoint_files.files import companions
from megascend.models.checkpoint_files.writer import (
    CheckpointWriter,
    check_target,
    exported_config,
    require_same_tensors,
)
from megascend.runtime.distributed.objects import raise_on_all_ranks
from megascend.runtime.io.paths import is_kept, unwritable_reason

if TYPE_CHECKING:
    from torch import Tensor

    from megascend.models.checkpoint_files.info import ModelInfo
    from megascend.runtime.distributed.process_groups import ProcessGroups

_FAULTS = (OSError, ValueError, TypeError, LookupError, AttributeError)
"""Unforeseen errors of the writing rank (files, names), which it must report to the ranks that wait for it."""
_BROKEN_GROUPS = (CollectiveTimeoutError, ProcessGroupError)
"""Errors, some of them OSErrors, after which any further collective would only time out."""


def export(
    weights: Iterator[tuple[str, Tensor]],
    source: Path,
    target: Path,
    dtype: str,
    groups: ProcessGroups,
    info: ModelInfo,
) -> None:
    """Write ``weights`` as a Hugging Face directory; ``target`` appears only when it is complete. Collective.

    It holds the tensors of ``source``, by name and shape, in ``dtype``; tensors that are fp32 in ``source`` and not trained stay
    fp32, and tensors that the model does not have are copied unchanged.

    Args:
        weights: a stream that has not been started, with the main rank (0) as its receiver.
        dtype: ``float32``, ``float16`` or ``bfloat16``: the parameters' dtype.
        info: description of the model that was built from ``source``.
    """
    with contextlib.ExitStack() as stack:
        writer, problem = None, None
        if groups.rank == 0:
            try:
                writer = stack.enter_context(CheckpointWriter(source, target, dtype, info))
            except CheckpointError as error:
                problem = error
            except _FAULTS as error:
                problem = _unexpected(error)
        # Two exchanges: no rank starts the stream before rank 0 can write.
        raise_on_all_ranks(problem, groups, f"the preparation of {target}")
        raise_on_all_ranks(_write(weights, writer), groups, f"the write of {target}")


def _write(weights: Iterator[tuple[str, Tensor]], writer: CheckpointWriter | None) -> CheckpointError | None:
    """Write the stream, and return the error, if any: raising at once would leave the other ranks waiting."""
    try:
        # Closing the stream after an error tells the other ranks, which wait in its next barrier.
        with contextlib.closing(weights):  # type: ignore[reportArgumentType]  a generator
            for name, tensor in weights:
                if writer is not None:
                    writer.add(name, tensor)
        if writer is not None:
            writer.finish()
    except CheckpointError as error:
        return error
    except _BROKEN_GROUPS:
        raise
    except _FAULTS as error:
        return _unexpected(error)
    return None


def check_export(
    weights: Iterator[tuple[str, Tensor]],
    source: Path,
    target: Path,
    dtype: str,
    groups: ProcessGroups,
    info: ModelInfo,
    *,
    replaces: bool = False,
) -> None:
    """Raise before training an error with which :func:`export` would fail after it. Collective.

    Args:
        weights: the stream of an export, on torch's ``meta`` device.
        replaces: the current content of ``target`` will have been removed by then.
    """
    problem: CheckpointError | None = None
    try:
        with contextlib.closing(weights):  # type: ignore[reportArgumentType]  a generator
            # On all ranks: the stream is collective, also on meta tensors.
            headers = {name: header_of(tensor) for name, tensor in weights}
        if groups.rank == 0:
            require_same_tensors(source, info, headers, dtype)
            check_export_files(source, target, dtype, info, replaces=replaces)
    except CheckpointError as error:
        problem = error
    except _BROKEN_GROUPS:
        raise
    except _FAULTS as error:
        problem = _unexpected(error)
    raise_on_all_ranks(problem, groups, f"the check of {target}")


def check_export_files(source: Path, target: Path, dtype: str, info: ModelInfo, *, replaces: bool) -> None:
    """Raise CheckpointError if files of ``source`` cannot be read, or ``target`` cannot be written; see :func:`check_export`."""
    try:
        exported_config(source, info, dtype)
        for path in companions(source):
            with path.open("rb") as file:
                # A file that can be opened may still be unreadable.
                file.read(1)
        removed = replaces and not is_kept(target)
        if not removed:
            check_target(target)
        if reason := unwritable_reason(target.parent if removed else target):
            raise CheckpointError(f"export: {target} cannot be written: {reason}")
    except CheckpointError:
        raise
    except _FAULTS as error:
        raise _unexpected(error) from error


def _unexpected(error: Exception) -> CheckpointError:
    problem = CheckpointError(f"export: {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem
