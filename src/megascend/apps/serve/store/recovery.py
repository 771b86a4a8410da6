"""Restore a service from its database: sessions, models and answers, and replay requests that no save covers."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascend.apps.serve.api.bodies import LoraSettings, WithMetadata
from megascend.apps.serve.api.wire import train_request_of_json, train_request_of_protobuf
from megascend.apps.serve.operations import BY_PATH, train
from megascend.apps.serve.scheduler.commands import Create, ForwardBackward, OptimizerStep
from megascend.apps.serve.scheduler.futures import Future
from megascend.apps.serve.service import Service
from megascend.apps.serve.store.database import StateDatabase, StoredRow
from megascend.apps.serve.store.durability import DurableState, StateWriter, answer_of, stored_sequence
from megascend.apps.serve.tenancy import Model
from megascend.config import Adam
from megascend.config.serve import ServeConfig
from megascend.errors import CheckpointError, ConfigError, MegascendError
from megascend.runtime.io.paths import make_directory
from megascend.runtime.io.shared import hold

NAME = ".state"
"""Directory in the service's storage with the database and the models' saves. Tenant names have no dots, so it cannot clash."""
EARLIER = ".journal"
LOCK_S = 30.0
"""Time that a killed server may take to exit."""
log = logging.getLogger("megascend.apps.serve")


def keep_state(service: Service) -> None:
    """Restore the state in the service's storage, and store all further changes there."""
    storage = service.settings.storage
    if (storage / EARLIER).exists():
        raise ConfigError(
            f"{storage / EARLIER} was written by an earlier version of megascend, which this one cannot continue: move it "
            "away, or use another storage"
        )
    folder, saves = storage / NAME, storage / NAME / "saves"
    start = time.monotonic()
    resources = ExitStack()
    resources.callback(lock(storage))
    try:
        make_directory(saves)
        database = StateDatabase(folder / "state.sqlite")
        resources.callback(database.close)
        _check_settings(database, service.settings)
        _check_saves(saves, database)

        def remove(directories: Sequence[str]) -> None:
            for directory in directories:
                shutil.rmtree(saves / directory, ignore_errors=True)

        writer = StateWriter(database, remove)
        service.durability = state = DurableState(service, writer, saves, resources)
        count = Recovery(service, state, database, saves).run()
    except BaseException:
        resources.close()
        raise
    writer.start()  # only now: until here this thread has used the database
    sessions, models = service.tenancy.sessions, service.tenancy.models
    if sessions:
        log.warning("state: %d sessions, %d models, %d requests to repeat", len(sessions), len(models), count)
        state.when_recovered = lambda: log.warning("state: recovered in %.1f s", time.monotonic() - start)


def lock(storage: Path) -> Callable[[], None]:
    """Lock a storage against other servers, durable or not; return the function that unlocks it."""
    folder = storage / NAME
    make_directory(folder)
    folder.chmod(0o700)  # the database has the tenants' training data
    try:
        return hold(folder / "lock", LOCK_S).release
    except TimeoutError:
        raise ConfigError(f"another server uses {folder}; give each its own storage") from None


def _check_saves(saves: Path, database: StateDatabase) -> None:
    """Remove unreferenced save directories, and raise if a referenced one is missing."""
    # Unreferenced: a save was written and its row was not, or its row was replaced and the server ended before the removal.
    required = {save.values["directory"] for save in database.rows("save")}
    for path in saves.iterdir():
        if path.name not in required:
            shutil.rmtree(path, ignore_errors=True)
    missing = sorted(name for name in required if not (saves / name).is_dir())
    if missing:
        raise CheckpointError(
            f"{saves / missing[0]} is missing, which the database beside it needs; restore it from a copy"
        )


def _check_settings(database: StateDatabase, settings: ServeConfig) -> None:
    """Raise if the state belongs to another model, or to settings with which a replay would give other results."""
    current: dict[str, Any] = {
        "model": _digest(settings.model), "precision": settings.precision, "alpha": settings.alpha,
        "unembed": settings.unembed, "engine": settings.engine,
    }  # fmt: skip
    earlier = next(database.rows("settings"), None)
    if earlier is None:
        database.write([StoredRow("settings", "base", current)])
        return
    changed = [name for name, value in current.items() if earlier.values.get(name) != value]
    if changed:
        was = ", ".join(f"{name} {earlier.values.get(name)!r} then, {current[name]!r} now" for name in changed)
        raise ConfigError(
            f"{database.path.parent} belongs to a server with other settings ({was}); use these again, or another storage"
        )


def _digest(model: Path) -> str:
    """Hash a model's configuration and the names and sizes of its weight files; hashing the weights would take minutes."""
    parts = [(model / "config.json").read_bytes()]
    parts += [f"{file.name} {file.stat().st_size}".encode() for file in sorted(model.glob("*.safetensors"))]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


class Recovery:
    """Restores a service from its database.

    Args:
        service: without sessions and models.
        saves: directory of the models' saves.
    """

    def __init__(self, service: Service, state: DurableState, database: StateDatabase, saves: Path) -> None:
        self._service, self._state, self._database, self._saves = service, state, database, saves

    def run(self) -> int:
        """Restore everything; return the number of requests that are enqueued again."""
        service, state, rows = self._service, self._state, self._database.rows
        for row in rows("session"):
            service.tenancy.restore_session(row.name, row.values["tenant"], row.values["metadata"])
        sessions = service.tenancy.sessions
        for row in rows("sampler"):
            session = sessions[row.parent or ""]
            session.add_sampler(row.name, row.values["path"])
            session.clones[row.name] = row.values.get("clones", 0)  # not in rows of earlier versions
        for row in rows("sequence"):
            service.sequences.keep(sessions[row.parent or ""].tenant, row.name, stored_sequence(row))
        # Only now: the rows just restored need not be written again.
        service.sequences.on_keep, service.sequences.on_drop = state.note_sequence, state.note_sequence_dropped
        # Replayed requests are neither stored again nor refused for load: their clients were answered already.
        state.replaying = True
        try:
            futures = [future for model in list(rows("model")) for future in self._restore(model)]
        finally:
            state.replaying = False
        state.repeated = {future.name for future in futures if future.ended is None and self._was_started(future)}
        return len(state.repeated)

    def _was_started(self, future: Future) -> bool:
        model = self._service.tenancy.models.get(future.model or "")
        # A request behind a missing number waits for its client; readiness must not wait for it, too.
        number = future.number_in_line
        return model is not None and (number is None or number < model.order.following)

    def _restore(self, row: StoredRow) -> list[Future]:
        """Restore a model from its last save or its creation, with its answers, and enqueue the requests that follow."""
        body, path = json.loads(row.body), row.values["path"]
        save = next(self._database.rows("save", row.name), None)
        try:
            if save is not None:
                first = self._load(row, save, body)
            else:
                first = BY_PATH[path](self._service, row.values["tenant"], body)
        except MegascendError as error:
            # Without a save the load never completed, so no client relies on the model.
            if save is None and path == "load_weights":
                log.warning("%s begins with a checkpoint that cannot be loaded any more: %s", row.name, error)
                self._state.note_lost(row.name)
                return []
            raise CheckpointError(f"{row.name} cannot be restored from {self._database.path}: {error}") from None
        # Digests are not in rows of earlier versions.
        first.recorded, first.digest = True, row.values.get("digest")
        model = self._service.tenancy.models[row.name]
        # An answer without its request belongs to a step that the save covers: its client may still fetch it.
        answers = {answer.name: answer for answer in self._database.rows("answer", row.name)}
        requests = list(self._database.rows("request", row.name))
        repeated = {request.name for request in requests}
        for answer in answers.values():
            if answer.name not in repeated:
                self._restore_answer(model, answer)
        return [first, *(self._repeat(model, request, answers.get(request.name)) for request in requests)]

    def _load(self, row: StoredRow, save: StoredRow, body: dict[str, Any]) -> Future:
        """Restore a model from its save."""
        values, service = save.values, self._service
        session = service.tenancy.sessions[row.parent or ""]
        attention, mlp, output = values["parts"]
        lora = LoraSettings(rank=values["rank"], train_attn=attention, train_mlp=mlp, train_unembed=output)
        directory = self._saves / values["directory"]

        def command(model: Model, ticket: int) -> Create:
            return Create(ticket, model.adapter, None, str(directory), True)

        # Otherwise the turn of the load would have it saved again, as one of a client's is.
        self._state.restoring = True
        try:
            future = service.new_model(
                session, body["model_seq_id"], lora, WithMetadata.read(body).user_metadata, command, row.values["path"]
            )
        finally:
            self._state.restoring = False
        model = service.tenancy.models[row.name]
        model.order.following, model.steps = values["following"], values["steps"]
        model.losses = [(step, loss, tokens) for step, loss, tokens in values["losses"]]
        self._state.resume_from(model, values["following"])
        return future

    def _restore_answer(self, model: Model, row: StoredRow) -> None:
        """Restore a finished future."""
        future = self._service.futures.make(
            row.name,
            model.tenant,
            model.name,
            row.values["kind"],
            number_in_line=row.number,
            digest=row.values.get("digest"),
            recorded=True,
        )
        self._end(future, row)

    def _end(self, future: Future, row: StoredRow) -> None:
        answer, failure = answer_of(row)
        if failure is not None:
            self._service.futures.fail(future, failure)
        else:
            future.answer_of = lambda _: answer
            self._service.futures.complete(future, None)

    def _repeat(self, model: Model, request: StoredRow, answer: StoredRow | None) -> Future:
        """Enqueue a request again, or its stored answer in its turn."""
        assert request.number is not None
        if answer is None:
            future = self._replay(model, request.values["path"], request.body, request.number)
        else:

            def end(ticket: int) -> None:
                future = self._service.futures.by_number(ticket)
                assert future is not None
                self._end(future, answer)
                if future.failure is not None:
                    self._fail_again(model, future.kind, future.failure.message)

            # Through the queue, not at once: a request that failed must fail its step after those before it have run.
            future = self._service.enqueue(model, request.number, answer.values["kind"], end)
        future.recorded, future.digest = True, request.values.get("digest")
        return future

    def _fail_again(self, model: Model, kind: str, message: str) -> None:
        """Fail the optimizer step of a failed request again, even if its cause (full memory, say) would not recur."""
        service = self._service
        ticket = service.make_internal("fail_again").number
        if kind == "forward_backward":
            service.submit(ForwardBackward(ticket, model.adapter, (), None, message))
        elif kind == "optim_step":
            service.submit(OptimizerStep(ticket, model.adapter, Adam(), message))

    def _replay(self, model: Model, path: str, body: bytes, number: int) -> Future:
        service, max_samples = self._service, self._service.settings.limits.samples
        image_processor = service.base.image_processor
        if path == "protobuf":
            return train(service, model.tenant, train_request_of_protobuf(body, max_samples, image_processor))
        if path in ("forward", "forward_backward", "resolved"):
            forward_only = path == "forward"
            request = train_request_of_json(json.loads(body), max_samples, image_processor, forward_only=forward_only)
            return train(service, model.tenant, replace(request, resolved=path == "resolved"))
        if path == "missing":
            return service.enqueue_missing(model, number, body.decode())
        return BY_PATH[path](service, model.tenant, json.loads(body))
