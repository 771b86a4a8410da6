"""Stream weights out of a model on several ranks: a rank that leaves the stream is an error on the others, not a hang."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.exported import differences
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.safetensors_writer import DTYPES
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.distributed.process_groups import ProcessGroups


def header_of(tensor: Tensor) -> TensorHeader:
    """Return the header that a tensor has in a checkpoint's file."""
    return TensorHeader(DTYPES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))


class StreamStopped(Exception):
    """A rank has left the stream."""

    def __init__(self, rank: int, point: str, reason: str) -> None:
        super().__init__(rank, point, reason)
        self.rank, self.point, self.reason = rank, point, reason


class ExportBarrier:
    """Joins all ranks over Gloo during a stream: before each layer, and at the end.

    Args:
        layers: number of layers of the model; only :meth:`join_all` uses it.
    """

    def __init__(self, groups: ProcessGroups, layers: int = 0) -> None:
        self._groups, self._layers = groups, layers
        self._reason: str | None = None
        self._layer = 0

    def stop(self, reason: str) -> None:
        """Make all ranks raise StreamStopped at the next barrier, because this rank stops reading."""
        self._reason = reason

    def before_layer(self) -> None:
        """Raise StreamStopped on every rank if any has stopped."""
        self._join(f"before layer {self._layer}")
        self._layer += 1

    def at_end(self) -> None:
        """Join the barrier after the last tensor; raises like :meth:`before_layer`."""
        self._join("after the last layer")

    def join_all(self) -> None:
        """Join every barrier, on a rank that does not take part in the stream, until the end or until a reader stops."""
        # A reader that stops early raises at the readers; this rank only has to leave the barrier with them.
        with contextlib.suppress(StreamStopped), self._groups.monitor.phase("named weights"):
            for _ in range(self._layers):
                self.before_layer()
            self.at_end()

    def _join(self, point: str) -> None:
        reasons = gather_objects(self._reason, "world", self._groups, f"named weights, {point}")
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise StreamStopped(rank, point, reason)


def stream_weights(
    weights: Iterator[tuple[str, Tensor]],
    barrier: ExportBarrier,
    groups: ProcessGroups,
    headers: Mapping[str, TensorHeader],
    dtype: torch.dtype,
    *,
    receives: bool,
    finish: Callable[[str, Tensor], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the checkpoint, tensor), and end on all ranks if one leaves the stream. Collective.

    A rank whose consumer raises, breaks off or closes the stream reports it at the next barrier; the stream then ends everywhere,
    with an error on receivers, which would otherwise take the tensors so far for the complete model.

    Args:
        weights: joins ``barrier`` before each layer; yields nothing on ranks that do not receive.
        headers: headers of the checkpoint's tensors; exported names, shapes and dtypes are compared with them.
        dtype: dtype of the model's parameters.
        finish: called with every tensor before it is yielded; returns the tensor to yield.
    """
    yielded: dict[str, TensorHeader] = {}
    try:
        while True:
            # Not a no_grad in the generator that produces: it would still be active in the consumer's code.
            with groups.monitor.phase("named weights"), torch.no_grad():
                entry = next(weights, None)
                if entry is None:
                    barrier.at_end()
                    break
            name, tensor = entry
            # No reference may keep the tensor alive while the next one is gathered.
            del entry
            try:
                tensor = finish(name, tensor)
                yielded[name] = header_of(tensor)
                yield name, tensor
                del tensor
            except BaseException as error:
                barrier.stop("closed it" if isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}")
                with contextlib.suppress(StreamStopped), groups.monitor.phase("named weights"), torch.no_grad():
                    for _ in weights:  # up to the next barrier
                        pass
                    barrier.at_end()
                raise
    except StreamStopped as stopped:
        if receives:
            raise CheckpointError(
                f"named_weights: rank {stopped.rank} left the stream {stopped.point} ({stopped.reason}); the tensors that this "
                "rank got are not the complete model"
            ) from None
        return
    if receives and (problems := differences(headers, yielded, DTYPES[str(dtype)])):
        raise CheckpointError(
            f"named_weights: not the tensors of the checkpoint that the model comes from: {'; '.join(problems)}. Please "
            "report the model's architecture"
        )
