"""What the service has for its clients, without HTTP: sessions, models, and futures that outcomes of commands end.

Above it: :mod:`~megascend.serve.scheduler.turns` puts requests of a model in line, :mod:`~megascend.serve.operations` and
:mod:`~megascend.serve.samplers.adapters` make commands of them. All of it runs on the HTTP server's event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from megascend.config import Lora
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, DataError, MegascendError
from megascend.platforms.base import MemoryFigures
from megascend.serve.api.bodies import CreateModel, LoraSettings
from megascend.serve.api.wire import TrainRequest
from megascend.serve.checkpoints import Checkpoints
from megascend.serve.errors import Failure, RequestRefusedError
from megascend.serve.figures import Figures
from megascend.serve.samplers.sequences import Sequences
from megascend.serve.samplers.vllm import VllmSampling
from megascend.serve.scheduler.commands import Cancel, Command, Create, ForwardBackward, Outcome, Remove
from megascend.serve.scheduler.futures import Future, Futures
from megascend.serve.scheduler.inbox import Inbox
from megascend.serve.served_model import ServedModel
from megascend.serve.tenancy import Model, Session, Tenancy, samples_of


class Durability:
    """Stores nothing: sessions, models and their steps end with the server.

    Called on the event loop, in the order in which things happen.

    Attributes:
        repeating: requests that were taken before are being put in line again.
    """

    repeating = False

    @property
    def recovered(self) -> bool:
        """Whether all that was repeated after a restart has ended."""
        return True

    @property
    def stalled(self) -> bool:
        """Whether nothing can be stored at present, as the disk is full, for example."""
        return False

    def check_number(self, number: int | None) -> None:
        """Raise if a request without a number cannot be stored."""

    def session(self, session: Session) -> None:
        """Note that a session was opened."""

    def ended(self, session: Session) -> None:
        """Note that a session has ended."""

    def sampler(self, session: Session, name: str, path: str | None) -> None:
        """Note that a session has a sampler."""

    def asked(self, future: Future, path: str, body: bytes | Mapping[str, Any], number: int | None = None) -> None:
        """Note that a future was made for a request, or found, if the request came before.

        Args:
            path: of the request under /api/v1.
            body: that the same request can be made from; a mapping is stored as JSON.
        """

    def resolved(self, future: Future, request: TrainRequest) -> None:
        """Act as :meth:`asked`, for a request with what the server remembered put in."""

    def turn(self, model: Model, future: Future, number: int | None) -> None:
        """Note that a request's command, if it has one, was given to the ranks."""

    def unloaded(self, model: Model) -> None:
        """Note that a model was removed."""

    def hold(self, future: Future, outcome: Outcome) -> bool:
        """Return whether a future must not end yet with the outcome of its command; it is ended later."""
        return False

    def over(self, future: Future) -> None:
        """Note that a future has ended."""

    async def writable(self) -> None:
        """Raise 503 if nothing can be stored at present."""

    async def durable(self) -> None:
        """Return when all that was noted is on the disk; raise 503 if it is not yet."""

    def close(self) -> None:
        """End with the server."""


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
        swept: when checkpoints whose time is over were looked for last, by the clock.
        memory: the device's name and its memory, where somebody can tell.
        vllm: what samples, if it is not the ranks.
        packing: held while an archive is made, which takes a thread and room for a temporary file.
        downloads: archives that each tenant is being sent.
    """

    def __init__(
        self, settings: ServeConfig, base: ServedModel, inbox: Inbox, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings, self.base, self._inbox, self.clock = settings, base, inbox, clock
        self.tenancy = Tenancy(
            clock,
            max_models=settings.max_models,
            models_each=settings.limits.models,
            sessions_each=settings.limits.sessions,
        )
        self.futures = Futures(clock, settings.answer_s, settings.limits.answer_bytes)
        self.checkpoints = Checkpoints(settings.storage)
        self.sequences = Sequences(clock, settings.limits.tokens)
        self.figures = Figures()
        self.packing = asyncio.Semaphore(2)
        self.downloads: Counter[str] = Counter()
        self.durability = Durability()
        self.ready = False
        self.started = self.swept = clock()
        self.memory: Callable[[], tuple[str, MemoryFigures]] | None = None
        self.vllm: VllmSampling | None = None

    def device_memory(self) -> dict[str, Any] | None:
        """Return rank 0's device and its memory in bytes; None where the device reports nothing of it."""
        if self.memory is None:
            return None
        device, figures = self.memory()
        if not figures.total:
            return None
        return {"device": device, "allocated": figures.allocated, "peak": figures.peak, "total": figures.total}

    # --- sessions ---

    def open_session(self, tenant: str, metadata: Mapping[str, str] | None) -> Session:
        """Open a session of a tenant.

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

    def create_model(self, session: Session, body: CreateModel) -> Future:
        """Create an adapter from nothing. Asked again for the same number of the session, return the same future."""
        asked = body.lora
        self._check_base(body.base_model)
        targets = self.base.targets(attention=asked.train_attn, mlp=asked.train_mlp, output=asked.train_unembed)
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        lora = Lora(rank=asked.rank, alpha=self.settings.alpha, targets=targets, seed=seed)

        def command(model: Model, ticket: int) -> Create:
            return Create(ticket, model.adapter, lora)

        return self.new_model(session, body.model_seq_id, asked, body.user_metadata, command, "create_model")

    def new_model(
        self,
        session: Session,
        number: int,
        lora: LoraSettings,
        metadata: Mapping[str, str] | None,
        command: Callable[[Model, int], Command],
        kind: str,
    ) -> Future:
        """Add a model that begins with ``command``; it is forgotten again if that fails."""
        name = f"{session.name}:create:{number}"
        earlier = self.futures.get(name, session.tenant)
        if earlier is not None:
            return earlier
        model = self.tenancy.add_model(
            session, number, rank=lora.rank, attention=lora.train_attn, mlp=lora.train_mlp, output=lora.train_unembed,
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

    def unload(self, model: Model, *, internal: bool = False) -> Future:
        """Remove a model. It needs no turn: what of it still waits fails.

        Args:
            internal: no client waits for it.
        """
        self.tenancy.remove_model(model)
        self.durability.unloaded(model)
        name = f"{model.name}:unload"
        answer = {"model_id": model.name, "type": "unload_model"}
        self.futures.forget_fetched(model.name)
        future = self.futures.make(
            name, model.tenant, model.name, "unload_model", answer_of=lambda _: answer, internal=internal
        )
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
            self.unload(model, internal=True)
        self.futures.forget_fetched(samples_of(session))
        self.durability.ended(session)

    def _check_base(self, name: str) -> None:
        if name not in self.base.names and name != str(self.base.path):
            raise ConfigError(f"base_model {name[:200]!r} is not served here; this server has {self.base.names[0]!r}")

    def _count_models(self) -> None:
        self._inbox.set_models(len(self.tenancy.models))

    # --- requests of a model, in its client's order ---

    def enqueue(
        self, model: Model, number: int | None, kind: str, command: Callable[[int], Command | None], **values: Any
    ) -> Future:
        """Make a future whose command is handed to the ranks in its turn; return the same future for a repeated number.

        Args:
            number: position in the model's order; None: its turn is now.
            command: builds the command; returns None if the future has ended already.

        Raises:
            RequestRefusedError: 429, too much of this model or tenant is pending; 400, the number was used for another kind of
                request, or its answer has been dropped.
        """
        self.durability.check_number(number)
        name = f"{model.name}:{kind}:{secrets.token_hex(8)}" if number is None else f"{model.name}:request:{number}"
        if number is not None and model.order.seen(number):
            earlier = self.futures.get(name, model.tenant)
            if earlier is None or earlier.kind != kind:
                was = "was answered, and its answer is no longer kept" if earlier is None else f"was a {earlier.kind}"
                raise RequestRefusedError(f"request {number} of {model.name} {was}")
            return earlier
        # A request that fills a gap is always taken: refusing it would keep the later ones, already taken, from running.
        new = number is None or number > model.order.following or not model.order.early
        if new and not self.durability.repeating:
            self._check_load(model, values.get("tokens", 0))
        future = self.futures.make(name, model.tenant, model.name, kind, number_in_line=number, **values)

        def submit() -> None:
            built = command(future.number)
            if built is not None:
                self.put(built)
            self.durability.turn(model, future, number)

        for turn in [submit] if number is None else model.order.offer(number, submit):
            turn()
        model.gap_since = (model.gap_since or self.clock()) if model.order.early else None
        return future

    def enqueue_failure(
        self, model: Model, number: int | None, kind: str, error: MegascendError, *, spoils: bool = False
    ) -> Future:
        """Make a future that fails in its turn.

        Args:
            spoils: fail the optimizer step that the request belongs to as well.
        """

        def command(ticket: int) -> Command | None:
            if spoils:
                return ForwardBackward(ticket, model.adapter, (), None, str(error))
            self.break_future(ticket, error)
            return None

        return self.enqueue(model, number, kind, command)

    def enqueue_missing(self, model: Model, number: int, message: str) -> Future:
        """Fail a request that never arrived, and with it the optimizer step that it belongs to."""
        future = self.enqueue_failure(model, number, "forward_backward", DataError(message), spoils=True)
        self.durability.asked(future, "missing", message.encode(), number)
        return future

    def _check_load(self, model: Model, tokens: int) -> None:
        limits = self.settings.limits
        if self.futures.pending(model.name) >= limits.pending:
            raise RequestRefusedError(f"{limits.pending} requests of {model.name} are pending; fetch some first", 429)
        self.check_answers(model.tenant)
        pending = self.futures.tokens(model.tenant)
        if pending and pending + tokens > limits.tokens:
            raise RequestRefusedError(f"{pending} tokens of yours are pending, {limits.tokens} may be", 429)

    def check_answers(self, tenant: str) -> None:
        """Raise 429 if a tenant has too many answers that it has not fetched."""
        if self.futures.full(tenant):
            most = self.settings.limits.answer_bytes
            raise RequestRefusedError(
                f"your answers take more than {most} bytes (limits.answer_bytes); fetch some first", 429
            )

    # --- commands and their outcomes ---

    def put(self, command: Command) -> None:
        """Give a command to the ranks."""
        self._inbox.put(command)

    def cancel(self, future: Future) -> None:
        """Have a request to sample left out by whoever samples."""
        if self.vllm is not None and self.vllm.cancel(future.number):
            return
        self._inbox.put(Cancel(future.number, ""))

    def new_label(self, kind: str) -> str:
        """Generate a name for a future that nobody can guess."""
        return f"{kind}:{secrets.token_hex(16)}"

    def break_future(self, number: int, error: MegascendError) -> None:
        """End a future that no rank was asked for."""
        future = self.futures.numbered(number)
        if future is not None:
            self.end(future, Outcome(number, error=error))

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
        """Return a tenant's future once it has ended, or after ``timeout_s``.

        Raises:
            RequestRefusedError: 410; there is none, or its answer was kept for long enough.
        """
        future = self.futures.get(name, tenant) if isinstance(name, str) else None
        if future is None:
            raise RequestRefusedError(f"unknown or expired request id {str(name)[:160]!r}", 410)
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
