"""Gradients, log-probabilities and optimizer steps on behalf of clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megascend.config import Adam
from megascend.errors import ConfigError, DataError
from megascend.serve.bodies import adam_of
from megascend.serve.provenance import with_recorded
from megascend.serve.samples import as_the_targets, loss_of, samples_of, value_of
from megascend.serve.scheduler.commands import Command, Forward, ForwardBackward, OptimizerStep
from megascend.serve.scheduler.futures import Future
from megascend.serve.scheduler.turns import fail, in_line
from megascend.serve.service import Service
from megascend.serve.tenancy import Model
from megascend.serve.wire import TrainAnswer, TrainRequest


def train(service: Service, tenant: str, request: TrainRequest) -> Future:
    """Gradients, or log-probabilities alone. What is wrong with samples or loss is the future's failure."""
    model = service.tenancy.model(request.model, tenant)
    kind = "forward" if request.forward_only else "forward_backward"
    try:
        loss = loss_of(request.loss, request.settings)
        if request.problem is not None:
            raise DataError(request.problem)
        data = request.data
        recorded = loss.name == "stable_reinforce" and not request.resolved
        if recorded:
            data = [with_recorded(datum, partial(service.sequences.find, tenant, model.session)) for datum in data]
        samples = [samples_of(datum, loss) for datum in data]
        flat = [sample for each in samples for sample in each]
        if not flat:
            raise DataError("the request has no samples")
    except (ConfigError, DataError) as error:
        return fail(service, model, request.number, kind, error, spoils=not request.forward_only)
    tokens = sum(map(len, flat))

    def answer(value: Any) -> TrainAnswer:
        if request.forward_only:
            return TrainAnswer(as_the_targets(request.data, value), {"loss:sum": value_of(loss, flat, value)})
        model.losses = [*model.losses[-199:], (model.steps, value.loss, value.tokens)]
        metrics = {f"{name}:mean": found for name, found in value.metrics.items()}
        return TrainAnswer(as_the_targets(request.data, value.logprobs), {"loss:sum": value.loss, **metrics})

    def command(number: int) -> Command:
        if request.forward_only:
            return Forward(number, model.adapter, flat)
        return ForwardBackward(number, model.adapter, flat, loss)

    future = in_line(service, model, request.number, kind, command, answer_of=answer, tokens=tokens)
    if recorded and not request.forward_only:
        service.durability.resolved(future, replace(request, data=data))
    return future


def optim_step(service: Service, model: Model, number: int | None, settings: Mapping[str, Any]) -> Future:
    """One optimizer step with the client's settings of AdamW."""
    try:
        adam, problem = adam_of(settings), None
    except ConfigError as error:
        adam, problem = Adam(), str(error)

    def answer(step: Any) -> dict[str, Any]:
        model.steps += 1
        if step.skipped and step.loss_scale == 1.0:
            raise ConfigError("the gradient was not finite: the step was not made, and nothing was changed")
        figures = {"grad_norm": step.grad_norm, "learning_rate": step.lr, "skipped": float(step.skipped)}
        return {"type": "optim_step", "metrics": figures}

    def command(ticket: int) -> Command:
        return OptimizerStep(ticket, model.adapter, adam, problem)

    return in_line(service, model, number, "optim_step", command, answer_of=answer)
