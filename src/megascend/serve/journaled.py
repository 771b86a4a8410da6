"""``--durable``: requests are in the journal before they are promised, and models are saved now and then."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.errors import CheckpointError
from megascend.serve.commands import Outcome, Save
from megascend.serve.durability import Durability
from megascend.serve.errors import RequestRefusedError
from megascend.serve.futures import Future
from megascend.serve.journal import Entry
from megascend.serve.journal_writer import JournalWriter
from megascend.serve.kept_answers import answer_entry, sequence_entry
from megascend.serve.wire import TrainRequest, json_of_train_request

if TYPE_CHECKING:
    from megascend.serve.sequences import RecordedSequence
    from megascend.serve.service import Service
    from megascend.serve.tenancy import Model, Session

NEW_MODEL = ("create_model", "load_weights")
SAVES = ("save_weights", "save_weights_for_sampler")
"""Requests whose outcome is kept, as files came of them that the client may have changed since. Failures are kept of all: they
may have had reasons that are gone."""
MOST_BYTES = 256 * 2**20
"""Bytes of a model's requests after which it is saved, whatever they are."""
REQUESTS_PER_STEP = 50
log = logging.getLogger("megascend.serve")


@dataclass
class Progress:
    """A model since its last save.

    Attributes:
        following: number of the request that is given to the ranks next.
        requests, steps, bytes: of what they were given.
        clean: nothing is accumulated that a save would not have.
        saving: saves that are in line.
        held: what came of a load whose state is not saved yet.
    """

    following: int = 1
    requests: int = 0
    steps: int = 0
    bytes: int = 0
    clean: bool = True
    saving: int = 0
    held: tuple[Future, Outcome] | None = None


class Journaled(Durability):
    """Keeps everything.

    Args:
        service: that this is told by.
        writer: of the journal.
        saves: directory of the models' saves.
        steps: of a model between its saves.
        lock: descriptor to close at the end.

    Attributes:
        repeating: requests that were taken before are being put in line again.
        restoring: a model is being loaded from its save.
        when_recovered: called when the last of them has ended.
    """

    def __init__(self, service: Service, writer: JournalWriter, saves: Path, steps: int, lock: int) -> None:
        self._service, self._writer, self._saves, self._steps, self._lock = service, writer, saves, steps, lock
        self._models: dict[str, Progress] = {}
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
        values = {"session": session.name, "tenant": session.tenant, "metadata": session.metadata}
        self._writer.put(Entry("session", values))

    def ended(self, session: Session) -> None:
        self._writer.put(Entry("end", {"session": session.name}))

    def sampler(self, session: Session, name: str, path: str | None) -> None:
        self._writer.put(Entry("sampler", {"session": session.name, "sampler": name, "path": path}))

    def asked(self, future: Future, path: str, body: bytes | Mapping[str, Any], number: int | None = None) -> None:
        if future.noted or future.model is None or path == "unload_model" or self.repeating:
            return
        future.noted = True
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        values: dict[str, Any] = {"model": future.model, "tenant": future.tenant, "path": path}
        if number is None:
            values["session"] = future.model.partition(":")[0]
            self._writer.put(Entry("model", values, body))
            return
        self._writer.put(Entry("request", {**values, "name": future.name, "number": number}, body))
        progress = self._models.get(future.model)
        if progress is not None:
            progress.bytes += len(body)

    def unloaded(self, model: Model) -> None:
        if self._models.pop(model.name, None) is not None:
            self._writer.put(Entry("unload", {"model": model.name}))

    def resolved(self, future: Future, request: TrainRequest) -> None:
        if not future.noted:
            self.asked(future, "resolved", json_of_train_request(request), request.number)

    def sequence(self, name: str, found: RecordedSequence) -> None:
        """A response is remembered."""
        self._writer.put(sequence_entry(name, found))

    def dropped(self, name: str) -> None:
        """A response is not remembered any more."""
        self._writer.put(Entry("forget", {"sequence": name}))

    # --- after a restart ---

    def directory(self, name: str) -> Path:
        """Where a save is."""
        return self._saves / name

    def following(self, model: Model, number: int) -> None:
        """A model was restored from its save, and its next request has this number."""
        self._models[model.name] = Progress(following=number)

    def lost(self, model: str) -> None:
        """A model cannot be restored that nobody was promised."""
        self._writer.put(Entry("unload", {"model": model}))

    def wait_for(self, names: set[str]) -> None:
        """What must end before all is as it was."""
        self._repeated = names

    # --- saves ---

    def turn(self, model: Model, future: Future, number: int | None) -> None:
        if number is None:
            self._models[model.name] = Progress()
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

    def _save(self, model: Model, progress: Progress) -> None:
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
                self._release(model, progress)
                self._note_save(model, directory, following)
            else:
                log.error("%s could not be saved; it will be tried again after its next step", model.name)
                progress.steps = self._steps
                self._refuse(model, progress)

        label = self._service.new_label("keep_model")
        future = self._service.futures.make(label, "", None, "keep_model", then=then, internal=True)
        self._service.put(Save(future.number, model.adapter, str(self._saves / directory), True))

    def _note_save(self, model: Model, directory: str, following: int) -> None:
        """Note a save, and answers of requests that it covers, which clients may still fetch."""
        values = {
            "model": model.name, "directory": directory, "following": following, "steps": model.steps,
            "losses": model.losses, "rank": model.rank, "parts": [model.attention, model.mlp, model.output],
        }  # fmt: skip
        futures = self._service.futures.ended_of(model.name)
        answers = [answer_entry(each) for each in futures if (each.number_in_line or following) < following]
        self._writer.put(Entry("save", values), *answers)

    def hold(self, future: Future, outcome: Outcome) -> bool:
        progress = self._models.get(future.model or "")
        if progress is None or future.kind != "load_weights" or outcome.error is not None or not progress.saving:
            return False
        progress.held = (future, outcome)
        return True

    def _release(self, model: Model, progress: Progress) -> None:
        held, progress.held = progress.held, None
        if held is not None:
            self._service.end(*held)

    def _refuse(self, model: Model, progress: Progress) -> None:
        """A load cannot be promised that a restart could not repeat."""
        held, progress.held = progress.held, None
        if held is not None:
            future, outcome = held
            if future.number_in_line is None:
                self._service.unload(model, internal=True)
            error = CheckpointError("what was loaded could not be saved for --durable; is the disk full?")
            self._service.end(future, Outcome(outcome.number, error=error))

    # --- what becomes of requests ---

    def over(self, future: Future) -> None:
        if (
            (future.kind in SAVES or future.failure is not None)
            and future.model in self._models
            and future.number_in_line is not None
        ):
            self._writer.put(answer_entry(future))
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
        os.close(self._lock)
