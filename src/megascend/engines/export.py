"""A Hugging Face directory from an engine's stream of weights: one rank writes, all of them learn how it went."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.distributed.objects import raise_on_all_ranks
from megascend.errors import CheckpointError, CollectiveTimeoutError, ProcessGroupError
from megascend.huggingface.files import TensorHeader, companions
from megascend.huggingface.safetensors_writer import DTYPES
from megascend.huggingface.writer import CheckpointWriter, check_target, exported_config, require_same_tensors
from megascend.io.paths import stays, why_not_writable

if TYPE_CHECKING:
    from torch import Tensor

    from megascend.distributed.process_groups import ProcessGroups
    from megascend.huggingface.info import ModelInfo

_FAULTS = (OSError, ValueError, TypeError, LookupError, AttributeError)
"""What files and names that nobody foresaw raise on the rank that writes, while others wait for its word."""
_BROKEN_GROUPS = (CollectiveTimeoutError, ProcessGroupError)
"""Errors, some of them OSErrors, after which ranks cannot agree on anything: another collective would wait in vain."""


def export(
    weights: Iterator[tuple[str, Tensor]],
    source: Path,
    target: Path,
    dtype: str,
    groups: ProcessGroups,
    info: ModelInfo,
) -> None:
    """Write ``weights`` as a Hugging Face directory; ``target`` appears only when it is complete. Collective.

    It holds the tensors of ``source``, by name and shape, in ``dtype``; what is fp32 in ``source`` and not trained stays fp32,
    and tensors that are not built here are copied from it as they are.

    Args:
        weights: a stream that nobody has begun, with the main rank (0) as its receiver.
        dtype: ``float32``, ``float16`` or ``bfloat16``: what the parameters have.
        info: of the model as it was built from ``source``.

    Raises:
        CheckpointError: on every rank, if ``target`` exists and is not a Hugging Face directory (it would be replaced),
            cannot be written, or would have other tensors than ``source``; what was there before is still there then.
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
    """Refuse what would keep :func:`export` from succeeding after hours of training. Collective.

    Args:
        weights: the stream of an export, on torch's ``meta`` device.
        replaces: what is at ``target`` now will be gone by then.

    Raises:
        CheckpointError: on every rank: the export would hold other tensors than ``source``, a file beside the weights cannot be
            read, or ``target`` cannot be written.
    """
    problem: CheckpointError | None = None
    try:
        with contextlib.closing(weights):  # type: ignore[reportArgumentType]  a generator
            written = {
                name: TensorHeader(DTYPES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))
                for name, tensor in weights
            }
        if groups.rank == 0:
            require_same_tensors(source, info, written, dtype)
            exported_config(source, info, dtype)
            for path in companions(source):
                with path.open("rb") as file:
                    file.read(1)
            gone = replaces and not stays(target)
            if not gone:
                check_target(target)
            if reason := why_not_writable(target.parent if gone else target):
                problem = CheckpointError(f"export: {target} cannot be written: {reason}")
    except CheckpointError as error:
        problem = error
    except _BROKEN_GROUPS:
        raise
    except _FAULTS as error:
        problem = _unexpected(error)
    raise_on_all_ranks(problem, groups, f"whether {target} can be written at the end")


def _unexpected(error: Exception) -> CheckpointError:
    problem = CheckpointError(f"export: {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem
