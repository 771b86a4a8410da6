"""What a restart does with the journal: it restores sessions, models and answers, and puts in line again what no save covers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megascend.config import Adam
from megascend.errors import CheckpointError, MegascendError
from megascend.serve.asking import BY_PATH
from megascend.serve.commands import Create, ForwardBackward, OptimizerStep
from megascend.serve.futures import Future
from megascend.serve.journal import Entry
from megascend.serve.journaled import Journaled
from megascend.serve.kept_answers import answer_of, sequence_of
from megascend.serve.ledger import Kept, KeptModel, Ledger
from megascend.serve.requests import LoraRequest, metadata_of
from megascend.serve.service import Service
from megascend.serve.tenancy import Model
from megascend.serve.training import train
from megascend.serve.turns import in_line, spoil
from megascend.serve.wire import train_request_of_json, train_request_of_protobuf

log = logging.getLogger("megascend.serve")


@dataclass(frozen=True)
class Repetition:
    """What is to be done for a model.

    Attributes:
        made: the request that it began with.
        save: what it is loaded from; None: it begins as ``made`` says.
        answers: of requests that ``save`` covers, as they may not have been fetched.
        requests: those that follow, in the order they came, each with its answer if it is not to be done again.
    """

    name: str
    tenant: str
    made: Kept
    save: Entry | None
    answers: Sequence[Kept]
    requests: Sequence[tuple[Kept, Kept | None]]


def plan(ledger: Ledger) -> list[Repetition]:
    """What is to be done for each model, in the order they were made. Pure."""
    return [_plan_of(name, model) for name, model in ledger.models.items()]


def _plan_of(name: str, model: KeptModel) -> Repetition:
    return Repetition(
        name,
        model.made.entry.values["tenant"],
        model.made,
        None if model.save is None else model.save.entry,
        [kept for answered, kept in model.answers.items() if answered not in model.requests],
        [(kept, model.answers.get(request)) for request, kept in model.requests.items()],
    )


class Recovery:
    """Puts back what a ledger says.

    Args:
        service: without sessions and models.
        journaled: its durability.
        body: of an entry.
    """

    def __init__(self, service: Service, journaled: Journaled, body: Callable[[Kept], bytes]) -> None:
        self._service, self._journaled, self._body = service, journaled, body

    def run(self, ledger: Ledger) -> int:
        """Restore everything; how many requests are in line again.

        Raises:
            CheckpointError: a model cannot be restored. Nothing was lost: the journal is as it was.
        """
        for name, kept in ledger.sessions.items():
            values = kept.entry.values
            self._service.tenancy.restore_session(name, values["tenant"], values["metadata"])
        for name, kept in ledger.samplers.items():
            values = kept.entry.values
            self._service.tenancy.sessions[values["session"]].add_sampler(name, values["path"])
        for name, kept in ledger.sequences.items():
            session = self._service.tenancy.sessions[kept.entry.values["session"]]
            self._service.sequences.keep(session.tenant, name, sequence_of(kept.entry, self._body(kept)))
        self._service.sequences.kept, self._service.sequences.dropped = (
            self._journaled.sequence,
            self._journaled.dropped,
        )
        self._journaled.repeating = True
        try:
            futures = [future for each in plan(ledger) for future in self._restore(each)]
        finally:
            self._journaled.repeating = False
        pending = {future.name for future in futures if future.ended is None and self._had_its_turn(future)}
        self._journaled.wait_for(pending)
        return len(pending)

    def _had_its_turn(self, future: Future) -> bool:
        model = self._service.tenancy.models.get(future.model or "")
        number = future.number_in_line
        return model is not None and (number is None or number < model.order.following)

    def _restore(self, wanted: Repetition) -> list[Future]:
        body = json.loads(self._body(wanted.made))
        path = wanted.made.entry.values["path"]
        try:
            if wanted.save is not None:
                first = self._load(wanted, wanted.save, body, path)
            else:
                first = BY_PATH[path](self._service, wanted.tenant, body)
        except MegascendError as error:
            if wanted.save is None and path == "load_weights":
                log.warning("%s begins with a checkpoint that cannot be loaded any more: %s", wanted.name, error)
                self._journaled.lost(wanted.name)
                return []
            raise CheckpointError(f"{wanted.name} cannot be restored from the journal: {error}") from None
        first.noted = True
        model = self._service.tenancy.models[wanted.name]
        for kept in wanted.answers:
            self._answered(model, kept)
        return [first, *(self._repeat(model, kept, answer) for kept, answer in wanted.requests)]

    def _load(self, wanted: Repetition, save: Entry, body: dict, path: str) -> Future:
        """A model as it was saved."""
        values, service = save.values, self._service
        session = service.tenancy.sessions[wanted.made.entry.values["session"]]
        lora = LoraRequest(service.base.names[0], values["rank"], None, *values["parts"])
        directory = self._journaled.directory(values["directory"])

        def command(model: Model, ticket: int) -> Create:
            return Create(ticket, model.adapter, None, str(directory), True)

        self._journaled.restoring = True
        try:
            future = service.new_model(session, body["model_seq_id"], lora, metadata_of(body), command, path)
        finally:
            self._journaled.restoring = False
        model = service.tenancy.models[wanted.name]
        model.order.following, model.steps = values["following"], values["steps"]
        model.losses = [(step, loss, tokens) for step, loss, tokens in values["losses"]]
        self._journaled.following(model, values["following"])
        return future

    def _answered(self, model: Model, kept: Kept) -> None:
        """A future as it had ended."""
        values = kept.entry.values
        futures = self._service.futures
        future = futures.make(
            values["name"], model.tenant, model.name, values["kind"], number_in_line=values["number"], noted=True
        )
        self._end(future, kept)

    def _end(self, future: Future, kept: Kept) -> None:
        answer, failure = answer_of(replace(kept.entry, body=self._body(kept)))
        if failure is not None:
            self._service.futures.break_(future, failure)
        else:
            future.answer_of = lambda _: answer
            self._service.futures.keep(future, None)

    def _repeat(self, model: Model, kept: Kept, answer: Kept | None) -> Future:
        """Put a request in line again, or its answer in its place."""
        values = kept.entry.values
        if answer is None:
            future = self._ask(model, values["path"], self._body(kept), values["number"])
        else:

            def end(ticket: int) -> None:
                made = self._service.futures.numbered(ticket)
                assert made is not None
                self._end(made, answer)
                if made.failure is not None:
                    self._fail_again(model, made.kind, made.failure.message)

            kind = answer.entry.values["kind"]
            future = in_line(self._service, model, values["number"], kind, end)
        future.noted = True
        return future

    def _fail_again(self, model: Model, kind: str, message: str) -> None:
        """What had no gradients then must have none now, whatever the reason was: memory was full, perhaps."""
        service = self._service
        ticket = service.futures.make(service.new_label("fail_again"), "", None, "fail_again", internal=True).number
        if kind == "forward_backward":
            service.put(ForwardBackward(ticket, model.adapter, (), None, message))
        elif kind == "optim_step":
            service.put(OptimizerStep(ticket, model.adapter, Adam(), message))

    def _ask(self, model: Model, path: str, body: bytes, number: int) -> Future:
        service, most = self._service, self._service.settings.limits.samples
        if path == "protobuf":
            return train(service, model.tenant, train_request_of_protobuf(body, most))
        if path in ("forward", "forward_backward"):
            request = train_request_of_json(json.loads(body), most, forward_only=path == "forward")
            return train(service, model.tenant, request)
        if path == "resolved":
            request = train_request_of_json(json.loads(body), most, forward_only=False)
            return train(service, model.tenant, replace(request, resolved=True))
        if path == "missing":
            return spoil(service, model, number, body.decode())
        return BY_PATH[path](service, model.tenant, json.loads(body))
