"""Sessions, models and samplers, each owned by one tenant. Pure except for the injected clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megascend.apps.serve.api.bodies import LoraSettings
from megascend.apps.serve.checkpoints import model_name, new_session
from megascend.apps.serve.errors import RequestRefusedError

T = TypeVar("T")

MAX_SAMPLERS = 4096
"""Maximum number of samplers of a session."""


@dataclass
class Order(Generic[T]):
    """The execution order of one model's requests.

    Clients number a model's requests 1, 2, ... and send several at a time, which may arrive out of order. A request runs once all
    smaller numbers have been released. Each number is released once; a retry gets the first answer.

    Attributes:
        following: the next number to release.
        early: requests that arrived ahead of a smaller number.
    """

    following: int = 1
    early: dict[int, T] = field(default_factory=dict)

    def has_arrived(self, number: int) -> bool:
        return number < self.following or number in self.early

    def offer(self, number: int, item: T) -> list[T]:
        """Add a request that was not :meth:`seen`; return the requests that may run now, in order."""
        self.early[number] = item
        ready = []
        # One arrival may fill the gap that several later requests have waited behind.
        while self.following in self.early:
            ready.append(self.early.pop(self.following))
            self.following += 1
        return ready

    def missing(self) -> range:
        """Return the missing numbers that block early requests; empty if nothing is blocked."""
        return range(self.following, min(self.early)) if self.early else range(self.following, self.following)

    def give_up(self) -> list[T]:
        """Skip the :meth:`missing` numbers; return the requests that may run now, in order."""
        # The numbers before are gone for good: if one arrives after all, it counts as seen.
        if not self.early:
            return []
        self.following = min(self.early)
        return self.offer(self.following, self.early.pop(self.following))


@dataclass(eq=False)
class Session:
    """A client program's session.

    Attributes:
        last_heard: clock time of its last request.
        models: names of its models.
        samplers: sampler name to checkpoint path, None for the base model.
        clones: sampler name to the number of additional clients.
    """

    name: str
    tenant: str
    last_heard: float
    models: list[str] = field(default_factory=list)
    samplers: dict[str, str | None] = field(default_factory=dict)
    clones: dict[str, int] = field(default_factory=dict)
    metadata: Mapping[str, str] | None = None

    def add_sampler(self, name: str, path: str | None) -> None:
        """Add a sampler; evict the oldest beyond the limit."""
        # Clients create a sampler for every saved checkpoint and never remove one; a long run would fill the memory.
        while len(self.samplers) >= MAX_SAMPLERS and name not in self.samplers:
            oldest = next(iter(self.samplers))
            del self.samplers[oldest]
            self.clones.pop(oldest, None)
        self.samplers[name] = path


def sampling_line(session: Session) -> str:
    """Return the name under which a session's sampling requests are counted, in place of a model."""
    return f"{session.name}:samples"


@dataclass(eq=False)
class Model:
    """An adapter in training.

    Attributes:
        adapter: adapter name on the backend.
        lora: rank and trained layers.
        order: request order; holds the submit function of each early request.
        gap_since: clock time since which requests wait for a missing number.
        ready: True once the ranks have created it.
        steps: optimizer steps taken.
        losses: (step, sum over tokens, tokens) of the last steps.
    """

    name: str
    session: str
    tenant: str
    adapter: str
    lora: LoraSettings
    used: float
    order: Order[Callable[[], None]] = field(default_factory=lambda: Order[Callable[[], None]]())
    gap_since: float | None = None
    ready: bool = False
    steps: int = 0
    losses: list[tuple[int, float, int]] = field(default_factory=list)
    metadata: Mapping[str, Any] | None = None


class Tenancy:
    """All sessions and models. A tenant gets the same error for another tenant's objects as for missing ones.

    Args:
        clock: monotonic seconds.
        max_models: limit over all tenants.
        models_each, sessions_each: limits per tenant.
    """

    def __init__(self, clock: Callable[[], float], *, max_models: int, models_each: int, sessions_each: int) -> None:
        self._clock = clock
        self._max_models, self._models_each, self._sessions_each = max_models, models_each, sessions_each
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self._adapters = 0

    def open_session(self, tenant: str, metadata: Mapping[str, str] | None = None) -> Session:
        if sum(session.tenant == tenant for session in self.sessions.values()) >= self._sessions_each:
            raise RequestRefusedError(f"you have {self._sessions_each} sessions already; end some", 429)
        session = Session(new_session(), tenant, self._clock(), metadata=metadata)
        self.sessions[session.name] = session
        return session

    def restore_session(self, name: str, tenant: str, metadata: Mapping[str, str] | None) -> None:
        """Restore a session after a restart, without models and samplers."""
        self.sessions[name] = Session(name, tenant, self._clock(), metadata=metadata)

    def session(self, name: Any, tenant: str) -> Session:
        """Return a tenant's session and reset its timeout."""
        session = self.sessions.get(name) if isinstance(name, str) else None
        if session is None or session.tenant != tenant:
            raise RequestRefusedError(f"unknown or ended session {str(name)[:80]!r}", 410)
        session.last_heard = self._clock()
        return session

    def sampler(self, name: str, tenant: str) -> tuple[Session, str | None]:
        """Return the session of a tenant's sampler and the sampler's checkpoint path, None for the base model."""
        session = self.session(name.partition(":")[0], tenant)
        if name not in session.samplers:
            raise RequestRefusedError(f"unknown sampler {name[:120]!r}", 404)
        return session, session.samplers[name]

    def model(self, name: Any, tenant: str) -> Model:
        """Return a tenant's model and reset its session's timeout."""
        model = self.models.get(name) if isinstance(name, str) else None
        if model is None or model.tenant != tenant:
            raise RequestRefusedError(f"unknown or removed model {str(name)[:120]!r}", 404)
        # Any request keeps the session alive: a client that is busy sending may be late with its heartbeats.
        model.used = self._clock()
        if model.session in self.sessions:
            self.sessions[model.session].last_heard = model.used
        return model

    def add_model(
        self, session: Session, number: int, lora: LoraSettings, metadata: Mapping[str, Any] | None = None
    ) -> Model:
        """Add a model to a session."""
        count = sum(model.tenant == session.tenant for model in self.models.values())
        if count >= self._models_each or len(self.models) >= self._max_models:
            holder = "you have" if count >= self._models_each else "the server has"
            raise RequestRefusedError(
                f"{holder} {min(count, self._models_each) or len(self.models)} models; unload some", 429
            )
        # Never used twice: the adapter of a removed model may still be on the ranks.
        self._adapters += 1
        now, name = self._clock(), model_name(session.name, number)
        model = Model(name, session.name, session.tenant, f"a{self._adapters}", lora, now, metadata=metadata)
        self.models[model.name] = model
        session.models.append(model.name)
        return model

    def remove_model(self, model: Model) -> None:
        """Remove a model; its session stays."""
        # Also called for a model that is gone: its creation may fail after a client has unloaded it.
        self.models.pop(model.name, None)
        if model.session in self.sessions and model.name in self.sessions[model.session].models:
            self.sessions[model.session].models.remove(model.name)

    def silent(self, timeout_s: float) -> list[Session]:
        now = self._clock()
        return [session for session in self.sessions.values() if now - session.last_heard > timeout_s]

    def restart_session_timeouts(self) -> None:
        for session in self.sessions.values():
            session.last_heard = self._clock()

    def close_session(self, session: Session) -> list[Model]:
        """Remove a session; return its models for the caller to remove."""
        self.sessions.pop(session.name, None)
        return [self.models[name] for name in session.models if name in self.models]
