"""What the service does for its clients, without HTTP: requests become commands in line, outcomes become answers.

All methods run on the HTTP server's event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megascend.config import Adam, Lora
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, DataError, MegascendError
from megascend.platforms.base import MemoryFigures
from megascend.serve.base_model import BaseModel
from megascend.serve.checkpoints import Checkpoints
from megascend.serve.commands import (
    Cancel,
    Command,
    Create,
    Forward,
    ForwardBackward,
    OptimizerStep,
    Outcome,
    Remove,
)
from megascend.serve.durability import Durability
from megascend.serve.errors import Failure, RequestRefusedError
from megascend.serve.figures import Figures
from megascend.serve.futures import Future, Futures
from megascend.serve.inbox import Inbox
from megascend.serve.provenance import with_recorded
from megascend.serve.requests import LoraRequest, adam_of
from megascend.serve.samples import as_the_targets, loss_of, samples_of, value_of
from megascend.serve.sequences import Sequences
from megascend.serve.tenancy import Model, Session, Tenancy
from megascend.serve.vllm_sampling import VllmSampling
from megascend.serve.wire import TrainAnswer, TrainRequest

SWEEP_S = 600.0
"""How often checkpoints whose time is over are looked for."""


class Service:
    """Sessions, models and futures of all tenants, above the ranks.

    Args:
        settings: of the command.
        base: the model that is served.
        inbox: where commands go.
        clock: seconds, monotonic.

    Attributes:
        ready: the ranks have the model.
        started: when this was made, by the clock.
        memory: the device's name and its memory, where somebody can tell.
        vllm: what samples, if it is not the ranks.
        packing: held while an archive is made, which takes a thread and room for a temporary file.
    """

    def __init__(
        self, settings: ServeConfig, base: BaseModel, inbox: Inbox, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings, self.base, self._inbox, self.clock = settings, base, inbox, clock
        self.tenancy = Tenancy(
            clock,
            max_models=settings.max_models,
            models_each=settings.limits.models,
            sessions_each=settings.limits.sessions,
        )
        self.futures = Futures(clock, settings.answer_s)
        self.checkpoints = Checkpoints(settings.storage)
        self.sequences = Sequences(clock, settings.limits.tokens)
        self.figures = Figures()
        self.packing = asyncio.Semaphore(2)
        self.durability = Durability()
        self.ready = False
        self.started = self._swept = clock()
        self.memory: Callable[[], tuple[str, MemoryFigures]] | None = None
        self.vllm: VllmSampling | None = None

    # --- sessions ---

    def open_session(self, tenant: str, metadata: Mapping[str, str] | None) -> Session:
        """A new session of a tenant.

        Raises:
            RequestRefusedError: 429; it has as many as it may.
        """
        session = self.tenancy.open_session(tenant, metadata)
        self.durability.session(session)
        return session

    def add_sampler(self, session: Session, name: str, path: str | None) -> None:
        """Give a session a sampler, of a checkpoint or of the base model."""
        session.add_sampler(name, path)
        self.durability.sampler(session, name, path)

    # --- models ---

    def create_model(self, tenant: str, session: Session, number: int, wanted: LoraRequest, metadata: Any) -> Future:
        """A new adapter from nothing. Asked again for the same number of the session, the same future."""
        self._check_base(wanted.base_model)
        targets = self.base.targets(attention=wanted.attention, mlp=wanted.mlp, output=wanted.output)
        seed = secrets.randbelow(2**31) if wanted.seed is None else wanted.seed % 2**62
        lora = Lora(rank=wanted.rank, alpha=self.settings.alpha, targets=targets, seed=seed)
        return self.new_model(
            session, number, wanted, metadata, lambda model, ticket: Create(ticket, model.adapter, lora), "create_model"
        )

    def new_model(
        self,
        session: Session,
        number: int,
        wanted: LoraRequest,
        metadata: Any,
        command: Callable[[Model, int], Command],
        kind: str,
    ) -> Future:
        """A model that begins with ``command``; it is forgotten again if that fails."""
        name = f"{session.name}:create:{number}"
        made = self.futures.get(name, session.tenant)
        if made is not None:
            return made
        model = self.tenancy.add_model(
            session, number, rank=wanted.rank, attention=wanted.attention, mlp=wanted.mlp, output=wanted.output,
            metadata=metadata,
        )  # fmt: skip

        def then(succeeded: bool) -> None:
            model.ready = succeeded
            if not succeeded:
                self.tenancy.remove_model(model)
                self.durability.unloaded(model)
                self._count_models()

        answer = {"model_id": model.name, "type": kind} | ({"path": None} if kind == "load_weights" else {})
        future = self.futures.make(name, session.tenant, model.name, kind, answer_of=lambda _: answer, then=then)
        self._inbox.put(command(model, future.number))
        self.durability.turn(model, future, None)
        self._count_models()
        return future

    def unload(self, model: Model) -> Future:
        """Remove a model. It needs no turn: what of it still waits fails."""
        self.tenancy.remove_model(model)
        self.durability.unloaded(model)
        name = f"{model.name}:unload"
        answer = {"model_id": model.name, "type": "unload_model"}
        future = self.futures.make(name, model.tenant, model.name, "unload_model", answer_of=lambda _: answer)
        self._inbox.put(Remove(future.number, model.adapter))
        while model.order.early:  # what still waits for others fails, too
            for turn in model.order.give_up():
                turn()
        self._count_models()
        return future

    def end_session(self, session: Session) -> None:
        """Forget a session, and remove its models."""
        self.sequences.forget(session)
        for model in self.tenancy.close_session(session):
            self.unload(model)
        self.durability.ended(session)

    def _check_base(self, name: str) -> None:
        if name not in self.base.names and name != str(self.base.path):
            raise ConfigError(f"base_model {name[:200]!r} is not served here; this server has {self.base.names[0]!r}")

    def _count_models(self) -> None:
        self._inbox.set_models(len(self.tenancy.models))

    # --- training ---

    def train(self, tenant: str, request: TrainRequest) -> Future:
        """Gradients, or log-probabilities alone. What is wrong with samples or loss is the future's failure."""
        model = self.tenancy.model(request.model, tenant)
        kind = "forward" if request.forward_only else "forward_backward"
        try:
            loss = loss_of(request.loss, request.settings)
            if request.problem is not None:
                raise DataError(request.problem)
            data = request.data
            recorded = loss.name == "stable_reinforce" and not request.resolved
            if recorded:
                data = [with_recorded(datum, partial(self.sequences.find, tenant, model.session)) for datum in data]
            samples = [samples_of(datum, loss) for datum in data]
            flat = [sample for each in samples for sample in each]
            if not flat:
                raise DataError("the request has no samples")
        except (ConfigError, DataError) as error:
            return self._failed(model, request.number, kind, error, spoils=not request.forward_only)
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

        future = self.in_line(model, request.number, kind, command, answer_of=answer, tokens=tokens)
        if recorded and not request.forward_only:
            self.durability.resolved(future, replace(request, data=data))
        return future

    def optim_step(self, model: Model, number: int | None, settings: Mapping[str, Any]) -> Future:
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

        return self.in_line(model, number, "optim_step", command, answer_of=answer)

    def in_line(
        self, model: Model, number: int | None, kind: str, command: Callable[[int], Command | None], **values: Any
    ) -> Future:
        """A future whose command is given to the ranks when it is its turn. Asked for the same number again, the same one.

        Args:
            number: in the model's order; None: its turn is now.
            command: makes it; None if the future has ended already.

        Raises:
            RequestRefusedError: 429, too much of this model or tenant is pending; 400, the number was something else, or its
                answer is forgotten.
        """
        self.durability.check_number(number)
        name = f"{model.name}:{kind}:{secrets.token_hex(8)}" if number is None else f"{model.name}:request:{number}"
        if number is not None and model.order.seen(number):
            made = self.futures.get(name, model.tenant)
            if made is None or made.kind != kind:
                was = "was answered, and its answer is no longer kept" if made is None else f"was a {made.kind}"
                raise RequestRefusedError(f"request {number} of {model.name} {was}")
            return made
        new = number is None or number > model.order.following or not model.order.early
        if new and not self.durability.repeating:
            self._check_load(model, values.get("tokens", 0))
        future = self.futures.make(name, model.tenant, model.name, kind, number_in_line=number, **values)

        def submit() -> None:
            made = command(future.number)
            if made is not None:
                self._inbox.put(made)
            self.durability.turn(model, future, number)

        for turn in [submit] if number is None else model.order.offer(number, submit):
            turn()
        model.gap_since = (model.gap_since or self.clock()) if model.order.early else None
        return future

    def _check_load(self, model: Model, tokens: int) -> None:
        limits = self.settings.limits
        if self.futures.pending(model.name) >= limits.pending:
            raise RequestRefusedError(f"{limits.pending} requests of {model.name} are pending; fetch some first", 429)
        pending = self.futures.tokens(model.tenant)
        if pending and pending + tokens > limits.tokens:
            raise RequestRefusedError(f"{pending} tokens of yours are pending, {limits.tokens} may be", 429)

    def _failed(self, model: Model, number: int | None, kind: str, error: MegascendError, *, spoils: bool) -> Future:
        """A future that fails in its turn.

        Args:
            spoils: the step that the request belongs to fails with it.
        """

        def command(ticket: int) -> Command | None:
            if spoils:
                return ForwardBackward(ticket, model.adapter, (), None, str(error))
            self.break_future(ticket, error)
            return None

        return self.in_line(model, number, kind, command)

    def failed(self, model: Model, number: int | None, kind: str, error: MegascendError) -> Future:
        """A future that fails in its turn, and nothing with it."""
        return self._failed(model, number, kind, error, spoils=False)

    def spoil(self, model: Model, number: int, message: str) -> Future:
        """In the place of a request that did not come: a failure, and with it that of the step that it belongs to."""
        future = self._failed(model, number, "forward_backward", DataError(message), spoils=True)
        self.durability.asked(future, "missing", message.encode(), number)
        return future

    def put(self, command: Command) -> None:
        """Give a command to the ranks."""
        self._inbox.put(command)

    def cancel(self, future: Future) -> None:
        """Have a request to sample left out by whoever samples."""
        if self.vllm is not None and self.vllm.cancel(future.number):
            return
        self._inbox.put(Cancel(future.number, ""))

    def new_label(self, kind: str) -> str:
        """A name for a future that nobody can guess."""
        return f"{kind}:{secrets.token_hex(16)}"

    def break_future(self, number: int, error: MegascendError) -> None:
        """End a future that no rank was asked for."""
        future = self.futures.numbered(number)
        if future is not None:
            self.end(future, Outcome(number, error=error))

    # --- what comes back ---

    def finish(self, outcomes: list[Outcome]) -> None:
        """End the futures of commands that have run, at most one batch of gradients among them."""
        ended = []
        for outcome in outcomes:
            future = self.futures.numbered(outcome.number)
            if future is None or self.durability.hold(future, outcome):
                continue
            self.end(future, outcome)
            ended.append(future)
        self.figures.count_batch(ended)

    def end(self, future: Future, outcome: Outcome) -> None:
        """End a future with what came of its command."""
        if outcome.error is not None:
            self.futures.break_(future, Failure.of(outcome.error))
        else:
            self.futures.keep(future, outcome.value)
        self.figures.count(future, outcome.together, self.clock())
        self.figures.count_wait(future, outcome.waited, outcome.waited_s)
        self.durability.over(future)

    async def wait(self, tenant: str, name: Any, timeout_s: float) -> Future:
        """A tenant's future once it has ended, or after ``timeout_s``.

        Raises:
            RequestRefusedError: 410; there is none, or its answer was kept for long enough.
        """
        future = self.futures.get(name, tenant) if isinstance(name, str) else None
        if future is None:
            raise RequestRefusedError(f"there is no future {str(name)[:160]!r} (any more)", 410)
        self._heard_of(future)
        if future.ended is None:
            try:
                await asyncio.wait_for(future.changed.wait(), timeout_s)
            except (TimeoutError, asyncio.TimeoutError):
                self._heard_of(future)
                return future
        future.retrieved = future.retrieved or self.clock()
        return future

    def _heard_of(self, future: Future) -> None:
        model = self.tenancy.models.get(future.model or "")
        if model is not None and model.session in self.tenancy.sessions:
            self.tenancy.sessions[model.session].heard = self.clock()

    # --- as time passes ---

    def tick(self) -> None:
        """End what is over: silent sessions, waits for requests that never came, answers nobody fetched."""
        if self.durability.stalled:  # nobody is answered: that is nobody's silence
            self.tenancy.heard_of_all()
            self.futures.keep_longer()
            return
        for session in self.tenancy.silent(self.settings.session_timeout_s):
            self.end_session(session)
        for model in list(self.tenancy.models.values()):
            if model.gap_since is not None and self.clock() - model.gap_since > self.settings.gap_timeout_s:
                self._skip_missing(model)
        self.futures.forget()
        self.sequences.expire()
        if self.clock() - self._swept > SWEEP_S:
            self._swept = self.clock()
            self.checkpoints.remove_expired()

    def _skip_missing(self, model: Model) -> None:
        """Let those run that wait for requests which have not come; the step that these belonged to fails."""
        for number in model.order.missing():
            error = DataError(f"request {number} of this model did not come within {self.settings.gap_timeout_s} s")
            self.spoil(model, number, str(error))
        model.gap_since = self.clock() if model.order.early else None
