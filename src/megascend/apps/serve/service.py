"""The service without HTTP: sessions, models, and the futures that command outcomes complete.

:mod:`~megascend.apps.serve.operations` and :mod:`~megascend.apps.serve.samplers.adapters` turn requests into commands for it.
Everything runs on the HTTP server's event loop, so nothing here takes a lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from megascend.apps.serve.api.bodies import CreateModel, LoraSettings
from megascend.apps.serve.checkpoints import Checkpoints, model_name
from megascend.apps.serve.errors import Failure, RequestRefusedError
from megascend.apps.serve.figures import Figures
from megascend.apps.serve.samplers.sequences import Sequences
from megascend.apps.serve.samplers.vllm import VllmSampling
from megascend.apps.serve.scheduler.commands import Cancel, Command, Create, ForwardBackward, Outcome, Remove
from megascend.apps.serve.scheduler.futures import MAX_ANSWERS, Future, Futures
from megascend.apps.serve.scheduler.inbox import Inbox
from megascend.apps.serve.served_model import ServedModel
from megascend.apps.serve.tenancy import Model, Session, Tenancy, sampling_line
from megascend.config import Lora
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, DataError, MegascendError
from megascend.runtime.platforms.base import MemoryFigures

T = TypeVar("T")
MAX_THREADS, THREADS_EACH = 32, 2
"""Threads that read requests and encode answers, of all tenants and of one."""
MAX_AHEAD = 4096
"""Largest distance of a request's number from that of its model's next request; clients send few requests at a time."""
log = logging.getLogger("megascend.apps.serve")


def unload_name(model: str) -> str:
    """Return the name of the future of a model's removal."""
    return f"{model}:unload"


class Durability:
    """Hooks of a service that keeps no state on disk: sessions, models and their steps end with the server.

    Called on the event loop, in the order of events. :class:`~megascend.apps.serve.store.durability.DurableState` overrides them.

    Attributes:
        replaying: True while requests accepted before a restart are enqueued again.
        recovered: True once every request replayed after a restart has ended.
        stalled: True while state cannot be written, for example because the disk is full.
    """

    replaying = False

    @property
    def recovered(self) -> bool:
        return True

    @property
    def stalled(self) -> bool:
        return False

    def check_number(self, number: int | None) -> None:
        """Raise if a request without a number cannot be stored."""

    def note_session(self, session: Session) -> None: ...

    def note_session_end(self, session: Session) -> None: ...

    def note_sampler(self, session: Session, name: str) -> None:
        """Record a session's sampler, and its number of clients."""

    def note_request(
        self, future: Future, path: str, body: bytes | Mapping[str, Any], number: int | None = None
    ) -> None:
        """Record a request that was answered with a future; repeated requests are recorded once.

        Args:
            path: path of the request under /api/v1.
            body: body to replay the request from; a mapping is stored as JSON.
        """

    def note_turn(self, model: Model, future: Future, number: int | None) -> None:
        """Record that a request had its turn: its command, if any, was handed to the ranks."""

    def note_unload(self, model: Model) -> None: ...

    def defers(self, future: Future, outcome: Outcome) -> bool:
        """Return True to hold back a future's outcome; the callee ends the future later."""
        return False

    def note_end(self, future: Future) -> None: ...

    async def writable(self) -> None:
        """Raise 503 while state cannot be written."""

    async def durable(self) -> None:
        """Wait until everything recorded so far is on disk; raise 503 on timeout."""

    def close(self) -> None: ...


class Service:
    """Sessions, models and futures of all tenants, above the ranks.

    Args:
        settings: settings of ``megascend serve``.
        base: the served model.
        inbox: takes commands for the ranks.
        clock: monotonic seconds.

    Attributes:
        ready: True once the ranks have loaded the model.
        started: clock time of construction.
        swept: clock time of the last search for expired checkpoints.
        memory: returns the device's name and memory figures; None if unavailable.
        vllm: samples in place of the ranks, if configured.
        packing: limits archives being packed, each of which takes a thread and a temporary file; ``packing_turns`` those of a
            tenant.
        downloads: number of archives being sent to each tenant.
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
        self.checkpoints = Checkpoints(settings.storage, settings.limits.storage_bytes)
        self.sequences = Sequences(clock, settings.limits.tokens)
        self.figures = Figures()
        self.packing = asyncio.Semaphore(2)
        self.packing_turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(1))
        self._threads = ThreadPoolExecutor(MAX_THREADS, "serve")
        self._tasks: set[asyncio.Future[None]] = set()
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(THREADS_EACH))
        self._behind: dict[str, list[Outcome]] = {}  # outcomes behind disk work of the same model
        self.downloads: Counter[str] = Counter()
        self.durability = Durability()
        self.ready = False
        self.started = self.swept = clock()
        self.memory: Callable[[], tuple[str, MemoryFigures]] | None = None
        self.vllm: VllmSampling | None = None

    def device_memory(self) -> dict[str, Any] | None:
        """Return rank 0's device and its memory in bytes; None if the device reports none."""
        if self.memory is None:
            return None
        device, figures = self.memory()
        if not figures.total:
            return None
        return {"device": device, "allocated": figures.allocated, "peak": figures.peak, "total": figures.total}

    def close(self) -> None:
        """Write remaining state, and end the threads. Waits for the disk."""
        self._threads.shutdown(wait=False)
        self.durability.close()

    async def in_thread(self, tenant: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread. A tenant's calls take turns, so that one tenant's cannot occupy all threads."""
        async with self._turns[tenant]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments))

    # --- sessions ---

    def open_session(self, tenant: str, metadata: Mapping[str, str] | None) -> Session:
        session = self.tenancy.open_session(tenant, metadata)
        self.durability.note_session(session)
        return session

    def add_sampler(self, session: Session, name: str, path: str | None) -> None:
        """Add a sampler to a session, of a checkpoint or (None) of the base model; a no-op for the same one again."""
        if session.samplers.get(name, path) != path:
            raise RequestRefusedError(
                f"{name} samples from {session.samplers[name] or 'the base model'}, not from {path or 'the base model'}. Numbers "
                "are used once: another program, or a forked process, needs a session of its own"
            )
        session.add_sampler(name, path)
        self.durability.note_sampler(session, name)

    def add_clone(self, session: Session, sampler: str) -> int:
        """Count another client of a sampler; return its number, from which it numbers its requests."""
        session.clones[sampler] = session.clones.get(sampler, 0) + 1
        # Two clients with one number, before and after a restart, would get each other's responses.
        self.durability.note_sampler(session, sampler)
        return session.clones[sampler]

    # --- models ---

    def create_model(self, session: Session, body: CreateModel) -> Future:
        """Create a new adapter; a repeated number of the session returns the same future."""
        settings = body.lora
        if body.base_model not in (*self.base.names, str(self.base.path)):
            raise ConfigError(
                f"base_model {body.base_model[:200]!r} is not served here; this server has {self.base.names[0]!r}"
            )
        targets = self.base.targets(
            attention=settings.train_attn, mlp=settings.train_mlp, output=settings.train_unembed
        )
        # Drawn here and not on the ranks, where each would draw another one.
        seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
        lora = Lora(rank=settings.rank, alpha=self.settings.alpha, targets=targets, seed=seed)

        def command(model: Model, ticket: int) -> Create:
            return Create(ticket, model.adapter, lora)

        return self.new_model(session, body.model_seq_id, settings, body.user_metadata, command, "create_model")

    def new_model(
        self,
        session: Session,
        number: int,
        lora: LoraSettings,
        metadata: Mapping[str, str] | None,
        command: Callable[[Model, int], Command],
        kind: str,
    ) -> Future:
        """Add a model that ``command`` creates on the ranks; the model is dropped again if that fails."""
        name = f"{session.name}:create:{number}"
        earlier = self.futures.get(name, session.tenant)
        if earlier is not None:
            return earlier
        if model_name(session.name, number) in self.tenancy.models:
            raise RequestRefusedError(
                f"model {number} of {session.name} exists, and the answer to its creation is no longer kept"
            )
        if not self.durability.replaying:
            self.check_answers(session.tenant)
        model = self.tenancy.add_model(session, number, lora, metadata)

        # The model exists from here on, before the ranks have it: clients send its first requests without waiting, and they are
        # queued behind the command. So a failure has to take it back.
        def then(succeeded: bool) -> None:
            model.ready = succeeded
            if not succeeded:
                self.tenancy.remove_model(model)
                self.durability.note_unload(model)
                self._count_models()

        answer = {"model_id": model.name, "type": kind} | ({"path": None} if kind == "load_weights" else {})
        future = self.futures.make(name, session.tenant, model.name, kind, answer_of=lambda _: answer, then=then)
        self._inbox.submit(command(model, future.number))
        self.durability.note_turn(model, future, None)
        self._count_models()
        return future

    def unload(self, model: Model, *, internal: bool = False) -> Future:
        """Remove a model at once; its waiting requests fail.

        Args:
            internal: no client fetches the answer.
        """
        self.tenancy.remove_model(model)
        self.durability.note_unload(model)
        answer = {"model_id": model.name, "type": "unload_model"}
        self.futures.forget_fetched(model.tenant, model.name)
        future = self.futures.make(
            unload_name(model.name),
            model.tenant,
            model.name,
            "unload_model",
            answer_of=lambda _: answer,
            internal=internal,
        )
        self._inbox.submit(Remove(future.number, model.adapter))
        # Behind the removal in the inbox, so that the ranks refuse the requests that waited for a missing number.
        while model.order.early:
            for turn in model.order.give_up():
                turn()
        self._count_models()
        return future

    def end_session(self, session: Session) -> None:
        self.sequences.forget(session)
        for model in self.tenancy.close_session(session):
            self.unload(model, internal=True)
        self.futures.forget_fetched(session.tenant, sampling_line(session))
        self.durability.note_session_end(session)

    def _count_models(self) -> None:
        self._inbox.set_models(len(self.tenancy.models))

    # --- requests of a model, in its client's order ---

    def enqueue(
        self,
        model: Model,
        number: int | None,
        kind: str,
        command: Callable[[int], Command | None],
        *,
        always: bool = False,
        **values: Any,
    ) -> Future:
        """Make a future whose command is handed to the ranks in its turn; return the same future for a repeated number.

        Args:
            number: position in the model's order; None: its turn is now.
            command: builds the command; returns None if the future has ended already.
            always: take it beyond the limits, too.
        """
        self.durability.check_number(number)
        name = f"{model.name}:{kind}:{secrets.token_hex(8)}" if number is None else f"{model.name}:request:{number}"
        # A client that lost the response sends the request again under the same number; the work is done once.
        if number is not None and model.order.has_arrived(number):
            earlier = self.futures.get(name, model.tenant)
            if earlier is None or earlier.kind != kind:
                reason = (
                    "was answered, and its answer is no longer kept" if earlier is None else f"was a {earlier.kind}"
                )
                raise RequestRefusedError(f"request {number} of {model.name} {reason}")
            return earlier
        # Missing numbers are failed one by one after gap_timeout_s: a loop over 2**61 of them would never end.
        if number is not None and number - model.order.following > MAX_AHEAD and not self.durability.replaying:
            raise RequestRefusedError(
                f"seq_id {number} of {model.name} is more than {MAX_AHEAD} ahead of {model.order.following}, the next to run",
                422,
            )
        # A request that fills a gap is taken if none could run without it, as the later ones, already taken, wait for it.
        waiting = len(model.order.early)
        new = number != model.order.following or not waiting or self.futures.pending(model.name) > waiting
        # A replay enqueues what was accepted before the restart, whatever the limits are now.
        if new and not always and not self.durability.replaying:
            self._check_load(model, values.get("tokens", 0))
        future = self.futures.make(name, model.tenant, model.name, kind, number_in_line=number, **values)

        def submit() -> None:
            # Built in its turn, not on arrival: whether a checkpoint exists, for one, depends on the requests before it.
            # An error ends the future only: its number has had its turn, and later requests must have theirs.
            try:
                built = command(future.number)
            except Exception as error:  # an unreadable storage, for one
                if not isinstance(error, MegascendError):  # the client gets only its class
                    log.exception("a %s cannot be started", kind)
                self.break_future(future.number, error)
            else:
                if built is not None:
                    self.submit(built)
            self.durability.note_turn(model, future, number)

        for turn in [submit] if number is None else model.order.offer(number, submit):
            turn()
        model.gap_since = (model.gap_since or self.clock()) if model.order.early else None
        return future

    def enqueue_failure(
        self, model: Model, number: int | None, kind: str, error: MegascendError, *, spoils: bool = False, **values: Any
    ) -> Future:
        """Make a future that fails in its turn.

        Args:
            spoils: fail the optimizer step that the request belongs to as well.
        """

        def command(ticket: int) -> Command | None:
            if spoils:
                # An empty batch with an error: the ranks note for the step of this adapter that a part of its
                # gradients is missing.
                return ForwardBackward(ticket, model.adapter, (), None, str(error))
            self.break_future(ticket, error)
            return None

        return self.enqueue(model, number, kind, command, **values)

    def enqueue_missing(self, model: Model, number: int, message: str) -> Future:
        """Fail a request that never arrived, and with it the optimizer step that it belongs to."""
        future = self.enqueue_failure(model, number, "forward_backward", DataError(message), spoils=True, always=True)
        self.durability.note_request(future, "missing", message.encode(), number)
        return future

    def _check_load(self, model: Model, tokens: int) -> None:
        limits = self.settings.limits
        if self.futures.pending(model.name) >= limits.pending:
            raise RequestRefusedError(f"{limits.pending} requests of {model.name} are pending; fetch some first", 429)
        self.check_answers(model.tenant)
        self.check_tokens(model.tenant, tokens)

    def check_answers(self, tenant: str) -> None:
        """Raise 429 if a tenant has too many answers that it has not fetched."""
        if self.futures.full(tenant):
            limit = self.settings.limits.answer_bytes
            raise RequestRefusedError(
                f"your answers are more than {MAX_ANSWERS}, or than {limit} bytes (limits.answer_bytes); fetch some first",
                429,
            )

    def check_tokens(self, tenant: str, tokens: int) -> None:
        """Raise 429 if a request of so many tokens exceeds a tenant's limit with those that are pending."""
        pending, limit = self.futures.tokens(tenant), self.settings.limits.tokens
        # A request larger than the limit is accepted when nothing else is pending; otherwise it could never run.
        if pending and pending + tokens > limit:
            raise RequestRefusedError(f"{pending} tokens of yours are pending, {limit} may be", 429)

    # --- commands and their outcomes ---

    def require_same_body(self, future: Future, digest: str | None) -> None:
        """Note the digest of a request's body; refuse the request if its future is that of a request with another body.

        Requests do not name the client that sent them: of two clients that use one number, the second must not get the first
        one's answer.

        Args:
            digest: None: the request is repeated after a restart.
        """
        if future.digest is None:
            future.digest = digest
        elif digest is not None and future.digest != digest:
            raise RequestRefusedError(
                f"{future.name} is an earlier request with another content: numbers are used once; give each program and each "
                "forked process a client of its own"
            )

    def submit(self, command: Command) -> None:
        self._inbox.submit(command)

    def cancel(self, future: Future) -> None:
        """Cancel a sampling request on vLLM or on the ranks."""
        # False for a request that vLLM does not have: then the ranks have it.
        if self.vllm is not None and self.vllm.cancel(future.number):
            return
        self._inbox.submit(Cancel(future.number, ""))

    def new_label(self, kind: str) -> str:
        """Generate an unguessable name for a future."""
        return f"{kind}:{secrets.token_hex(16)}"

    def make_internal(
        self,
        kind: str,
        tenant: str = "",
        then: Callable[[bool], None] = lambda succeeded: None,
        model: str | None = None,
    ) -> Future:
        """Make a future for a command of the server's own, whose outcome no client fetches."""
        return self.futures.make(self.new_label(kind), tenant, model, kind, then=then, internal=True)

    def break_future(self, number: int, error: Exception) -> None:
        """Fail a future that has no command on the ranks."""
        future = self.futures.by_number(number)
        if future is not None:
            self.end(future, Outcome(number, error=error))

    def finish(self, outcomes: list[Outcome]) -> None:
        """Complete the futures of finished commands, at most one batch of gradients among them."""
        ended = []
        for outcome in outcomes:
            future = self.futures.by_number(outcome.number)
            if future is None:
                continue  # ended and dropped meanwhile
            behind = self._behind.get(future.model or "")
            if behind is not None:
                behind.append(outcome)
            elif future.work is not None and future.ended is None and outcome.error is None:
                self._behind[future.model or ""] = []
                task = asyncio.ensure_future(self._finish_with_work(future, future.work, outcome))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            # A load whose state is not saved yet is deferred: a client must not learn of what a restart would lose.
            elif not self.durability.defers(future, outcome):
                self.end(future, outcome)
                ended.append(future)
        self.figures.count_batch(ended)

    async def _finish_with_work(self, future: Future, work: Callable[[Any], Any], outcome: Outcome) -> None:
        """Do a command's disk work in a thread, then end its future, and those of the same model that have ended meanwhile.

        In their order: with --durable, a save of the model stores the answers of the requests before it.
        """
        try:
            # Not in turns with the tenant's other calls: everything of the model waits for it.
            outcome = replace(outcome, value=await asyncio.to_thread(work, outcome.value))
        except Exception as error:  # an error in one answer must not end the server
            if not isinstance(error, MegascendError):  # the client gets only its class
                log.exception("the answer to a %s cannot be built", future.kind)
            outcome = replace(outcome, error=error)
        try:
            self.end(future, outcome)
        finally:
            self.finish(self._behind.pop(future.model or ""))

    def end(self, future: Future, outcome: Outcome) -> None:
        """Complete a future with the outcome of its command."""
        if outcome.error is not None:
            self.futures.fail(future, Failure.of(outcome.error))
        else:
            self.futures.complete(future, outcome.value)
        self.figures.count(future, outcome.batch_adapters, self.clock())
        self.figures.count_wait(future, outcome.wait_units, outcome.wait_seconds)
        self.durability.note_end(future)  # last: it stores the answer, or the failure that building the answer led to

    async def wait(self, tenant: str, name: Any, timeout_s: float) -> Future:
        """Return a tenant's future once it has ended, or pending after ``timeout_s``."""
        future = self.futures.get(name, tenant) if isinstance(name, str) else None
        if future is None:
            raise RequestRefusedError(f"unknown or expired request id {str(name)[:160]!r}", 410)
        self._touch_session(future)
        if future.ended is None:
            try:
                # An Event, not an asyncio.Future: wait_for cancels what it waits for, and several polls may wait for one answer.
                await asyncio.wait_for(future.changed.wait(), timeout_s)
            except (TimeoutError, asyncio.TimeoutError):
                self._touch_session(future)
                return future
        self.futures.mark_fetched(future)
        return future

    def _touch_session(self, future: Future) -> None:
        # A client that waits for a long step is alive, even if its heartbeats are late.
        model = self.tenancy.models.get(future.model or "")
        if model is not None and model.session in self.tenancy.sessions:
            self.tenancy.sessions[model.session].last_heard = self.clock()
