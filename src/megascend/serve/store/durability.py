"""Store what the service reports, and save models from time to time (``--durable``)."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascend.errors import CheckpointError
from megascend.serve.api.wire import TrainAnswer, TrainRequest, json_of_train_request
from megascend.serve.errors import Failure, RequestRefusedError
from megascend.serve.samplers.sequences import RecordedSequence
from megascend.serve.scheduler.commands import Outcome, Save
from megascend.serve.scheduler.futures import Future
from megascend.serve.service import Durability, Service
from megascend.serve.store.database import Removal, StateDatabase, StoredRow
from megascend.serve.tenancy import Model, Session

SAVES = ("save_weights", "save_weights_for_sampler")
"""Requests whose outcome is stored, as the client may have changed their files since. Failures are stored of all requests: their
reasons may be gone."""
MOST_BYTES = 256 * 2**20
"""Bytes of a model's requests after which it is saved, whatever they are."""
REQUESTS_PER_STEP = 50
RETRY_S = 1.0
log = logging.getLogger("megascend.serve")


@dataclass
class SinceSave:
    """A model since its last save.

    Attributes:
        following: number of the request that is given to the ranks next.
        requests, steps, bytes: of what they were given.
        clean: nothing is accumulated that a save would not have.
        saving: saves that are in line.
        held: outcome of a load whose state is not saved yet.
    """

    following: int = 1
    requests: int = 0
    steps: int = 0
    bytes: int = 0
    clean: bool = True
    saving: int = 0
    held: tuple[Future, Outcome] | None = None


class DurableState(Durability):
    """Stores requests before they are promised, and saves models from time to time.

    Args:
        service: that reports to this object.
        writer: of the database.
        saves: directory of the models' saves.
        resources: closed at the end.

    Attributes:
        restoring: a model is being loaded from its save.
        when_recovered: called when the last repeated request has ended.
    """

    def __init__(self, service: Service, writer: StateWriter, saves: Path, resources: ExitStack) -> None:
        self._service, self._writer, self._saves, self._resources = service, writer, saves, resources
        self._steps = service.settings.durable_steps
        self._models: dict[str, SinceSave] = {}
        self._repeated: set[str] = set()
        self.repeating = self.restoring = False
        self.when_recovered: Callable[[], None] = lambda: None

    @property
    def recovered(self) -> bool:
        return not self._repeated

    @property
    def stalled(self) -> bool:
        return self._writer.problem is not None

    def check_number(self, number: int | None) -> None:
        if number is None:
            raise RequestRefusedError("with --durable, requests need a seq_id, as clients from 0.16 on send it", 422)

    def session(self, session: Session) -> None:
        self._writer.put(StoredRow("session", session.name, {"tenant": session.tenant, "metadata": session.metadata}))

    def ended(self, session: Session) -> None:
        self._writer.put(Removal("session", session.name))

    def sampler(self, session: Session, name: str, path: str | None) -> None:
        self._writer.put(StoredRow("sampler", name, {"path": path}, parent=session.name))

    def asked(self, future: Future, path: str, body: bytes | Mapping[str, Any], number: int | None = None) -> None:
        if future.noted or future.model is None or path == "unload_model" or self.repeating:
            return
        future.noted = True
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if number is None:
            values = {"tenant": future.tenant, "path": path}
            self._writer.put(StoredRow("model", future.model, values, body, future.model.partition(":")[0]))
            return
        self._writer.put(StoredRow("request", future.name, {"path": path}, body, future.model, number))
        progress = self._models.get(future.model)
        if progress is not None:
            progress.bytes += len(body)

    def unloaded(self, model: Model) -> None:
        if self._models.pop(model.name, None) is not None:
            self._writer.put(Removal("model", model.name))

    def resolved(self, future: Future, request: TrainRequest) -> None:
        if not future.noted:
            self.asked(future, "resolved", json_of_train_request(request), request.number)

    def sequence(self, name: str, sequence: RecordedSequence) -> None:
        """Note that a response is remembered."""
        self._writer.put(sequence_row(name, sequence))

    def dropped(self, name: str) -> None:
        """Note that a response is not remembered any more."""
        self._writer.put(Removal("sequence", name))

    # --- after a restart ---

    def directory(self, name: str) -> Path:
        """Return the directory of a save."""
        return self._saves / name

    def following(self, model: Model, number: int) -> None:
        """Note that a model was restored from its save, and the number of its next request."""
        self._models[model.name] = SinceSave(following=number)

    def lost(self, model: str) -> None:
        """Note that a model cannot be restored that nobody was promised."""
        self._writer.put(Removal("model", model))

    def wait_for(self, names: set[str]) -> None:
        """Be recovered once the futures of these names have ended."""
        self._repeated = names

    # --- saves ---

    def turn(self, model: Model, future: Future, number: int | None) -> None:
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
        loaded = future.kind == "load_weights" and not self.restoring
        due = (
            progress.steps >= self._steps
            or progress.requests >= REQUESTS_PER_STEP * self._steps
            or progress.bytes >= MOST_BYTES
        )
        if loaded or (due and progress.clean and not progress.saving):
            self._save(model, progress)

    def _save(self, model: Model, progress: SinceSave) -> None:
        """Save a model as it is after all that it was given so far."""
        directory = f"{model.name.replace(':train:', '.')}-{secrets.token_hex(8)}"
        following = progress.following
        progress.requests = progress.steps = progress.bytes = 0
        progress.saving += 1

        def then(succeeded: bool) -> None:
            progress.saving -= 1
            if self._models.get(model.name) is not progress:
                shutil.rmtree(self._saves / directory, ignore_errors=True)
            elif succeeded:
                held, progress.held = progress.held, None
                if held is not None:
                    self._service.end(*held)
                self._note_save(model, directory, following)
            else:
                log.error("%s could not be saved; it will be tried again after its next step", model.name)
                progress.steps = self._steps
                self._refuse(model, progress)

        label = self._service.new_label("keep_model")
        future = self._service.futures.make(label, "", None, "keep_model", then=then, internal=True)
        self._service.put(Save(future.number, model.adapter, str(self._saves / directory), True))

    def _note_save(self, model: Model, directory: str, following: int) -> None:
        """Store a save, and the answers of requests that it covers, which clients may still fetch."""
        values = {
            "directory": directory, "following": following, "steps": model.steps, "losses": model.losses, "rank": model.rank,
            "parts": [model.attention, model.mlp, model.output],
        }  # fmt: skip
        futures = self._service.futures.ended_of(model.name)
        answers = [answer_row(each) for each in futures if (each.number_in_line or following) < following]
        self._writer.put(StoredRow("save", model.name, values, parent=model.name), *answers)

    def hold(self, future: Future, outcome: Outcome) -> bool:
        progress = self._models.get(future.model or "")
        if progress is None or future.kind != "load_weights" or outcome.error is not None or not progress.saving:
            return False
        progress.held = (future, outcome)
        return True

    def _refuse(self, model: Model, progress: SinceSave) -> None:
        """Fail a load that a restart could not repeat."""
        held, progress.held = progress.held, None
        if held is not None:
            future, outcome = held
            if future.number_in_line is None:
                self._service.unload(model, internal=True)
            error = CheckpointError("what was loaded could not be saved for --durable; is the disk full?")
            self._service.end(future, Outcome(outcome.number, error=error))

    # --- outcomes ---

    def over(self, future: Future) -> None:
        stored = future.kind in SAVES or future.failure is not None
        if stored and future.model in self._models and future.number_in_line is not None:
            self._writer.put(answer_row(future))
        if future.name in self._repeated:
            self._repeated.discard(future.name)
            if not self._repeated:
                self.when_recovered()

    async def writable(self) -> None:
        if self.stalled:
            await self._writer.durable()

    async def durable(self) -> None:
        await self._writer.durable()

    def close(self) -> None:
        self._writer.close()
        self._resources.close()


class StateWriter:
    """Writes in the order of :meth:`put`, from :meth:`start` on.

    Args:
        database: used by the thread alone once that runs.
        remove_saves: called in the thread with directories of saves that no row names any more.
        wait_s: how long a caller waits for the disk before it is refused.

    Attributes:
        problem: why nothing can be written at present.
    """

    def __init__(
        self, database: StateDatabase, remove_saves: Callable[[Sequence[str]], None], wait_s: float = 10.0
    ) -> None:
        self._database, self._remove_saves, self._wait_s = database, remove_saves, wait_s
        self._changed = threading.Condition()
        self._waiting: list[StoredRow | Removal] = []
        self._put = self._written = 0
        self._closed = False
        self.problem: Exception | None = None
        self._callers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._thread = threading.Thread(target=self._run_or_log, name="state", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, *changes: StoredRow | Removal) -> None:
        """Write changes soon, in one transaction."""
        with self._changed:
            self._waiting += changes
            self._put += len(changes)
            self._changed.notify()

    async def durable(self) -> None:
        """Return when all that was put is on the disk.

        Raises:
            RequestRefusedError: 503; it is not yet.
        """
        position, loop = self._put, asyncio.get_running_loop()
        end = loop.time() + self._wait_s
        while self._written < position:
            changed = asyncio.Event()
            with self._changed:
                if self._written >= position:
                    return
                self._callers.append((loop, changed))
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, end - loop.time()))
            except (TimeoutError, asyncio.TimeoutError):
                reason = "the disk is slow" if self.problem is None else str(self.problem)
                raise RequestRefusedError(f"the server's state cannot be written: {reason}", 503) from None

    def close(self) -> None:
        """Write what is left, if that is possible, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(10)

    def _run_or_log(self) -> None:
        try:
            self._run()
        except Exception as error:  # nothing can be promised from here on
            log.exception("the thread that writes the state has ended")
            self.problem = RuntimeError(f"internal error ({type(error).__name__}); the server has to be started again")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                changes, self._waiting = self._waiting, []
            if not changes:
                return
            unneeded = self._write(changes)
            if unneeded is None:
                return
            with self._changed:
                self._written += len(changes)
                callers, self._callers = self._callers, []
            del changes  # the bodies are on the disk
            for loop, changed in callers:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(changed.set)
            self._remove_saves(unneeded)

    def _write(self, changes: Sequence[StoredRow | Removal]) -> list[str] | None:
        """Write, again and again while the disk refuses; None if it still did when this was closed."""
        while True:
            try:
                unneeded = self._database.write(changes)
            except sqlite3.OperationalError as error:
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
    """Encode the outcome of a model's request."""
    values: dict[str, Any] = {"kind": future.kind}
    body = b""
    if future.failure is not None:
        values["failure"] = [future.failure.message, future.failure.category]
    elif isinstance(future.answer, TrainAnswer):
        arrays = [np.ascontiguousarray(each, np.float32) for each in future.answer.logprobs]
        values |= {"metrics": dict(future.answer.metrics), "shapes": [list(each.shape) for each in arrays]}
        body = b"".join(each.tobytes() for each in arrays)
    else:
        values["answer"] = future.answer
    return StoredRow("answer", future.name, values, body, future.model, future.number_in_line)


def answer_of(row: StoredRow) -> tuple[Any, Failure | None]:
    """Decode :func:`answer_row`: (answer, failure), one of them None."""
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
    """Encode a response that training requests may name."""
    parts = (sequence.prompt.astype(np.int32), sequence.tokens.astype(np.int32), sequence.logprobs.astype(np.float32))
    body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    return StoredRow("sequence", name, {"prompt": len(sequence.prompt)}, body, sequence.session)


def sequence_of(row: StoredRow) -> RecordedSequence:
    """Decode :func:`sequence_row`."""
    assert row.parent is not None
    prompt = row.values["prompt"]
    tokens = (len(row.body) // 4 - prompt) // 2
    ids = np.frombuffer(row.body, np.int32, prompt + tokens).astype(np.int64)
    logprobs = np.frombuffer(row.body, np.float32, tokens, 4 * (prompt + tokens))
    return RecordedSequence(row.parent, ids[:prompt], ids[prompt:], logprobs, 0.0)
