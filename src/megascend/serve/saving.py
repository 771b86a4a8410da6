"""Saving and loading on behalf of clients: names become directories, records make what was saved count."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megascend.errors import ConfigError
from megascend.serve.checkpoints import Record
from megascend.serve.errors import RequestRefusedError
from megascend.serve.names import CheckpointPath, Kind, sampler_name
from megascend.serve.requests import LoraRequest, flag, integer, lifetime_of, metadata_of, text
from megascend.serve.scheduler.commands import Create, Load, Save
from megascend.serve.scheduler.futures import Future
from megascend.serve.scheduler.turns import fail, in_line
from megascend.serve.service import Service
from megascend.serve.tenancy import Model, Session
from megascend.serve.wire import number_of


def save(service: Service, model: Model, body: Mapping[str, Any], kind: Kind) -> Future:
    """Write a model's adapter as a checkpoint, in its turn. ``weights`` has the optimizer's state, too.

    A checkpoint of that name fails the future, unless the client says ``overwrite``. What a sampling client saves without
    a name belongs to a sampler of the session's, which is what it is answered with.
    """
    number, request = number_of(body.get("seq_id")), "save_weights" if kind == "weights" else "save_weights_for_sampler"
    try:
        path, sampler = _wanted(model, body, kind, number)
        metadata = metadata_of(body)
        ttl = lifetime_of(body)
        overwrite = flag(body, "overwrite", False)
        if body.get("kind", "snapshot") != "snapshot":
            raise ConfigError(f"kind {str(body['kind'])[:40]!r}: this server saves snapshots only")
        used = service.checkpoints.bytes_of(model.tenant)
        if used > service.settings.limits.storage_bytes:
            raise ConfigError(
                f"your checkpoints take {used} bytes; {service.settings.limits.storage_bytes} are allowed"
            )
    except (RequestRefusedError, ConfigError) as error:
        return fail(service, model, number, request, ConfigError(str(error)))

    def record() -> Record:
        now = time.time()
        return Record(
            path, service.base.names[0], model.rank, model.attention, model.mlp, model.output, now,
            None if ttl is None else now + ttl, optimizer=kind == "weights", user_metadata=metadata, request=number,
        )  # fmt: skip

    def answer(_: Any) -> dict[str, Any]:
        service.checkpoints.commit(model.tenant, record())
        if sampler is not None:
            session = service.tenancy.sessions.get(model.session)
            if session is not None:
                service.add_sampler(session, sampler, str(path))
            return {"type": request, "path": None, "sampling_session_id": sampler}
        return {"type": request, "path": str(path)}

    def command(ticket: int) -> Save | None:
        there = service.checkpoints.exists(model.tenant, path) and not overwrite and sampler is None
        if there and not (service.durability.repeating and _made_by(service, model, path, number)):
            error = ConfigError(f"checkpoint {path} exists; save under another name, or with overwrite")
            service.break_future(ticket, error)
            return None
        directory = path.directory(service.settings.storage, model.tenant)
        return Save(ticket, model.adapter, str(directory), kind == "weights")

    return in_line(service, model, number, request, command, answer_of=answer)


def _made_by(service: Service, model: Model, path: CheckpointPath, number: int | None) -> bool:
    """Whether this very request has saved a checkpoint, before a restart."""
    return number is not None and service.checkpoints.find(model.tenant, path)[0].request == number


def _wanted(model: Model, body: Mapping[str, Any], kind: Kind, number: int | None) -> tuple[CheckpointPath, str | None]:
    """Where to save, and the sampler that is to have it."""
    if body.get("path") is not None:
        return CheckpointPath(model.name, kind, text(body, "path")), None
    if kind == "sampler_weights" and body.get("sampling_session_seq_id") is not None:
        of_session = integer(body, "sampling_session_seq_id")
        return CheckpointPath(model.name, kind, f"session-{of_session}"), sampler_name(model.session, of_session)
    return CheckpointPath(model.name, kind, f"unnamed-{number if number is not None else time.time_ns()}"), None


def load_into(service: Service, model: Model, body: Mapping[str, Any]) -> Future:
    """Put a checkpoint in the place of a model's adapter, in its turn (clients up to 0.24)."""
    number = number_of(body.get("seq_id"))
    try:
        record, directory = service.checkpoints.find(
            model.tenant, CheckpointPath.parse(text(body, "path")), public=True
        )
        optimizer = _optimizer(body, record)
    except (RequestRefusedError, ConfigError) as error:
        return fail(service, model, number, "load_weights", ConfigError(str(error)))

    def answer(_: Any) -> dict[str, Any]:
        model.rank, model.attention, model.mlp, model.output = record.rank, record.attention, record.mlp, record.output
        return {"type": "load_weights", "path": str(record.path)}

    def command(ticket: int) -> Load:
        return Load(ticket, model.adapter, str(directory), optimizer)

    return in_line(service, model, number, "load_weights", command, answer_of=answer)


def load_new(service: Service, session: Session, body: Mapping[str, Any]) -> Future:
    """A new model of a session that begins as a checkpoint.

    Raises:
        RequestRefusedError: 404; there is no such checkpoint.
        ConfigError: it has no optimizer's state, and that was asked for.
    """
    record, directory = service.checkpoints.find(session.tenant, CheckpointPath.parse(text(body, "path")), public=True)
    wanted = LoraRequest(record.base_model, record.rank, None, record.attention, record.mlp, record.output)
    optimizer = _optimizer(body, record)

    def command(model: Model, ticket: int) -> Create:
        return Create(ticket, model.adapter, None, str(directory), optimizer)

    number = integer(body, "model_seq_id")
    return service.new_model(session, number, wanted, metadata_of(body), command, "load_weights")


def _optimizer(body: Mapping[str, Any], record: Record) -> bool:
    optimizer = flag(body, "optimizer", False)
    if optimizer and not record.optimizer:
        raise ConfigError(
            f"{record.path} was saved for sampling and has no optimizer state; load it without, or save_state"
        )
    return optimizer
