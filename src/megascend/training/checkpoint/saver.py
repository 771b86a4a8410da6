"""Save checkpoints while training continues: the main thread copies the state off the device, another thread writes it.

The writer thread has its own Gloo group, so that its collectives never mix with the main thread's. torch's ``FileSystemWriter``
writes one file for each rank; Megatron-Core's own writer starts two kinds of helper processes for every save, which takes about
four seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megascend.errors import CheckpointError
from megascend.runtime.distributed.objects import broadcast_object, collect_objects, from_rank_0, raise_on_all_ranks
from megascend.runtime.io.atomic import is_replaceable, replace_directory, stage, staging
from megascend.runtime.io.paths import followed, remove
from megascend.training.checkpoint import hf_slices, manifest
from megascend.training.checkpoint.manifest import CheckpointManifest
from megascend.training.checkpoint.staging import Staging
from megascend.training.checkpoint.torch_io import ChunkWriter, SliceSavePlanner, raising_system_errors
from megascend.training.lora import adapter_io
from weightwire.background import BackgroundThread

if TYPE_CHECKING:
    from megascend.runtime.diagnostics.hang_monitor import HangMonitor
    from megascend.runtime.distributed.process_groups import ProcessGroups
    from megascend.training.checkpoint.hf_slices import HfSlices
    from megascend.training.lora.factors import UnshardedAdapter

MEGATRON_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of ``metadata.json``, by which Megatron-Core's ``dist_checkpointing`` recognises the format of a directory."""

CHANNEL = "checkpoint"
"""Channel over which the writers of all ranks communicate; the collectives of ``dcp.save`` use a separate group."""


@dataclass(frozen=True)
class CheckpointState:
    """Content of one checkpoint.

    Attributes:
        state: this rank's tensors (:class:`megascend.training.checkpoint.slices.TensorSlices`) and objects, by name.
        manifest: the manifest without its list of files, which exists only when they are written.
        adapters: unsharded adapters by name, on rank 0.
        base_model: name or path of the base model, stored with adapters.
        projections: Hugging Face weights that adapters of the model may target.
        hf_slices: Hugging Face slices of its tensors, or the reason why they cannot be described; None: the model is frozen.
    """

    state: dict[str, Any]
    manifest: CheckpointManifest
    adapters: dict[str, UnshardedAdapter]
    base_model: str
    projections: list[str]
    hf_slices: HfSlices | str | None = None


class PendingSave:
    """A checkpoint that is being written, with the same outcome on every rank.

    Attributes:
        path: directory that appears when the checkpoint is complete.
        step: optimizer steps before it.
        stall_s: seconds that training was blocked by this save on this rank, including the wait for the previous checkpoint.
        reported: the outcome has been raised or returned.
    """

    def __init__(self, path: Path, step: int, timeout_s: float, monitor: HangMonitor) -> None:
        self.path, self.step = path, step
        self._timeout_s, self._monitor = timeout_s, monitor
        self.stall_s = 0.0
        self._finished = threading.Event()
        self._problem: str | None = None
        self.reported = False

    @property
    def done(self) -> bool:
        """True if this rank knows that it is complete or has failed."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout_s: stop waiting after this many seconds; the save continues.

        Raises:
            CheckpointError: it could not be written, or takes longer than the backend's ``save_timeout_s``; the previous content
                of ``path`` is unchanged.
            TimeoutError: it takes longer than ``timeout_s``.
        """
        if timeout_s is not None and not self._wait(timeout_s):
            raise TimeoutError(f"{self.path} is not complete after {timeout_s:g} s")
        problem = self.outcome()
        if problem is not None:
            raise CheckpointError(problem)

    def outcome(self) -> str | None:
        """Wait like :meth:`wait`, but return the error message instead of raising; it is not raised later either."""
        if not self._wait(self._timeout_s):
            return (
                f"save: {self.path} is not complete {self._timeout_s:g} s after it was waited for: the storage is slow or "
                "hangs; the limit is save_timeout_s (checkpoint.timeout_s)"
            )
        self.reported = True
        return self._problem

    def _wait(self, seconds: float) -> bool:
        # In a phase, so that the monitor ends the wait if another rank is lost.
        with self._monitor.phase("save", f"waiting for {self.path.name}"):
            return self._finished.wait(seconds)

    def finish(self, problem: str | None) -> None:
        """Record the outcome; called by the writer."""
        self._problem = problem
        self._finished.set()


class Saver:
    """Writer of checkpoints, one at a time. All ranks construct it together, and call its methods in the same order."""

    def __init__(self, groups: ProcessGroups, *, page_locked: bool, timeout_s: float) -> None:
        """
        Args:
            page_locked: copy to page-locked host memory.
            timeout_s: seconds to wait for a checkpoint before it counts as failed.
        """
        self._groups, self._timeout_s = groups, timeout_s
        self._staging = Staging(page_locked=page_locked)
        self._group: Any = None
        self._pending: PendingSave | None = None
        # A forked child inherits the exit handler, but not the thread that writes.
        self._process = os.getpid()
        # The writer is a daemon: without this the interpreter would end in the middle of a write.
        atexit.register(self._at_exit)

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate the host memory for saving ``state`` in the background, so that the first save does not wait for it."""
        self._staging.prepare(state)

    def save(
        self,
        path: Path,
        state: CheckpointState,
        *,
        write_more: Callable[[Path], None] | None = None,
        after: Callable[[Path], None] | None = None,
    ) -> PendingSave:
        """Start to write a checkpoint. Call :meth:`finish` before it; tensors may change once this has returned.

        Args:
            write_more: collective, called with the unfinished directory before this returns, for example to export to it.
            after: called on rank 0's writer thread when ``path`` is in place.

        Raises:
            CheckpointError: on every rank: ``path`` holds something else, or cannot be written.
        """
        assert self._pending is None, "one checkpoint is written at a time"
        # Created at the first save, which is collective: runs without checkpoints need no further group.
        if self._group is None:
            self._group = self._groups.new_gloo("checkpoint")
            self._groups.add_channel(CHANNEL)
        path = path.absolute()
        target, temporary = from_rank_0(lambda: self._make_room(path), self._groups, f"the preparation of {path}")
        try:
            state = replace(state, state=self._staging.copy(state.state))
            if write_more is not None:
                write_more(temporary)
        except BaseException:
            # An interrupt, too, must not leave the unfinished directory.
            if self._groups.rank == 0:
                remove(temporary)
            raise
        self._pending = pending = PendingSave(path, state.manifest.step, self._timeout_s, self._groups.monitor)
        # A daemon, so that a disk that hangs does not keep the process alive; _at_exit waits for the write.
        BackgroundThread(self._write, pending, target, temporary, state, after, name="megascend-save").start()
        return pending

    def finish(self) -> None:
        """Wait until no checkpoint is being written. Collective: each rank waits by its own clock.

        Raises:
            CheckpointError: on every rank: the checkpoint failed, or took too long on one.
        """
        problem = None
        try:
            self.wait()
        except CheckpointError as error:
            problem = error
        raise_on_all_ranks(problem, self._groups, "the outcome of the previous checkpoint")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no checkpoint is being written, as far as this rank knows.

        Raises:
            CheckpointError, TimeoutError: as :meth:`PendingSave.wait`; a failure is raised once.
        """
        pending = self._pending
        # PendingSave.wait has reported its outcome already.
        if pending is not None and pending.done and pending.reported:
            self._pending = None
        elif pending is not None:
            try:
                pending.wait(timeout_s)
            finally:
                if pending.done:
                    self._pending = None

    def abandon(self, after_s: float) -> None:
        """Abandon a checkpoint that is being written if it is not complete within ``after_s`` seconds."""
        atexit.unregister(self._at_exit)
        with contextlib.suppress(CheckpointError, TimeoutError):  # the original exception takes precedence
            self.wait(after_s)
        self._pending = None

    def close(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: it could not be written, which has not been raised yet.
        """
        atexit.unregister(self._at_exit)
        try:
            self.wait()
        finally:
            # The group has threads, and the copies take memory, for as long as this object lives.
            if self._pending is None:
                self._group, self._staging = None, Staging(page_locked=False)

    def _at_exit(self) -> None:
        """Complete the last checkpoint of a script that ends without ``close()``."""
        if os.getpid() != self._process:  # a forked child has no thread that writes
            return
        try:
            self.wait()
        except CheckpointError as error:
            logging.getLogger(__name__).error("%s", error)

    def _make_room(self, path: Path) -> tuple[Path, Path]:
        """Create the temporary directory to write to. If ``path`` is a link, its target is replaced, not the link.

        Returns:
            The directory to replace, and the temporary one.
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
        # The outcome if the thread ends with an exception that is not caught below.
        problem: str | None = (
            f"save: {pending.path} could not be written (rank {self._groups.rank}): its thread was ended"
        )
        try:
            with self._groups.monitor.phase("write"):
                result = self._write_files(temporary, contents)
                problem = self._commit(pending.path, target, temporary, contents, after, *result)
        except Exception as error:  # noqa: BLE001  the thread that waits raises it
            problem = f"save: {pending.path} could not be written (rank {self._groups.rank}): {_reason(error)}"
        finally:
            pending.finish(problem)

    def _write_files(self, temporary: Path, contents: CheckpointState) -> tuple[dict[str, dict[str, Any]], str | None]:
        """Write this rank's files; return their digests, and the reason if they could not be written."""
        rank = self._groups.rank
        try:
            writer = ChunkWriter(temporary)
            dcp.save(contents.state, storage_writer=writer, planner=SliceSavePlanner(), process_group=self._group)
            if rank == 0:
                for name, saved in contents.adapters.items():
                    adapter_io.write(temporary / "adapters" / name, saved, contents.base_model, contents.projections)
                if contents.hf_slices is not None:
                    (temporary / hf_slices.NAME).write_text(hf_slices.to_text(contents.hf_slices), encoding="utf-8")
                # This file and common.pt are required by Megatron-Core's dist_checkpointing.
                (temporary / "metadata.json").write_text(json.dumps(MEGATRON_CONFIG), encoding="utf-8")
                with (temporary / "common.pt").open("wb") as file, raising_system_errors():
                    torch.save({"step": contents.manifest.step}, file)
            names = _files_of(temporary, rank)
            # ChunkWriter has hashed the tensor files while it wrote them; only the others are read again.
            return {name: writer.digests.get(name) or manifest.digest(temporary / name) for name in names}, None
        except (Exception, CheckpointException) as error:  # noqa: BLE001  sent to all ranks, which then raise together
            return {}, f"rank {rank}: {_reason(error)}"

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
        """Move the checkpoint into place if every rank has written its files; return the reason if not."""
        step = contents.manifest.step
        # Over the writers' channel: training exchanges objects on its own thread at the same time.
        everyone = collect_objects((files, problem), CHANNEL, self._groups, f"files of {path}", step)
        verdict = None
        if everyone is not None:  # rank 0
            problems = [text for _, text in everyone if text is not None]
            if problems:
                verdict = f"save: {path} could not be written: {problems[0]}"
            else:
                all_files = {name: entry for part, _ in everyone for name, entry in sorted(part.items())}
                verdict = _put_in_place(path, target, temporary, replace(contents.manifest, files=all_files), after)
            if verdict is not None:
                remove(temporary)  # may be what filled the disk
        # A save is complete on the other ranks only when rank 0 has renamed the directory.
        return broadcast_object(verdict, CHANNEL, self._groups, 0, f"the completion of {path}", step)


def _put_in_place(
    path: Path, target: Path, temporary: Path, complete: CheckpointManifest, after: Callable[[Path], None] | None
) -> str | None:
    try:
        # Last: a directory with a manifest is complete.
        (temporary / manifest.NAME).write_text(complete.to_text(), encoding="utf-8")
        replace_directory(temporary, target)
        if after is not None:
            after(path)
    except Exception as error:  # noqa: BLE001  the other ranks wait for the verdict
        return f"save: {path} could not be put in place: {_reason(error)}"
    return None


def _files_of(directory: Path, rank: int) -> list[str]:
    """Return the relative names of the files that ``rank`` digests: its own tensor files, and on rank 0 all others.

    Only rank 0 lists subdirectories: other ranks would see files there that rank 0 is still writing and renaming.
    """
    tensor_files = [file.name for file in directory.glob(f"__{rank}_*")]
    if rank != 0:
        return sorted(tensor_files)
    files = [str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()]
    return sorted([*tensor_files, *(name for name in files if not name.startswith("__"))])


def _reason(error: BaseException) -> str:
    """Describe an error in one line: torch wraps the errors of all ranks in one whose message has all their tracebacks."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"{type(inner).__name__}: {inner} (rank {rank})"
    return f"{type(error).__name__}: {error}"
