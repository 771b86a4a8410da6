"""Saving while training goes on: the main thread copies the state off the device, another writes it.

The writer has a Gloo group of its own, so that its collectives never meet the main thread's. torch's plain ``FileSystemWriter``
writes, one file for each rank; Megatron-Core's own writer starts two kinds of helper processes for every save, which takes about
four seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from megascend.checkpoint import hf_parts_file, manifest
from megascend.checkpoint.manifest import Manifest
from megascend.checkpoint.planners import SavePlanner
from megascend.checkpoint.staging import Staging
from megascend.distributed.objects import broadcast_object, from_rank_0, gather_objects, raise_on_all_ranks
from megascend.errors import CheckpointError
from megascend.io.atomic import is_replaceable, replace_directory, stage, staging
from megascend.io.hashing import HashingWriter
from megascend.io.paths import followed, remove

if TYPE_CHECKING:
    from megascend.diagnostics.hang_monitor import HangMonitor
    from megascend.distributed.process_groups import ProcessGroups
    from megascend.engines.hf_parts import HfParts
    from megascend.lora.adapter_io import SavedAdapter

MEGATRON_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""``metadata.json``, by which Megatron-Core's ``dist_checkpointing`` knows the format of a directory."""


CHANNEL = "checkpoint"
"""What the writers of all ranks talk over; torch's own collectives have a group of their own."""


class Writer(dcp.FileSystemWriter):
    """torch's, with files that are digested and sent to the disk while they are written; its errors say what the system said.

    Attributes:
        digests: size and digest, as the manifest has them, of each file of tensors by its name.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0)
        self.digests: dict[str, dict[str, Any]] = {}
        self.fs = _SentFiles(self.digests)

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        with _the_systems_words(), _without_checksums():
            return super().write_data(plan, planner)


class _SentFiles(FileSystem):
    """Files of tensors are :class:`HashingWriter`; the metadata, which torch renames, and files to read are as ever."""

    def __init__(self, digests: dict[str, dict[str, Any]]) -> None:
        self._digests = digests

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        file = Path(path)
        if mode != "wb" or not file.name.startswith("__"):
            with super().create_stream(file, mode) as stream:
                yield stream
            return
        with HashingWriter(file) as sent:
            yield sent
        self._digests[file.name] = manifest.entry(sent.size, sent.digest)


@dataclass(frozen=True)
class CheckpointState:
    """What goes into a checkpoint.

    Attributes:
        state: this rank's tensors (:class:`Chunks`) and objects, by name.
        manifest: without the files.
        adapters: on rank 0, whole adapters by name.
        base_model: what adapters name as theirs.
        projections: what adapters of the model can target.
        hf_parts: what its tensors are, or why that cannot be said; None: there are none.
        write_more: collective, called on the main thread with the unfinished directory; a Hugging Face export, for one.
    """

    state: dict[str, Any]
    manifest: Manifest
    adapters: dict[str, SavedAdapter]
    base_model: str
    projections: list[str]
    hf_parts: HfParts | str | None = None
    write_more: Callable[[Path], None] | None = None


class PendingSave:
    """A checkpoint on its way to disk. The same on every rank.

    Attributes:
        path: where it will appear when it is complete.
        step: optimizer steps done in it.
        stall_s: seconds that training stood still for it on this rank, waiting for the checkpoint before it included.
    """

    def __init__(self, path: Path, step: int, timeout_s: float, monitor: HangMonitor) -> None:
        self.path, self.step = path, step
        self._timeout_s, self._monitor = timeout_s, monitor
        self.stall_s = 0.0
        self._finished = threading.Event()
        self._problem: str | None = None
        self._reported = False

    @property
    def done(self) -> bool:
        """True if it is complete, or has failed, as far as this rank knows."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is complete.

        Args:
            timeout_s: give up waiting after this long; the save goes on.

        Raises:
            CheckpointError: it could not be written, or takes longer than the backend's ``save_timeout_s``; what was there
                before is untouched.
            TimeoutError: it takes longer than ``timeout_s``.
        """
        if timeout_s is not None and not self._wait(timeout_s):
            raise TimeoutError(f"{self.path} is not complete after {timeout_s:g} s")
        problem = self.outcome()
        if problem is not None:
            raise CheckpointError(problem)

    def outcome(self) -> str | None:
        """As :meth:`wait`, but returns why it failed instead of raising it; nobody raises it afterwards."""
        if not self._wait(self._timeout_s):
            return (
                f"save: {self.path} is not complete {self._timeout_s:g} s after it was waited for: the storage is slow or "
                "hangs; the limit is save_timeout_s (checkpoint.timeout_s)"
            )
        self._reported = True
        return self._problem

    def _wait(self, seconds: float) -> bool:
        # In a phase: if another rank is lost, the monitor ends what would else be waited for in vain.
        with self._monitor.phase("save", f"waiting for {self.path.name}"):
            return self._finished.wait(seconds)

    @property
    def reported(self) -> bool:
        """True if a failure has been told to somebody."""
        return self._reported

    def finish(self, problem: str | None) -> None:
        """Say how it ended; for the writer alone."""
        self._problem = problem
        self._finished.set()


class Saver:
    """Writes one checkpoint at a time. All ranks make one together, and call its methods in the same order."""

    def __init__(self, groups: ProcessGroups, *, page_locked: bool, timeout_s: float) -> None:
        """
        Args:
            page_locked: copy to page-locked host memory.
            timeout_s: how long a checkpoint is waited for before it counts as failed, in seconds.
        """
        self._groups, self._timeout_s = groups, timeout_s
        self._staging = Staging(page_locked=page_locked)
        self._group: Any = None
        self._pending: PendingSave | None = None
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def prepare(self, state: dict[str, Any]) -> None:
        """Take the host memory for saving ``state`` in the background, so that the first save need not wait for it."""
        self._staging.prepare(state)

    def save(
        self, path: Path, collect: Callable[[], CheckpointState], after: Callable[[Path], None] | None
    ) -> PendingSave:
        """Begin to write a checkpoint, after the one before is complete.

        Args:
            collect: what to write; called when it is clear that there is something to write to.
            after: called on rank 0's writer when ``path`` is in place.

        Raises:
            CheckpointError: on every rank: the checkpoint before failed, ``path`` holds something else, or cannot be written.
        """
        start = time.perf_counter()
        self.finish()
        if self._group is None:
            self._group = self._groups.new_gloo("checkpoint")
            self._groups.add_channel(CHANNEL)
        path = path.absolute()
        target, temporary = from_rank_0(
            lambda: self._make_room(path), self._groups, f"whether there is room for {path}"
        )
        try:
            contents = collect()
            contents = replace(contents, state=self._staging.copy(contents.state))
            if contents.write_more is not None:
                contents.write_more(temporary)
        except BaseException:
            if self._groups.rank == 0:
                remove(temporary)
            raise
        self._pending = pending = PendingSave(path, contents.manifest.step, self._timeout_s, self._groups.monitor)
        threading.Thread(
            target=self._write, args=(pending, target, temporary, contents, after), name="megascend-save", daemon=True
        ).start()
        pending.stall_s = time.perf_counter() - start
        return pending

    def finish(self) -> None:
        """Return when no checkpoint is being written. Collective: each rank waits by a clock of its own.

        Raises:
            CheckpointError: on every rank: the checkpoint failed, or took too long on one.
        """
        problem = None
        try:
            self.wait()
        except CheckpointError as error:
            problem = error
        raise_on_all_ranks(problem, self._groups, "whether the checkpoint before is complete")

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no checkpoint is being written, as far as this rank knows.

        Raises:
            CheckpointError, TimeoutError: as :meth:`PendingSave.wait`; a failure is raised once.
        """
        pending = self._pending
        if pending is not None and pending.done and pending.reported:
            self._pending = None
        elif pending is not None:
            try:
                pending.wait(timeout_s)
            finally:
                if pending.done:
                    self._pending = None

    def abandon(self, after_s: float) -> None:
        """Give up a checkpoint that is being written, if it is not complete within ``after_s``."""
        atexit.unregister(self._at_exit)
        with contextlib.suppress(CheckpointError, TimeoutError):  # the error that is under way has to do
            self.wait(after_s)
        self._pending = None

    def close(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: it could not be written, and nobody has been told yet.
        """
        atexit.unregister(self._at_exit)
        self.wait()

    def _at_exit(self) -> None:
        """A script ends without ``close()``: its last checkpoint shall be there all the same."""
        if os.getpid() != self._process:  # a forked child has no thread that writes
            return
        try:
            self.wait()
        except CheckpointError as error:
            logging.getLogger(__name__).error("%s", error)

    def _make_room(self, path: Path) -> tuple[Path, Path]:
        """Make the directory to write to. A link stays one: what it leads to is replaced.

        Returns:
            The directory to replace, and the one that takes its place.

        Raises:
            CheckpointError: it cannot be made, or ``path`` holds something else.
        """
        try:
            if not is_replaceable(path, manifest.NAME):
                raise CheckpointError(
                    f"save: {path} exists and is not a megascend checkpoint; choose another directory"
                )
            target = followed(path)
            temporary = staging(target)
            stage(target, temporary)
        except OSError as error:
            raise CheckpointError(f"save: {path} cannot be written: {error}") from error
        return target, temporary

    # --- on the writer's thread ---

    def _write(
        self,
        pending: PendingSave,
        target: Path,
        temporary: Path,
        contents: CheckpointState,
        after: Callable[[Path], None] | None,
    ) -> None:
        problem: str | None = (
            f"save: {pending.path} could not be written (rank {self._groups.rank}): its thread was ended"
        )
        try:
            with self._groups.monitor.phase("write"):
                written = self._write_files(temporary, contents)
                problem = self._commit(pending.path, target, temporary, contents, after, *written)
        except Exception as error:  # noqa: BLE001  a thread has nobody to raise to: whoever waits raises it
            problem = f"save: {pending.path} could not be written (rank {self._groups.rank}): {_reason(error)}"
        finally:
            pending.finish(problem)

    def _write_files(self, temporary: Path, contents: CheckpointState) -> tuple[dict[str, dict[str, Any]], str | None]:
        """This rank's files and their digests, or why they could not be written."""
        rank = self._groups.rank
        try:
            writer = Writer(temporary)
            dcp.save(contents.state, storage_writer=writer, planner=SavePlanner(), process_group=self._group)
            if rank == 0:
                self._write_adapters(temporary, contents)
                if contents.hf_parts is not None:
                    (temporary / hf_parts_file.NAME).write_text(
                        hf_parts_file.to_text(contents.hf_parts), encoding="utf-8"
                    )
                (temporary / "metadata.json").write_text(json.dumps(MEGATRON_CONFIG), encoding="utf-8")
                with (temporary / "common.pt").open("wb") as file, _the_systems_words():
                    torch.save({"step": contents.manifest.step}, file)
            names = _files_of(temporary, rank)
            return {name: writer.digests.get(name) or manifest.digest(temporary / name) for name in names}, None
        except (Exception, CheckpointException) as error:  # noqa: BLE001  told to all ranks, which then raise together
            return {}, f"rank {rank}: {_reason(error)}"

    def _write_adapters(self, temporary: Path, contents: CheckpointState) -> None:
        if not contents.adapters:
            return
        from megascend.lora import adapter_io as store

        for name, saved in contents.adapters.items():
            store.write(temporary / "adapters" / name, saved, contents.base_model, contents.projections)

    def _commit(
        self,
        path: Path,
        target: Path,
        temporary: Path,
        contents: CheckpointState,
        after: Callable[[Path], None] | None,
        files: dict[str, dict[str, Any]],
        problem: str | None,
    ) -> str | None:
        """Put the checkpoint in place if every rank has written its part; returns why not."""
        step = contents.manifest.step
        everyone = gather_objects((files, problem), CHANNEL, self._groups, f"files of {path}", step)
        found = [text for _, text in everyone if text is not None]
        verdict = f"save: {path} could not be written: {found[0]}" if found else None
        if self._groups.rank == 0:
            if not found:
                whole = {name: entry for part, _ in everyone for name, entry in sorted(part.items())}
                verdict = _put_in_place(path, target, temporary, replace(contents.manifest, files=whole), after)
            if verdict is not None:
                remove(temporary)  # a full disk is not to stay full of this
        return broadcast_object(verdict, CHANNEL, self._groups, 0, f"whether {path} is in place", step)


def _put_in_place(
    path: Path, target: Path, temporary: Path, complete: Manifest, after: Callable[[Path], None] | None
) -> str | None:
    try:
        (temporary / manifest.NAME).write_text(complete.to_text(), encoding="utf-8")
        replace_directory(temporary, target)
        if after is not None:
            after(path)
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait for the verdict
        return f"save: {path} could not be put in place: {_reason(error)}"
    return None


def _files_of(directory: Path, rank: int) -> list[str]:
    """Relative names of the files that ``rank`` answers for: its own tensors', and on rank 0 whatever else there is.

    Only rank 0 looks into folders: the others would meet what it is still writing and renaming there.
    """
    own = [file.name for file in directory.glob(f"__{rank}_*")]
    if rank != 0:
        return sorted(own)
    every = [str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()]
    return sorted([*own, *(name for name in every if not name.startswith("__"))])


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Without the CRC-32 that ``torch.save`` computes of every tensor, and that ``torch.load`` does not look at.

    It took a core's time at 2.4 GiB/s; a file's digest in the manifest finds all that it would (xxh3: 9 GiB/s).
    """
    before = get_crc32_options()
    set_crc32_options(False)  # of this thread; of the process in older versions of torch
    try:
        yield
    finally:
        set_crc32_options(before)


@contextlib.contextmanager
def _the_systems_words() -> Iterator[None]:
    """On a full disk ``torch.save`` raises "unexpected pos 704 vs 598", and pickled for other ranks that is all there is."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause is error:
            raise
        raise OSError(*cause.args) from error


def _reason(error: BaseException) -> str:
    """What went wrong, in a line: torch wraps the errors of all ranks into one that prints their tracebacks."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"{type(inner).__name__}: {inner} (rank {rank})"
    return f"{type(error).__name__}: {error}"
