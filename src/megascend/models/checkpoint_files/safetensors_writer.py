"""Write safetensors files tensor by tensor, in any order, from about 200 MB of host memory.

The format has the header, with the offset of each tensor, before the data (huggingface.co/docs/safetensors, "Format").
Space for it is reserved at the front of each file and filled in at the end, padded with spaces as the format allows.
"""

from __future__ import annotations

import json
import os
import queue
import struct
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import WEIGHT_INDEX
from megascend.runtime.io.hashing import begin_writing_back

if TYPE_CHECKING:
    from torch import Tensor


FILE_BYTES = 5 * 10**9
"""Bytes of tensors in one file, as transformers splits its own."""

DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
"""torch's dtypes as safetensors calls them."""

_ENTRY = 160  # bytes of a header's entry without its name: dtype, up to five dimensions, two offsets


class SafetensorsWriter:
    """``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and an index, in a directory that exists."""

    def __init__(self, folder: Path, names: Collection[str], file_bytes: int = FILE_BYTES) -> None:
        """
        Args:
            names: names of all tensors, which bound the size of a header.
            file_bytes: size after which a further file is begun.
        """
        self._folder, self._file_bytes = folder, file_bytes
        self._room = sum(len(json.dumps(name)) + _ENTRY for name in names) + 64
        # The data starts at a multiple of 16 bytes, so that aligned offsets stay aligned in the file.
        self._room += -(self._room + 8) % 16
        self._names = frozenset(names)
        self._files: list[list[str]] = []  # names in each
        self._file: int | None = None  # its descriptor
        self._pipeline = PipelinedWriter()
        self._header: dict[str, Any] = {}
        self._completed: set[str] = set()
        self._end = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append ``tensor``, from any device. Its memory may be reused afterwards."""
        import torch

        if name not in self._names or name in self._completed:
            raise CheckpointError(
                f"export: tensor {name} {'came twice' if name in self._completed else 'is unexpected'}"
            )
        dtype = DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise CheckpointError(f"export: {name} is {tensor.dtype}, which safetensors files do not hold here")
        size = tensor.numel() * tensor.element_size()
        # Readers view the data as the dtype, so each tensor has to begin at a multiple of its items' size.
        if self._file is not None and (
            self._end + size > self._file_bytes or (size and self._end % tensor.element_size())
        ):
            self._close()
        file = self._open() if self._file is None else self._file
        # reshape: a scalar has no dimension that could be viewed as bytes.
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._pipeline.write(file, 8 + self._room + self._end, data)
        self._header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + size],
        }
        self._files[-1].append(name)
        self._completed.add(name)
        self._end += size
        self._total += size

    def finish(self) -> None:
        """Complete the last file, and rename all files to the names that readers expect."""
        self._close()
        self._pipeline.close()
        # The number of files, which is part of their names, is only known now.
        if len(self._files) == 1:
            self._path(1).rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self._files, start=1):
            name = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            self._path(number).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / WEIGHT_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def abandon(self) -> None:
        """Close open files without completing them."""
        self._pipeline.close()
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _path(self, number: int) -> Path:
        return self._folder / f"model-{number:05d}.unfinished"

    def _open(self) -> int:
        self._files.append([])
        self._file = os.open(self._path(len(self._files)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._header, self._end = {"__metadata__": {"format": "pt"}}, 0
        return self._file

    def _close(self) -> None:
        if self._file is None:
            return
        header = json.dumps(self._header, separators=(",", ":")).encode()
        if len(header) > self._room:
            raise CheckpointError(f"export: a header of {len(header)} bytes does not fit into {self._room}")
        # The file is closed below, so all of its pieces have to be written first.
        self._pipeline.wait()
        front = memoryview(struct.pack("<Q", self._room) + header.ljust(self._room))
        while front:
            front = front[os.pwrite(self._file, front, 8 + self._room - len(front)) :]
        os.close(self._file)
        self._file = None


PIECE = 32 * 2**20
"""Bytes that are copied and written in one go."""
PIECES = 6
"""Maximum number of pieces in memory."""
THREADS = 2
"""Threads: file systems let one write to a file at a time; the second thread starts the write-back meanwhile."""


class PipelinedWriter:
    """Writer of tensors at offsets of files, through a few reused buffers in host memory. Used by one thread.

    The memory of a tensor is free as soon as :meth:`write` returns. Errors are raised by a later call, at the latest by
    :meth:`wait`.
    """

    # Fresh memory for each tensor would cost a page fault every 4 KiB, two million for Qwen3-4B; and a file that is only sent to
    # the disk at its end takes as long again as it took to write.

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._allocated = 0
        self._running: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="megascend-write")

    def write(self, descriptor: int, offset: int, data: Tensor) -> None:
        """Write ``data``, uint8 [bytes], contiguous on any device, at ``offset`` of an open file."""
        for start in range(0, data.numel(), PIECE):
            self._raise_what_failed()
            part = data[start : start + PIECE]
            piece = self._piece(page_locked=part.device.type != "cpu")
            # Synchronous: the caller may change or free the tensor when write() returns.
            piece[: part.numel()].copy_(part)
            self._running.append(self._pool.submit(self._write_piece, descriptor, offset + start, piece, part.numel()))

    def wait(self) -> None:
        """Return when everything is written."""
        running, self._running = self._running, []
        for future in running:
            future.result()

    def close(self) -> None:
        """Wait for pending writes, even if they fail; the writer is unusable afterwards."""
        self._pool.shutdown(cancel_futures=True)

    def _raise_what_failed(self) -> None:
        while self._running and self._running[0].done():
            self._running.pop(0).result()

    def _piece(self, *, page_locked: bool) -> Tensor:
        import torch

        if self._allocated < PIECES and self._free.empty():
            self._allocated += 1
            return torch.empty(PIECE, dtype=torch.uint8, pin_memory=page_locked)
        # Blocks until a piece is written, which limits the memory in use.
        return self._free.get()

    def _write_piece(self, descriptor: int, offset: int, piece: Tensor, count: int) -> None:
        try:
            view = piece.numpy().data[:count]
            offset_in_piece = 0
            while offset_in_piece < count:
                offset_in_piece += os.pwrite(descriptor, view[offset_in_piece:], offset + offset_in_piece)
        finally:
            self._free.put(piece)
        # After the piece is returned: the next copy can start while the kernel begins to write.
        begin_writing_back(descriptor, offset, count)
