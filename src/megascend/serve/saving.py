"""Saving and loading on behalf of clients: names become directories, records make what was saved count."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megascend.errors import ConfigError
from megascend.serve.bodies import LoadNewModel, LoadWeights, LoraSettings, SaveWeights
from megascend.serve.checkpoints import Record
from megascend.serve.errors import RequestRefusedError
from megascend.serve.names import CheckpointPath, Kind, sampler_name
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
        asked = SaveWeights.read(body)
        path, sampler = _wanted(model, asked, kind, number)
        if asked.kind != "snapshot":
            raise ConfigError(f"kind {str(asked.kind)[:40]!r}: this server saves snapshots only")
        used = service.checkpoints.bytes_of(model.tenant)
        if used > service.settings.limits.storage_bytes:
            raise ConfigError(
                f"your checkpoints take {used} bytes; {service.settings.limits.storage_bytes} are allowed"
            )
    except (RequestRefusedError, ConfigError) as error:
        return fail(service, model, number, request, ConfigError(str(error)))

    def record() -> Record:
        now, ttl = time.time(), asked.ttl_seconds
        return Record(
            path, service.base.names[0], model.rank, model.attention, model.mlp, model.output, now,
            None if ttl is None else now + ttl, optimizer=kind == "weights", user_metadata=asked.user_metadata,
            request=number,
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
        there = service.checkpoints.exists(model.tenant, path) and not asked.overwrite and sampler is None
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


def _wanted(model: Model, asked: SaveWeights, kind: Kind, number: int | None) -> tuple[CheckpointPath, str | None]:
    """Return where to save, and the sampler that is to have it."""
    if asked.path is not None:
        return CheckpointPath(model.name, kind, asked.path), None
    of_session = asked.sampling_session_seq_id
    if kind == "sampler_weights" and of_session is not None:
        return CheckpointPath(model.name, kind, f"session-{of_session}"), sampler_name(model.session, of_session)
    return CheckpointPath(model.name, kind, f"unnamed-{number if number is not None else time.time_ns()}"), None


def load_into(service: Service, model: Model, body: Mapping[str, Any]) -> Future:
    """Put a checkpoint in the place of a model's adapter, in its turn (clients up to 0.24)."""
    number = number_of(body.get("seq_id"))
    try:
        asked = LoadWeights.read(body)
        record, directory = service.checkpoints.find(model.tenant, CheckpointPath.parse(asked.path), public=True)
        _check_optimizer(asked, record)
    except (RequestRefusedError, ConfigError) as error:
        return fail(service, model, number, "load_weights", ConfigError(str(error)))

    def answer(_: Any) -> dict[str, Any]:
        model.rank, model.attention, model.mlp, model.output = record.rank, record.attention, record.mlp, record.output
        return {"type": "load_weights", "path": str(record.path)}

    def command(ticket: int) -> Load:
        return Load(ticket, model.adapter, str(directory), asked.optimizer)

    return in_line(service, model, number, "load_weights", command, answer_of=answer)


def load_new(service: Service, session: Session, body: Mapping[str, Any]) -> Future:
    """A new model of a session that begins as a checkpoint.

    Raises:
        RequestRefusedError: 404; there is no such checkpoint.
        ConfigError: it has no optimizer's state, and that was asked for.
    """
    asked = LoadNewModel.read(body)
    record, directory = service.checkpoints.find(session.tenant, CheckpointPath.parse(asked.path), public=True)
    lora = LoraSettings(
        rank=record.rank, train_attn=record.attention, train_mlp=record.mlp, train_unembed=record.output
    )
    _check_optimizer(asked, record)

    def command(model: Model, ticket: int) -> Create:
        return Create(ticket, model.adapter, None, str(directory), asked.optimizer)

    return service.new_model(session, asked.model_seq_id, lora, asked.user_metadata, command, "load_weights")


def _check_optimizer(asked: LoadWeights, record: Record) -> None:
    if asked.optimizer and not record.optimizer:
        raise ConfigError(
            f"{record.path} was saved for sampling and has no optimizer state; load it without, or save_state"
        )
