"""Transport through a shared directory: one safetensors file for each version, which any engine can load."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch

from weightwire.errors import DeadlineError, TransportError
from weightwire.manifest import Manifest
from weightwire.transports.base import POLL_S, DeferredWork, Setup

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""safetensors' names of torch dtypes."""
_VERSION = re.compile(r"v\d{19}")


def header(manifest: Manifest) -> bytes:
    """Build a safetensors header; the file's data is the concatenation of the buckets."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "version": str(manifest.version)}}
    begin = 0
    for spec in manifest.tensors:
        entries[spec.name] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.nbytes],
        }
        begin += spec.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class FilesTransport:
    """Transport by files: the sender writes ``DIRECTORY/vVERSION/model.safetensors`` (for an adapter
    ``adapter_model.safetensors`` beside its ``adapter_config.json``), renames it when it is complete, and receivers read it then.

    Options: ``directory``, a path that is the same on all members; ``keep``, number of complete versions to keep, those written
    last (default 1).
    """

    def __init__(self, setup: Setup) -> None:
        directory, keep = setup.options.get("directory"), setup.options.get("keep", 1)
        if not isinstance(directory, str) or not Path(directory).is_absolute():
            raise TransportError(f"files: option directory must be an absolute path, not {directory!r:.120}")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise TransportError(f"files: option keep is {keep!r:.40}, not an integer >= 1")
        self._setup, self._keep = setup, keep
        adapter = setup.manifest.adapter
        self._root = Path(directory) if adapter is None else Path(directory) / adapter.name
        name = "model.safetensors" if adapter is None else "adapter_model.safetensors"
        self.path = self._root / f"v{setup.manifest.version:019d}" / name
        self._store = setup.group.store("transport", setup.timeout_s)
        self._store.set_timeout(timedelta(seconds=setup.timeout_s))
        self._bytes_left = setup.manifest.nbytes
        self._file: BinaryIO | None = None
        self._writing = self.path.with_name(f".{name}.writing")
        if setup.group.rank == 0:
            try:
                self._writing.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._writing.open("wb")
                # Known in advance from the manifest, so that buckets are appended as they come.
                self._file.write(header(setup.manifest))
            except OSError as error:
                raise TransportError(f"files: {self._writing} cannot be written: {error}") from error

    def send(self, buffer: torch.Tensor) -> DeferredWork:
        return DeferredWork(lambda timeout_s: self._write(buffer), "files")

    def receive(self, buffer: torch.Tensor) -> DeferredWork:
        return DeferredWork(lambda timeout_s: self._read(buffer, timeout_s), "files")

    def abort(self) -> None:
        """Remove an incomplete file."""
        self._remove()

    def close(self) -> None:
        if self._setup.group.rank == 0:
            self._remove()
        elif self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, buffer: torch.Tensor) -> None:
        if self._file is None:
            raise TransportError("files: closed")
        self._file.write(buffer.cpu().numpy().data)
        self._bytes_left -= buffer.numel()
        if self._bytes_left == 0:
            self._complete()

    def _complete(self) -> None:
        assert self._file is not None
        self._file.flush()
        # Before the rename: after a crash a complete name must not have incomplete content.
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        adapter = self._setup.manifest.adapter
        if adapter is not None:
            # Before the rename too: engines look for the weights' file, and then read both.
            (self.path.parent / "adapter_config.json").write_text(json.dumps(dict(adapter.config)), encoding="utf-8")
        self._writing.replace(self.path)
        current = self.path.parent
        earlier = [path for path in self._root.iterdir() if _VERSION.fullmatch(path.name) and path != current]
        # By time, not by version: an earlier run may have left greater numbers, and its files are the old ones.
        earlier.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in earlier[self._keep - 1 :]:
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        # A directory of a network file system may show the new name late, so readers wait for both.
        self._store.set("complete", "1")

    def _read(self, buffer: torch.Tensor, timeout_s: float) -> None:
        if self._file is None:
            self._wait_until_complete(timeout_s)
            self._file = self.path.open("rb")
            expected = header(self._setup.manifest)
            # A leftover of an earlier run with this version would have the same path.
            if self._file.read(len(expected)) != expected:
                raise TransportError(f"files: {self.path} does not belong to this update")
        content = buffer if buffer.device.type == "cpu" else torch.empty(buffer.numel(), dtype=torch.uint8)
        if self._file.readinto(content.numpy().data) != buffer.numel():  # type: ignore[reportAttributeAccessIssue]
            raise TransportError(f"files: {self.path} is too short")
        if content is not buffer:
            buffer.copy_(content)

    def _wait_until_complete(self, timeout_s: float) -> None:
        """Wait for the complete file. The deadline restarts with every bucket that the sender has written."""
        # The file appears when it is complete, so a single deadline would be one for the whole model.
        deadline, progress = time.monotonic() + timeout_s, -1
        while not (self._store.check(["complete"]) and self.path.exists()):
            self._setup.group.check()
            now = self._setup.group.progress_of(0)
            if now != progress:
                deadline, progress = time.monotonic() + timeout_s, now
            if time.monotonic() > deadline:
                problem = "is not visible here" if self._store.check(["complete"]) else "is not complete"
                raise DeadlineError(f"files: {self.path} {problem} after {timeout_s:g} s")
            time.sleep(POLL_S / 10)

    def _remove(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._setup.group.rank == 0:
                self._writing.unlink(missing_ok=True)
