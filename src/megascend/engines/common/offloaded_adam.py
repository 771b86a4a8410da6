"""Adam whose main parameters and moments are in host memory; a step streams them through the device in chunks.

The provider's Adam updates each chunk on the device: its arithmetic is element by element, so the numbers are those of a run
without offload, bit for bit, on every platform, and a step does not depend on the host's cores. The bus carries 24 bytes a
parameter (12 in each direction at once); an update on the host would carry 6, and move 28 through the host's memory at the speed
of the threads of one rank, of which torchrun starts one.

Megatron-Core's ``HybridDeviceOptimizer`` updates on the host. It is not used: it needs CUDA's streams and the precision-aware
distributed optimizer, rounds differently from the update on the device, makes its state by a step with random gradients, and pins
every tensor separately, for which torch rounds sizes up to powers of two.

torchao's ``CPUOffloadOptimizer`` (0.18.0, torch 2.13) was tried in its place. It refuses every device but CUDA and XPU; it takes
gradients in hooks of the backward pass, before they are reduced over ranks and clipped; and it updates with the host's fused
AdamW: after ten steps 0.35 % of the parameters differ from the update that is not fused, where a run here equals one without
offload bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascend.errors import ConfigError

CHUNK = 2**22
"""Elements that are on the device at a time, in each of SLOTS buffers for a main parameter and two moments."""
SLOTS = 3
"""Buffers: one is filled, one updated, one written back."""
SLAB = 2**26
"""Elements of a block of host memory. torch's allocator of page-locked memory rounds up to powers of two, which these are."""
ALIGNMENT = 16  # elements: pieces begin at multiples of 64 bytes


@dataclass(frozen=True)
class StreamedState:
    """A main parameter and the memory of its state.

    Attributes:
        main: the tensor that Megatron knows, which receives gradients. Its values are in ``pieces`` if it has ``weight``, and it
            is then NaN without memory, which a reader cannot mistake for values, and an assignment cannot overwrite.
        weight: the 16-bit elements of the model that are the rounded main parameter, flattened; None: ``main`` is the model's.
        pieces: consecutive [rows, elements] of the flattened main parameter (only with ``weight``), first and second moment.
        on_host: the pieces are in host memory.
    """

    main: Tensor
    weight: Tensor | None
    pieces: list[Tensor]
    on_host: bool

    def runs(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield (first index in the flattened main parameter, state by name) of each piece; live tensors."""
        names = ("exp_avg", "exp_avg_sq") if self.weight is None else ("param", "exp_avg", "exp_avg_sq")
        start = 0
        for piece in self.pieces:
            yield start, dict(zip(names, piece, strict=True))
            start += piece.shape[1]


class OffloadedAdam(torch.optim.Optimizer):
    """The provider's Adam over parameters of which a share has its state in host memory. A step updates all with a gradient.

    Args:
        inner: the provider's Adam, whose parameter groups this takes over; it has no state yet.
        weights: for each main parameter, by id, the model's elements that it is rounded to, flattened; itself if it is one.
        share: of the elements whose state is in host memory, the first parameters'.
        page_locked: host memory is page-locked, and copies overlap with updates.
        stored_count: returns a number of updates as ``inner`` stores it.
    """

    def __init__(
        self,
        inner: Any,
        weights: dict[int, Tensor],
        *,
        share: float,
        page_locked: bool,
        stored_count: Callable[[int], Any],
    ) -> None:
        super().__init__([{"params": []}], {})
        # Assigned, as Megatron does: torch's constructor refuses views, which main parameters are.
        self.param_groups[:] = inner.param_groups
        self._inner, self._stored_count = inner, stored_count
        # torch's Adam counts the steps of every parameter, Transformer Engine's and MindSpeed's those of a group.
        self._counts_parameters = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        self._chunk_group: dict[str, Any] = {}
        inner.param_groups[:] = [self._chunk_group]
        mains = [main for group in self.param_groups for main in group["params"]]
        shapes = [(2 if weights[id(main)].dtype == torch.float32 else 3, main.numel()) for main in mains]
        total, before, on_host = sum(count for _, count in shapes), 0, []
        for _, count in shapes:  # the parameter that reaches the share is offloaded too
            on_host.append(before < share * total)
            before += count
        offloaded = [shape for shape, chosen in zip(shapes, on_host, strict=True) if chosen]
        size = 4 * sum(rows * count for rows, count in offloaded)
        try:
            blocks = iter(host_blocks(offloaded, page_locked=page_locked))
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"optimizer.offload: no host memory for {size / 2**30:.1f} GiB of this rank's optimizer state: lower "
                f"optimizer.offload, or use more ranks ({error})"
            ) from error
        self._states: dict[int, StreamedState] = {}
        for main, (rows, count), chosen in zip(mains, shapes, on_host, strict=True):
            pieces = next(blocks) if chosen else [main.new_zeros((rows, count))]
            weight = None if rows == 2 else weights[id(main)]
            self._states[id(main)] = StreamedState(main, weight, pieces, chosen)
            if weight is not None:
                _move_values(main, pieces)
        device = mains[0].device if mains else torch.device("cpu")
        largest = max((count for _, count in offloaded), default=0)
        self._staging = _Staging(device, min(CHUNK, largest), overlaps=page_locked and device.type != "cpu")

    def state_of(self, main: Tensor) -> StreamedState:
        """Return the state of a main parameter. The host may read and write it until the next step."""
        self._staging.synchronize()
        return self._states[id(main)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "losses are computed before a step"
        self._staging.begin()
        for group in self.param_groups:
            updates = int(group.get("step", 0))
            for main in group["params"]:
                if main.grad is not None and main.numel():
                    self._update_main(group, updates, self._states[id(main)])
            group["step"] = updates + 1
        self._staging.end()

    def _update_main(self, group: dict[str, Any], updates: int, state: StreamedState) -> None:
        assert state.main.grad is not None
        grad, start = state.main.grad.view(-1), 0
        for piece in state.pieces:
            for first in range(0, piece.shape[1], CHUNK):
                chunk = piece[:, first : first + CHUNK]
                run = slice(start + first, start + first + chunk.shape[1])
                with self._staging.on_device(chunk) if state.on_host else nullcontext(chunk) as rows:
                    values = state.main.detach().view(-1)[run] if state.weight is None else rows[0]
                    self._update(group, updates, values, grad[run], rows[-2], rows[-1])
                    if state.weight is not None:
                        state.weight[run].copy_(values)
            start += piece.shape[1]

    def _update(
        self, group: dict[str, Any], updates: int, values: Tensor, grad: Tensor, first: Tensor, second: Tensor
    ) -> None:
        """Update values and moments on the device in place; ``updates``: steps before this one."""
        values.grad = grad
        moments: dict[str, Any] = {"exp_avg": first, "exp_avg_sq": second}
        # One dict for all chunks: MindSpeed's Adam keeps a tensor for each that it has seen.
        self._chunk_group.update(group, params=[values])
        if self._counts_parameters:
            moments["step"] = torch.tensor(float(updates))
        else:
            self._chunk_group["step"] = self._stored_count(updates)
        self._inner.state.clear()
        self._inner.state[values] = moments
        self._inner.step()
        self._inner.state.clear()
        self._chunk_group["params"] = []
        values.grad = None


class _Staging:
    """Device buffers through which chunks of state pass. Fills, updates and write-backs of different chunks overlap.

    Args:
        overlaps: host memory is page-locked, and the device has streams.
    """

    def __init__(self, device: torch.device, elements: int, *, overlaps: bool) -> None:
        self._buffers = torch.empty((SLOTS if overlaps else 1, 3, elements), dtype=torch.float32, device=device)
        self._device, self._overlaps, self._next = device, overlaps, 0
        if overlaps:
            self._module = torch.get_device_module(device)
            self._fill, self._write_back = self._module.Stream(device), self._module.Stream(device)
            self._free = [self._module.Event() for _ in range(SLOTS)]

    def begin(self) -> None:
        """Order this step's fills after the last step's write-backs, and after the allocation of the buffers."""
        if self._overlaps:
            self._fill.wait_stream(self._write_back)
            self._fill.wait_stream(self._module.current_stream(self._device))

    def end(self) -> None:
        """Order all later work of the device after the write-backs, so that memory may be reused. The host does not wait."""
        if self._overlaps:
            self._module.current_stream(self._device).wait_stream(self._write_back)

    def synchronize(self) -> None:
        """Wait until the host's memory is current."""
        if self._overlaps:
            self._write_back.synchronize()

    @contextmanager
    def on_device(self, chunk: Tensor) -> Iterator[Tensor]:
        """Yield [rows, elements] of a chunk on the device, for the current stream to update; they are written back afterwards."""
        rows = self._buffers[self._next, : chunk.shape[0], : chunk.shape[1]]
        if not self._overlaps:
            rows.copy_(chunk)
            yield rows
            chunk.copy_(rows)
            return
        free, self._next = self._free[self._next], (self._next + 1) % SLOTS
        current = self._module.current_stream(self._device)
        with self._module.stream(self._fill):
            free.wait()
            # Row by row: a copy between devices of memory with gaps would pass through another tensor.
            for row, host_row in zip(rows, chunk, strict=True):
                row.copy_(host_row, non_blocking=True)
        current.wait_stream(self._fill)
        yield rows
        self._write_back.wait_stream(current)
        with self._module.stream(self._write_back):
            for row, host_row in zip(rows, chunk, strict=True):
                host_row.copy_(row, non_blocking=True)
            free.record()


def host_blocks(shapes: Sequence[tuple[int, int]], *, page_locked: bool) -> list[list[Tensor]]:
    """Return for each (rows, elements) zeros in host memory, as consecutive [rows, elements] that divide the elements."""
    remaining = sum(rows * _aligned(count) for rows, count in shapes)
    slab, used, blocks = torch.empty(0), 0, []
    for rows, count in shapes:
        pieces = []
        while count:
            room = (slab.numel() - used) // rows // ALIGNMENT * ALIGNMENT
            if not room:
                slab, used = torch.zeros(min(SLAB, remaining), dtype=torch.float32, pin_memory=page_locked), 0
                continue
            size = min(count, room)
            # Rows begin at aligned positions; the last piece of a tensor is followed by a gap.
            strided = slab[used : used + rows * _aligned(size)].view(rows, -1)
            pieces.append(strided[:, :size])
            used, remaining, count = used + strided.numel(), remaining - strided.numel(), count - size
        blocks.append(pieces)
    return blocks


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _move_values(main: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy a main parameter to the first rows of its pieces, and free its own memory."""
    values, start = main.detach().view(-1), 0
    for piece in pieces:
        piece[0].copy_(values[start : start + piece.shape[1]])
        start += piece.shape[1]
    main.data = torch.full((), float("nan"), dtype=main.dtype, device=main.device).expand(main.shape)
