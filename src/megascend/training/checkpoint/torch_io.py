"""Reader, writer and planners for torch's distributed checkpoints.

A file of tensors is digested and flushed while it is written, front to back. Every chunk in the files is read once, however many
slices of it are needed.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _ReaderView
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from megascend.runtime.io.hashing import HashingWriter
from megascend.training.checkpoint import manifest, unpickling
from megascend.training.checkpoint.slices import TensorSlices


class SliceSavePlanner(dcp.DefaultSavePlanner):
    """Planner of a save of :class:`TensorSlices` and of objects."""

    def __init__(self) -> None:
        # The state is flat already: names to slices and objects.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        # torch treats TensorSlices as objects, as they are not tensors.
        return value.at(index) if isinstance(value, TensorSlices) else value


class SliceLoadPlanner(dcp.DefaultLoadPlanner):
    """Planner of a load into :class:`TensorSlices`; objects are put into the state."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's default first replaces tensors on the meta device, and objects that are not tensors by None.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = unpickling.load(value, name)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index)


class ChunkReader(dcp.FileSystemReader):
    """torch's reader, but reads each chunk once: torch would read a chunk of all experts once for each expert.

    Beside the target tensors, one chunk is in memory at a time.
    """

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # Once: it takes seconds for a hundred thousand chunks.
        if self._metadata is None:
            self._metadata = unpickling.read_metadata(Path(self.path, ".metadata").read_bytes())
        return self._metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        return _FileSlice(file, sinfo.offset, sinfo.length)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_chunk: dict[Any, list[ReadItem]] = {}
        objects = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                objects.append(item)
            else:
                location = self.storage_data[item.storage_index]
                by_chunk.setdefault((location.relative_path, location.offset), []).append(item)
        # In the order of the files.
        for _, items in sorted(by_chunk.items(), key=lambda entry: entry[0]):
            location: Any = self.storage_data[items[0].storage_index]
            with self.fs.create_stream(self.fs.concat_path(self.path, location.relative_path), "rb") as stream:
                chunk = unpickling.load(self._slice_file(stream, location), items[0].storage_index.fqn)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        # Objects, such as random states, go through the planner.
        return super().read_data(LoadPlan(objects, plan.storage_data, plan.planner_data), planner)


class _FileSlice(_ReaderView):
    """Part of a file; torch's own cannot seek from its end, as zipfile does."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return super().seek(self.len + offset if whence == os.SEEK_END else offset, whence % os.SEEK_END)


def stored_tensors(reader: ChunkReader) -> tuple[dict[str, TensorSlices], set[str]]:
    """Read the metadata of a checkpoint: shape and dtype of every tensor by name, without slices, and the names of objects."""
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: TensorSlices(tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return tensors, entries.keys() - tensors.keys()


class ChunkWriter(dcp.FileSystemWriter):
    """torch's writer on :class:`HashingWriter`; raises an OSError unchanged, instead of torch's wrapper.

    Attributes:
        digests: size and digest of each file of tensors, by its name; entries of the manifest.
    """

    def __init__(self, directory: Path) -> None:
        # sync_files: the manifest, written last, must not outlive the tensors in a crash of the machine.
        # No prefetched copies: the tensors are in host memory.
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0)
        self.digests: dict[str, dict[str, Any]] = {}
        # The base class has no parameter for its file system.
        self.fs = _HashingFileSystem(self.digests)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with raising_system_errors(), _without_checksums():
            return super().write_data(plan, planner)


class _HashingFileSystem(FileSystem):
    """File system that opens files of tensors for writing as :class:`HashingWriter`, and all others as torch does."""

    def __init__(self, digests: dict[str, dict[str, Any]]) -> None:
        self._digests = digests

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        file = Path(path)
        # Files of tensors are called __{rank}_{number}.distcp.
        if mode != "wb" or not file.name.startswith("__"):
            with super().create_stream(file, mode) as stream:
                yield stream
            return
        with HashingWriter(file) as writer:
            yield writer
        self._digests[file.name] = manifest.entry(writer.size, writer.digest)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Switch off the CRC-32 of every tensor, which ``torch.save`` computes and ``torch.load`` ignores.

    It runs at 2.4 GiB/s on one core; the file's digest in the manifest (xxh3: 9 GiB/s) detects the same errors.
    """
    before = get_crc32_options()
    set_crc32_options(False)  # for this thread; in older versions of torch for the process
    try:
        yield
    finally:
        set_crc32_options(before)


@contextlib.contextmanager
def raising_system_errors() -> Iterator[None]:
    """Raise the OSError behind an error of ``torch.save``.

    On a full disk torch raises "unexpected pos 704 vs 598", and only that message reaches the other ranks.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause is error:
            raise
        raise OSError(*cause.args) from error
