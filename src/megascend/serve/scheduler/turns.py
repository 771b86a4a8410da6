"""Requests of a model in the order that its client numbered them, each a future; what fails there does so in its turn."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from megascend.errors import DataError, MegascendError
from megascend.serve.errors import RequestRefusedError
from megascend.serve.scheduler.commands import Command, ForwardBackward
from megascend.serve.scheduler.futures import Future
from megascend.serve.service import Service
from megascend.serve.tenancy import Model


def in_line(
    service: Service,
    model: Model,
    number: int | None,
    kind: str,
    command: Callable[[int], Command | None],
    **values: Any,
) -> Future:
    """Make a future whose command is given to the ranks in its turn. Asked for the same number again, return the same.

    Args:
        number: in the model's order; None: its turn is now.
        command: makes it; None if the future has ended already.

    Raises:
        RequestRefusedError: 429, too much of this model or tenant is pending; 400, the number was something else, or its
            answer is forgotten.
    """
    service.durability.check_number(number)
    name = f"{model.name}:{kind}:{secrets.token_hex(8)}" if number is None else f"{model.name}:request:{number}"
    if number is not None and model.order.seen(number):
        earlier = service.futures.get(name, model.tenant)
        if earlier is None or earlier.kind != kind:
            was = "was answered, and its answer is no longer kept" if earlier is None else f"was a {earlier.kind}"
            raise RequestRefusedError(f"request {number} of {model.name} {was}")
        return earlier
    new = number is None or number > model.order.following or not model.order.early
    if new and not service.durability.repeating:
        _check_load(service, model, values.get("tokens", 0))
    future = service.futures.make(name, model.tenant, model.name, kind, number_in_line=number, **values)

    def submit() -> None:
        to_run = command(future.number)
        if to_run is not None:
            service.put(to_run)
        service.durability.turn(model, future, number)

    for turn in [submit] if number is None else model.order.offer(number, submit):
        turn()
    model.gap_since = (model.gap_since or service.clock()) if model.order.early else None
    return future


def _check_load(service: Service, model: Model, tokens: int) -> None:
    limits = service.settings.limits
    if service.futures.pending(model.name) >= limits.pending:
        raise RequestRefusedError(f"{limits.pending} requests of {model.name} are pending; fetch some first", 429)
    check_answers(service, model.tenant)
    pending = service.futures.tokens(model.tenant)
    if pending and pending + tokens > limits.tokens:
        raise RequestRefusedError(f"{pending} tokens of yours are pending, {limits.tokens} may be", 429)


def check_answers(service: Service, tenant: str) -> None:
    """Raise 429 if a tenant has too many answers that it has not fetched."""
    if service.futures.full(tenant):
        most = service.settings.limits.answer_bytes
        raise RequestRefusedError(
            f"your answers take more than {most} bytes (limits.answer_bytes); fetch some first", 429
        )


def fail(
    service: Service, model: Model, number: int | None, kind: str, error: MegascendError, *, spoils: bool = False
) -> Future:
    """Make a future that fails in its turn.

    Args:
        spoils: the step that the request belongs to fails with it; otherwise nothing does.
    """

    def command(ticket: int) -> Command | None:
        if spoils:
            return ForwardBackward(ticket, model.adapter, (), None, str(error))
        service.break_future(ticket, error)
        return None

    return in_line(service, model, number, kind, command)


def spoil(service: Service, model: Model, number: int, message: str) -> Future:
    """Fail a request that did not come, and with it the step that it belongs to."""
    future = fail(service, model, number, "forward_backward", DataError(message), spoils=True)
    service.durability.asked(future, "missing", message.encode(), number)
    return future
