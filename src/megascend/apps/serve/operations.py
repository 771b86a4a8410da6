"""Requests answered with a future: turn path and body into commands, on arrival and again after a restart."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megascend.apps.serve.api.bodies import CreateModel, LoadNewModel, LoadWeights, SaveWeights, parse_adam
from megascend.apps.serve.api.wire import TrainAnswer, TrainRequest, dumps, json_of_train_request, number_of
from megascend.apps.serve.checkpoints import RECORD_SUFFIX, CheckpointPath, CheckpointRecord, Kind, sampler_name
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.samples import RequestSamples, TrainResult, loss_of, with_recorded
from megascend.apps.serve.scheduler.commands import Command, Create, Forward, ForwardBackward, Load, OptimizerStep, Save
from megascend.apps.serve.scheduler.futures import Future
from megascend.apps.serve.service import Service, unload_name
from megascend.apps.serve.tenancy import Model, Session
from megascend.config import Adam
from megascend.errors import ConfigError, DataError, MegascendError
from megascend.training.batch.loss import Loss


@dataclass(frozen=True)
class CheckedRequest:
    """A training request whose samples have been checked.

    Attributes:
        samples: None if the request is invalid, for the reason ``problem``.
        stored: encoding for the database, if not that of the client.
    """

    model: str
    number: int | None
    digest: str | None
    forward_only: bool
    loss: Loss | None = None
    samples: RequestSamples | None = None
    problem: MegascendError | None = None
    stored: bytes | None = None


def checked(service: Service, tenant: str, request: TrainRequest) -> CheckedRequest:
    """Check a request and prepare its samples. For a thread: it takes time for each sample."""
    result = CheckedRequest(request.model, request.number, request.digest, request.forward_only)
    try:
        loss = loss_of(request.loss, request.settings)
        if request.problem is not None:
            raise DataError(request.problem)
        data, stored = request.data, None
        if loss.name == "stable_reinforce" and not request.resolved:
            find = partial(service.sequences.find, tenant, request.model.partition(":")[0])
            data = [with_recorded(datum, find) for datum in data]
            # Stored with its log-probabilities: the sequences may be dropped before a restart, which repeats the request.
            if service.settings.durable and not request.forward_only:
                stored = dumps(json_of_train_request(replace(request, data=data))).encode()
        if not data:
            raise DataError("the request has no samples")
        return replace(result, loss=loss, samples=RequestSamples(data, loss), stored=stored)
    except (ConfigError, DataError) as error:
        return replace(result, problem=error)


def train(service: Service, tenant: str, request: TrainRequest | CheckedRequest) -> Future:
    """Compute gradients or only log-probabilities. Invalid samples or loss settings fail the future, not the request."""
    if isinstance(request, TrainRequest):
        request = checked(service, tenant, request)
    model = service.tenancy.model(request.model, tenant)
    kind = "forward" if request.forward_only else "forward_backward"
    loss, samples, forward_only = request.loss, request.samples, request.forward_only
    if request.problem is not None or samples is None:
        error = request.problem or DataError("the request has no samples")
        future = service.enqueue_failure(model, request.number, kind, error, spoils=not forward_only)
        service.require_same_body(future, request.digest)
        return future

    def answer(value: TrainResult) -> TrainAnswer:
        if forward_only:
            return TrainAnswer(value.logprobs, {"loss:sum": value.loss})
        # A new list: a save that is being written holds the old one.
        model.losses = [*model.losses[-199:], (model.steps, value.loss, value.tokens)]
        metrics = {f"{name}:mean": metric for name, metric in value.metrics.items()}
        return TrainAnswer(value.logprobs, {"loss:sum": value.loss, **metrics})

    def command(number: int) -> Command:
        if forward_only:
            return Forward(number, model.adapter, samples, loss)
        return ForwardBackward(number, model.adapter, samples, loss)

    tokens = int(samples.lengths.sum())
    future = service.enqueue(model, request.number, kind, command, answer_of=answer, tokens=tokens)
    service.require_same_body(future, request.digest)
    if request.stored is not None:
        service.durability.note_request(future, "resolved", request.stored, request.number)
    return future


def save(service: Service, tenant: str, body: Mapping[str, Any], *, kind: Kind) -> Future:
    """Save a model's adapter as a checkpoint, in its turn; ``weights``, to resume from, includes the optimizer state.

    An existing checkpoint of that name fails the future, unless the client sets ``overwrite``. A ``sampler_weights`` checkpoint
    without a path becomes a sampler of the session, whose name is the answer.
    """
    model, number = service.tenancy.model(body.get("model_id"), tenant), number_of(body.get("seq_id"))
    request = "save_weights" if kind == "weights" else "save_weights_for_sampler"
    try:
        options = SaveWeights.read(body)
        path, sampler = _save_target(model, options, kind, number)
        if options.kind != "snapshot":
            raise ConfigError(f"kind {str(options.kind)[:40]!r}: this server saves snapshots only")
    except (RequestRefusedError, ConfigError) as error:
        # A failed future and not a refusal: the request has a number, which must have its turn.
        return service.enqueue_failure(model, number, request, ConfigError(str(error)))

    def record() -> CheckpointRecord:
        now, ttl, lora = time.time(), options.ttl_seconds, model.lora
        return CheckpointRecord(
            path, service.base.names[0], lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed, now,
            None if ttl is None else now + ttl, optimizer=kind == "weights", user_metadata=options.user_metadata,
            request=number,
        )  # fmt: skip

    # The record is written after the ranks have the files, and before the client knows of them: it publishes the checkpoint.
    def work(_: Any) -> None:
        service.checkpoints.commit(model.tenant, record())

    def answer(_: Any) -> dict[str, Any]:
        if sampler is not None:
            session = service.tenancy.sessions.get(model.session)
            if session is not None:
                service.add_sampler(session, sampler, str(path))
            return {"type": request, "path": None, "sampling_session_id": sampler}
        return {"type": request, "path": str(path)}

    def command(ticket: int) -> Save | None:
        exists = sampler is None and not options.overwrite and service.checkpoints.exists(model.tenant, path)
        if exists and not (service.durability.replaying and _saved_by(service, model, path, number)):
            raise ConfigError(f"checkpoint {path} exists; save under another name, or with overwrite")
        reserved = service.checkpoints.begin_save(model.tenant, record())
        future = service.futures.by_number(ticket)
        assert future is not None
        future.then = lambda succeeded: service.checkpoints.end_save(model.tenant, path, reserved)
        directory = path.directory(service.settings.storage, model.tenant)
        return Save(ticket, model.adapter, str(directory), kind == "weights")

    return service.enqueue(model, number, request, command, answer_of=answer, work=work)


def _saved_by(service: Service, model: Model, path: CheckpointPath, number: int | None) -> bool:
    """Check whether this request saved the checkpoint itself before a restart: then replaying it is no conflict."""
    return number is not None and service.checkpoints.find(model.tenant, path)[0].request == number


def _save_target(
    model: Model, options: SaveWeights, kind: Kind, number: int | None
) -> tuple[CheckpointPath, str | None]:
    """Return the checkpoint path, and the name of the sampler to create from it, or None."""
    if options.path is not None:
        # Its directory would have the name of the record of another checkpoint.
        if options.path.endswith(RECORD_SUFFIX):
            raise RequestRefusedError(
                f"{options.path[:120]!r} cannot be a checkpoint's name: it ends in {RECORD_SUFFIX!r}, as records do"
            )
        return CheckpointPath(model.name, kind, options.path), None
    # Names made from the request's number, not at random: a replay after a restart must save under the same one.
    sampler_number = options.sampling_session_seq_id
    if kind == "sampler_weights" and sampler_number is not None:
        return CheckpointPath(model.name, kind, f"session-{sampler_number}"), sampler_name(
            model.session, sampler_number
        )
    return CheckpointPath(model.name, kind, f"unnamed-{number if number is not None else time.time_ns()}"), None


def _load_into(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """Replace a model's adapter with a checkpoint, in its turn (clients up to 0.24)."""
    model, number = service.tenancy.model(body.get("model_id"), tenant), number_of(body.get("seq_id"))
    try:
        options = LoadWeights.read(body)
        record, directory = service.checkpoints.find(model.tenant, CheckpointPath.parse(options.path), public=True)
        _check_optimizer(options, record)
    except (RequestRefusedError, ConfigError) as error:
        return service.enqueue_failure(model, number, "load_weights", ConfigError(str(error)))

    def answer(_: Any) -> dict[str, Any]:
        model.lora = record.lora
        return {"type": "load_weights", "path": str(record.path)}

    def command(ticket: int) -> Load:
        return Load(ticket, model.adapter, str(directory), options.optimizer)

    return service.enqueue(model, number, "load_weights", command, answer_of=answer)


def _load_new(service: Service, session: Session, body: Mapping[str, Any]) -> Future:
    """Create a new model of a session from a checkpoint."""
    options = LoadNewModel.read(body)
    record, directory = service.checkpoints.find(session.tenant, CheckpointPath.parse(options.path), public=True)
    _check_optimizer(options, record)

    def command(model: Model, ticket: int) -> Create:
        return Create(ticket, model.adapter, None, str(directory), options.optimizer)

    return service.new_model(session, options.model_seq_id, record.lora, options.user_metadata, command, "load_weights")


def _check_optimizer(options: LoadWeights, record: CheckpointRecord) -> None:
    if options.optimizer and not record.optimizer:
        raise ConfigError(
            f"{record.path} was saved for sampling and has no optimizer state; load it without, or save_state"
        )


Operation = Callable[[Service, str, Mapping[str, Any]], Future]
"""Handles a tenant's request: (service, tenant, body) to a future."""


def settled(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with random choices (the adapter's seed) filled in, so that a replay gives the same result."""
    lora = body.get("lora_config")
    if path == "create_model" and isinstance(lora, dict) and lora.get("seed") is None:
        return {**body, "lora_config": {**lora, "seed": secrets.randbelow(2**31)}}
    return body


def number_in(path: str, body: Mapping[str, Any]) -> int | None:
    """Return the request's number in its model's order; None for requests that create a model."""
    makes = path == "create_model" or (path == "load_weights" and body.get("session_id") is not None)
    return None if makes else number_of(body.get("seq_id"))


def create_model(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    session = service.tenancy.session(body.get("session_id"), tenant)
    return service.create_model(session, CreateModel.read(body))


def unload_model(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """Remove a model; a repeated request returns the same future."""
    name = str(body.get("model_id"))
    earlier = None if name in service.tenancy.models else service.futures.get(unload_name(name), tenant)
    return earlier or service.unload(service.tenancy.model(body.get("model_id"), tenant))


def optim_step(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """Take an optimizer step with the client's AdamW settings."""
    model = service.tenancy.model(body.get("model_id"), tenant)
    sent = [body[name] for name in ("adam_params", "optimizer_params", "optim_params") if name in body]
    settings = next((value for value in sent if value is not None), None if sent else {})
    try:
        adam = parse_adam(settings if isinstance(settings, dict) else {"learning_rate": settings})
        problem = None
    except ConfigError as error:
        adam, problem = Adam(), str(error)  # fails in its turn, which drops the accumulated gradients

    def answer(step: Any) -> dict[str, Any]:
        model.steps += 1
        # With a loss scale (fp16), a skipped step is normal: the scale was too large and has been lowered.
        if step.skipped and step.loss_scale == 1.0:
            raise ConfigError("the gradient was not finite: the step was skipped, and nothing was changed")
        figures = {"grad_norm": step.grad_norm, "learning_rate": step.lr, "skipped": float(step.skipped)}
        return {"type": "optim_step", "metrics": figures}

    def command(ticket: int) -> Command:
        return OptimizerStep(ticket, model.adapter, adam, problem)

    return service.enqueue(model, number_of(body.get("seq_id")), "optim_step", command, answer_of=answer)


def load_weights(service: Service, tenant: str, body: Mapping[str, Any]) -> Future:
    """Create a new model from a checkpoint; for older clients, load the checkpoint into an existing model."""
    if body.get("session_id") is not None:
        return _load_new(service, service.tenancy.session(body["session_id"], tenant), body)
    return _load_into(service, tenant, body)


BY_PATH: Mapping[str, Operation] = {
    "create_model": create_model,
    "unload_model": unload_model,
    "optim_step": optim_step,
    "save_weights": partial(save, kind="weights"),
    "save_weights_for_sampler": partial(save, kind="sampler_weights"),
    "load_weights": load_weights,
}
