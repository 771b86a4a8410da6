"""Store the requests that the service accepts, and save models periodically (``--durable``)."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascend.apps.serve.api.wire import TrainAnswer
from megascend.apps.serve.errors import Failure, RequestRefusedError
from megascend.apps.serve.samplers.sequences import RecordedSequence
from megascend.apps.serve.scheduler.commands import Outcome, Save
from megascend.apps.serve.scheduler.futures import Future
from megascend.apps.serve.service import Durability, Service
from megascend.apps.serve.store.database import Removal, StateDatabase, StoredRow
from megascend.apps.serve.tenancy import Model, Session
from megascend.errors import CheckpointError
from weightwire.background import BackgroundThread, Guard

SAVES = ("save_weights", "save_weights_for_sampler")
"""Requests whose answers are stored, because a replay could find other files. Failures of all requests are stored, because a
replay might succeed."""
# These bound the database and the time of a restart for models that take few steps, or send much for each.
SAVE_AFTER_BYTES = 256 * 2**20
"""Bytes of requests after which a model is saved."""
REQUESTS_PER_STEP = 50
RETRY_S = 1.0
log = logging.getLogger("megascend.apps.serve")


@dataclass
class SinceSave:
    """A model's progress since its last save.

    Attributes:
        following: number of the next request to hand to the ranks.
        requests, steps, bytes: amounts handed to the ranks since the save.
        clean: True if there are no accumulated gradients, which a save would not include.
        saving: number of enqueued saves.
        deferred: future and outcome of a load whose state is not saved yet.
    """

    following: int = 1
    requests: int = 0
    steps: int = 0
    bytes: int = 0
    clean: bool = True
    saving: int = 0
    deferred: tuple[Future, Outcome] | None = None


class DurableState(Durability):
    """Stores requests before they are answered with a future, and saves models periodically.

    Args:
        service: service that calls the hooks.
        writer: writer of the database.
        saves: directory of the models' saves.
        resources: closed at the end.

    Attributes:
        restoring: True while a model is loaded from its save.
        repeated: names of replayed requests that have not ended.
        when_recovered: called when the last replayed request has ended.
    """

    def __init__(self, service: Service, writer: StateWriter, saves: Path, resources: ExitStack) -> None:
        self._service, self._writer, self._saves, self._resources = service, writer, saves, resources
        self._steps = service.settings.durable_steps
        self._models: dict[str, SinceSave] = {}
        self.repeated: set[str] = set()
        self.replaying = self.restoring = False
        self.when_recovered: Callable[[], None] = lambda: None

    @property
    def recovered(self) -> bool:
        return not self.repeated

    @property
    def stalled(self) -> bool:
        return self._writer.stalled

    def check_number(self, number: int | None) -> None:
        if number is None:
            raise RequestRefusedError("with --durable, requests need a seq_id, as clients from 0.16 on send it", 422)

    def note_session(self, session: Session) -> None:
        self._writer.enqueue(
            StoredRow("session", session.name, {"tenant": session.tenant, "metadata": session.metadata})
        )

    def note_session_end(self, session: Session) -> None:
        self._writer.enqueue(Removal("session", session.name))

    def note_sampler(self, session: Session, name: str) -> None:
        values = {"path": session.samplers[name], "clones": session.clones.get(name, 0)}
        self._writer.enqueue(StoredRow("sampler", name, values, parent=session.name))

    def note_request(
        self, future: Future, path: str, body: bytes | Mapping[str, Any], number: int | None = None
    ) -> None:
        # Without a model: a sampling request, which changes nothing and which clients send again. Unloading has its own row
        # (a removal). A replayed request is in the database already.
        if future.recorded or future.model is None or path == "unload_model" or self.replaying:
            return
        future.recorded = True
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if number is None:  # it creates the model, as check_number refuses all others
            values = {"tenant": future.tenant, "path": path, "digest": future.digest}
            self._writer.enqueue(StoredRow("model", future.model, values, body, future.model.partition(":")[0]))
            return
        self._writer.enqueue(
            StoredRow("request", future.name, {"path": path, "digest": future.digest}, body, future.model, number)
        )
        progress = self._models.get(future.model)
        if progress is not None:
            progress.bytes += len(body)

    def note_unload(self, model: Model) -> None:
        if self._models.pop(model.name, None) is not None:
            self._writer.enqueue(Removal("model", model.name))

    def note_sequence(self, name: str, sequence: RecordedSequence) -> None:
        self._writer.enqueue(sequence_row(name, sequence))

    def note_sequence_dropped(self, name: str) -> None:
        self._writer.enqueue(Removal("sequence", name))

    # --- after a restart ---

    def resume_from(self, model: Model, number: int) -> None:
        """Track a model restored from its save, from its next request on."""
        self._models[model.name] = SinceSave(following=number)

    def note_lost(self, model: str) -> None:
        """Drop a model that cannot be restored and has no completed requests."""
        self._writer.enqueue(Removal("model", model))

    # --- saves ---

    def note_turn(self, model: Model, future: Future, number: int | None) -> None:
        if number is None:
            self._models[model.name] = SinceSave()
        progress = self._models.get(model.name)
        if progress is None:
            return
        if number is not None:
            progress.requests += 1
            progress.following = number + 1
        if future.kind == "optim_step":
            progress.steps += 1
        progress.clean = future.kind == "optim_step" or (progress.clean and future.kind != "forward_backward")
        # A load is saved at once: its files may be changed or deleted before a restart repeats it.
        loaded = future.kind == "load_weights" and not self.restoring
        due = (
            progress.steps >= self._steps
            or progress.requests >= REQUESTS_PER_STEP * self._steps
            or progress.bytes >= SAVE_AFTER_BYTES
        )
        # Not with gradients accumulated, which a save does not have: the replay would begin in the middle of a step.
        if loaded or (due and progress.clean and not progress.saving):
            self._save(model, progress)

    def _save(self, model: Model, progress: SinceSave) -> None:
        """Enqueue a save of a model's state after everything handed to the ranks so far."""
        # A new directory for each save: the previous one stays valid until the database names its successor.
        directory = f"{model.name.replace(':train:', '.')}-{secrets.token_hex(8)}"
        # Noted now: requests that arrive before the save has run are behind it in the model's queue.
        following = progress.following
        progress.requests = progress.steps = progress.bytes = 0
        progress.saving += 1

        def then(succeeded: bool) -> None:
            progress.saving -= 1
            if self._models.get(model.name) is not progress:  # the model was removed meanwhile
                shutil.rmtree(self._saves / directory, ignore_errors=True)
            elif succeeded:
                # The load's answer first: the save stores the answers of the requests that it covers, and this is one.
                deferred, progress.deferred = progress.deferred, None
                if deferred is not None:
                    self._service.end(*deferred)
                self._note_save(model, directory, following)
            else:
                log.error("%s could not be saved; retrying after its next step", model.name)
                progress.steps = self._steps  # due again with the next step
                self._refuse(model, progress)

        future = self._service.make_internal("keep_model", model.tenant, then, model.name)
        self._service.submit(Save(future.number, model.adapter, str(self._saves / directory), True))

    def _note_save(self, model: Model, directory: str, following: int) -> None:
        """Store a save, and the answers of requests that it covers, which are not replayed but may still be fetched."""
        lora = model.lora
        values = {
            "directory": directory, "following": following, "steps": model.steps, "losses": model.losses, "rank": lora.rank,
            "parts": [lora.train_attn, lora.train_mlp, lora.train_unembed],
        }  # fmt: skip
        futures = self._service.futures.ended_of(model.tenant, model.name)
        answers = [answer_row(future) for future in futures if (future.number_in_line or following) < following]
        self._writer.enqueue(StoredRow("save", model.name, values, parent=model.name), *answers)

    def defers(self, future: Future, outcome: Outcome) -> bool:
        progress = self._models.get(future.model or "")
        # The client learns of a load only once its state is saved: until then a restart could not repeat it.
        if progress is None or future.kind != "load_weights" or outcome.error is not None or not progress.saving:
            return False
        progress.deferred = (future, outcome)
        return True

    def _refuse(self, model: Model, progress: SinceSave) -> None:
        """Fail a load whose state could not be saved, so a restart could not repeat it."""
        deferred, progress.deferred = progress.deferred, None
        if deferred is not None:
            future, outcome = deferred
            if future.number_in_line is None:  # the load created the model, which no client has heard of yet
                self._service.unload(model, internal=True)
            error = CheckpointError("the loaded state could not be saved for --durable; is the disk full?")
            self._service.end(future, Outcome(outcome.number, error=error))

    # --- outcomes ---

    def note_end(self, future: Future) -> None:
        stored = future.kind in SAVES or future.failure is not None
        if stored and future.model in self._models and future.number_in_line is not None:
            self._writer.enqueue(answer_row(future))
        if future.name in self.repeated:
            self.repeated.discard(future.name)
            if not self.repeated:
                self.when_recovered()

    async def writable(self) -> None:
        if self.stalled:  # waits for the disk to recover, up to the writer's limit
            await self._writer.durable()

    async def durable(self) -> None:
        await self._writer.durable()

    def close(self) -> None:
        self._writer.close()
        self._resources.close()


class StateWriter:
    """Thread that writes changes to the database in order, everything queued meanwhile in one transaction.

    Args:
        database: used by the thread only, once started.
        remove_saves: called in the thread with directories of unreferenced saves.
        wait_s: time that a caller waits for the disk before it is refused.

    Attributes:
        problem: error that currently prevents writing, or None.
    """

    def __init__(
        self, database: StateDatabase, remove_saves: Callable[[Sequence[str]], None], wait_s: float = 10.0
    ) -> None:
        self._database, self._remove_saves, self._wait_s = database, remove_saves, wait_s
        self._changed = threading.Condition()
        self._pending: list[StoredRow | Removal] = []
        self._enqueued_count = self._written_count = 0
        self._closed = False
        self._writing_since: float | None = None
        self.problem: Exception | None = None
        # With their loops: an asyncio.Event must be set in its own thread, and this object is made before the loop exists.
        self._callers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._thread = BackgroundThread(self._run, name="state", on_error=self._ended)

    def start(self) -> None:
        self._thread.start()

    @property
    def stalled(self) -> bool:
        """True while the disk refuses what is written, or has not answered for ``wait_s``."""
        since = self._writing_since
        return self.problem is not None or (since is not None and time.monotonic() - since > self._wait_s)

    def enqueue(self, *changes: StoredRow | Removal) -> None:
        """Queue changes to be written in one transaction."""
        with self._changed:
            self._pending += changes
            self._enqueued_count += len(changes)
            self._changed.notify()

    async def durable(self) -> None:
        """Return when all that was put is on the disk."""
        position, loop = self._enqueued_count, asyncio.get_running_loop()
        end = loop.time() + self._wait_s
        while self._written_count < position:
            changed = asyncio.Event()
            with self._changed:
                # Again under the lock: the thread may have written and woken all callers since the look above.
                if self._written_count >= position:
                    return
                self._callers.append((loop, changed))
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, end - loop.time()))
            except (TimeoutError, asyncio.TimeoutError):
                reason = "the disk is slow" if self.problem is None else str(self.problem)
                raise RequestRefusedError(f"the server's state cannot be written: {reason}", 503) from None

    def close(self) -> None:
        """Write the remaining changes if possible, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(10)

    def _ended(self, error: BaseException) -> None:
        log.error("the thread that writes the state has ended", exc_info=error)
        # No further request can be accepted.
        self.problem = RuntimeError(f"internal error ({type(error).__name__}); the server has to be started again")

    def _run(self) -> None:
        guard = Guard("what follows a write of the state")
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                # All of them: one fsync serves every request that arrived during the previous one (group commit).
                changes, self._pending = self._pending, []
            if not changes:
                return
            self._writing_since = time.monotonic()
            unneeded = self._write(changes)
            self._writing_since = None
            if unneeded is None:
                return
            with self._changed:
                self._written_count += len(changes)
                callers, self._callers = self._callers, []
            del changes  # releases the request bodies
            for loop, changed in callers:
                with guard:
                    if not loop.is_closed():
                        loop.call_soon_threadsafe(changed.set)
            # Only after the commit that no longer names them, and after the callers, who need not wait for the disk to delete.
            with guard:
                self._remove_saves(unneeded)

    def _write(self, changes: Sequence[StoredRow | Removal]) -> list[str] | None:
        """Write, retrying while the disk fails; return None if closed before that succeeds."""
        while True:
            try:
                unneeded = self._database.write(changes)
            except sqlite3.OperationalError as error:  # a full disk, mostly: the transaction was rolled back
                if self.problem is None:
                    log.error("%s cannot be written (%s); requests wait until it can", self._database.path, error)
                self.problem = error
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, RETRY_S):
                        return None
            else:
                if self.problem is not None:
                    log.warning("%s can be written again", self._database.path)
                self.problem = None
                return unneeded


# --- answers and responses as rows, and back ---


def answer_row(future: Future) -> StoredRow:
    """Encode the outcome of a request as a row."""
    values: dict[str, Any] = {"kind": future.kind, "digest": future.digest}
    body = b""
    if future.failure is not None:
        values["failure"] = [future.failure.message, future.failure.category]
    elif isinstance(future.answer, TrainAnswer):
        arrays = [np.ascontiguousarray(array, np.float32) for array in future.answer.logprobs]
        values |= {"metrics": dict(future.answer.metrics), "shapes": [list(array.shape) for array in arrays]}
        body = b"".join(array.tobytes() for array in arrays)
    else:
        values["answer"] = future.answer
    return StoredRow("answer", future.name, values, body, future.model, future.number_in_line)


def answer_of(row: StoredRow) -> tuple[Any, Failure | None]:
    """Decode :func:`answer_row` to (answer, failure), one of them None."""
    values = row.values
    if "failure" in values:
        return None, Failure(*values["failure"])
    if "shapes" not in values:
        return values["answer"], None
    flat, start, arrays = np.frombuffer(row.body, np.float32), 0, []
    for shape in values["shapes"]:
        size = int(np.prod(shape))
        arrays.append(flat[start : start + size].reshape(shape))
        start += size
    return TrainAnswer(arrays, values["metrics"]), None


def sequence_row(name: str, sequence: RecordedSequence) -> StoredRow:
    """Encode a recorded response, which training requests may reference, as a row."""
    parts = (sequence.prompt.astype(np.int32), sequence.tokens.astype(np.int32), sequence.logprobs.astype(np.float32))
    body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    return StoredRow("sequence", name, {"prompt": len(sequence.prompt)}, body, sequence.session)


def stored_sequence(row: StoredRow) -> RecordedSequence:
    """Decode :func:`sequence_row`."""
    assert row.parent is not None
    prompt = row.values["prompt"]
    tokens = (len(row.body) // 4 - prompt) // 2
    ids = np.frombuffer(row.body, np.int32, prompt + tokens).astype(np.int64)
    logprobs = np.frombuffer(row.body, np.float32, tokens, 4 * (prompt + tokens))
    return RecordedSequence(row.parent, ids[:prompt], ids[prompt:], logprobs, 0.0)
