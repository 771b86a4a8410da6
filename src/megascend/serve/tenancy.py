"""Sessions, models and samplers, each of one tenant. Pure but for the clock that is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megascend.serve.checkpoints import model_name, new_session
from megascend.serve.errors import RequestRefusedError

T = TypeVar("T")

MOST_SAMPLERS = 4096
"""Samplers of a session."""


@dataclass
class Order(Generic[T]):
    """The order in which one model's requests run.

    Clients number a model's requests 1, 2, ... and send several at a time, the first one not always first. A request runs when
    all with smaller numbers have been handed out. A number is handed out once: sent again, it gets the answer of the first time.

    Attributes:
        following: the number that is handed out next.
        early: requests that came before one with a smaller number.
    """

    following: int = 1
    early: dict[int, T] = field(default_factory=dict)

    def seen(self, number: int) -> bool:
        """Check whether this number has come before."""
        return number < self.following or number in self.early

    def offer(self, number: int, item: T) -> list[T]:
        """Take a request that has not been :meth:`seen`; return those that may run now, in their order."""
        self.early[number] = item
        ready = []
        while self.following in self.early:
            ready.append(self.early.pop(self.following))
            self.following += 1
        return ready

    def missing(self) -> range:
        """Return the numbers that keep others waiting; empty if none does."""
        return range(self.following, min(self.early)) if self.early else range(self.following, self.following)

    def give_up(self) -> list[T]:
        """Stop waiting for the numbers that are :meth:`missing`; return those that may run now, in their order."""
        if not self.early:
            return []
        self.following = min(self.early)
        return self.offer(self.following, self.early.pop(self.following))


@dataclass(eq=False)
class Session:
    """A client program's.

    Attributes:
        heard: when it last said something.
        models: names of its models.
        samplers: by name, the checkpoint each samples from, or None for the base model.
        clones: by the sampler's name, how many further clients use it.
    """

    name: str
    tenant: str
    heard: float
    models: list[str] = field(default_factory=list)
    samplers: dict[str, str | None] = field(default_factory=dict)
    clones: dict[str, int] = field(default_factory=dict)
    metadata: Mapping[str, str] | None = None

    def add_sampler(self, name: str, path: str | None) -> None:
        """Add a sampler; the oldest makes room."""
        while len(self.samplers) >= MOST_SAMPLERS and name not in self.samplers:
            oldest = next(iter(self.samplers))
            del self.samplers[oldest]
            self.clones.pop(oldest, None)
        self.samplers[name] = path


def samples_of(session: Session) -> str:
    """Return the name that a session's requests to sample are counted for, in a model's place."""
    return f"{session.name}:samples"


@dataclass(eq=False)
class Model:
    """An adapter in training.

    Attributes:
        adapter: its name on the backend.
        order: of its requests; of each that is early, the function that submits it.
        gap_since: when its requests began to wait for one that has not come.
        ready: the ranks have it.
        steps: optimizer steps that were made.
        losses: of the last steps, as (step, sum over tokens, tokens).
    """

    name: str
    session: str
    tenant: str
    adapter: str
    rank: int
    attention: bool
    mlp: bool
    output: bool
    made: float
    used: float
    order: Order[Callable[[], None]] = field(default_factory=lambda: Order[Callable[[], None]]())
    gap_since: float | None = None
    ready: bool = False
    steps: int = 0
    losses: list[tuple[int, float, int]] = field(default_factory=list)
    metadata: Mapping[str, Any] | None = None


class Tenancy:
    """All sessions and models. What belongs to another tenant is as if it were not there.

    Args:
        clock: seconds, monotonic.
        max_models: of all tenants.
        models_each, sessions_each: of one tenant.
    """

    def __init__(self, clock: Callable[[], float], *, max_models: int, models_each: int, sessions_each: int) -> None:
        self._clock = clock
        self._max_models, self._models_each, self._sessions_each = max_models, models_each, sessions_each
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self._adapters = 0

    def open_session(self, tenant: str, metadata: Mapping[str, str] | None = None) -> Session:
        """Open a session.

        Raises:
            RequestRefusedError: 429; the tenant has as many as it may.
        """
        if sum(session.tenant == tenant for session in self.sessions.values()) >= self._sessions_each:
            raise RequestRefusedError(f"you have {self._sessions_each} sessions already; end some", 429)
        session = Session(new_session(), tenant, self._clock(), metadata=metadata)
        self.sessions[session.name] = session
        return session

    def restore_session(self, name: str, tenant: str, metadata: Mapping[str, str] | None) -> None:
        """Restore a session as it was before a restart, without models and samplers."""
        self.sessions[name] = Session(name, tenant, self._clock(), metadata=metadata)

    def session(self, name: Any, tenant: str) -> Session:
        """Return a tenant's session, which has sent something now.

        Raises:
            RequestRefusedError: 410; there is none, or none any more.
        """
        session = self.sessions.get(name) if isinstance(name, str) else None
        if session is None or session.tenant != tenant:
            raise RequestRefusedError(f"unknown or ended session {str(name)[:80]!r}", 410)
        session.heard = self._clock()
        return session

    def sampler(self, name: str, tenant: str) -> tuple[Session, str | None]:
        """Return the session of a tenant's sampler, and the checkpoint that it samples from, or None for the base model.

        Raises:
            RequestRefusedError: 410, there is no such session; 404, it has no such sampler.
        """
        session = self.session(name.partition(":")[0], tenant)
        if name not in session.samplers:
            raise RequestRefusedError(f"there is no sampler {name[:120]!r}", 404)
        return session, session.samplers[name]

    def model(self, name: Any, tenant: str) -> Model:
        """Return a tenant's model, whose session has sent something now.

        Raises:
            RequestRefusedError: 404; there is none, or none any more.
        """
        model = self.models.get(name) if isinstance(name, str) else None
        if model is None or model.tenant != tenant:
            raise RequestRefusedError(f"unknown or removed model {str(name)[:120]!r}", 404)
        model.used = self._clock()
        if model.session in self.sessions:
            self.sessions[model.session].heard = model.used
        return model

    def add_model(
        self,
        session: Session,
        number: int,
        *,
        rank: int,
        attention: bool,
        mlp: bool,
        output: bool,
        metadata: Any = None,
    ) -> Model:
        """Add a model to a session.

        Raises:
            RequestRefusedError: 429; the tenant, or the server, has as many as it may.
        """
        count = sum(model.tenant == session.tenant for model in self.models.values())
        if count >= self._models_each or len(self.models) >= self._max_models:
            which = "you have" if count >= self._models_each else "the server has"
            raise RequestRefusedError(
                f"{which} {min(count, self._models_each) or len(self.models)} models; unload some", 429
            )
        self._adapters += 1
        now = self._clock()
        model = Model(
            model_name(session.name, number), session.name, session.tenant, f"a{self._adapters}", rank, attention, mlp, output,
            now, now, metadata=metadata,
        )  # fmt: skip
        self.models[model.name] = model
        session.models.append(model.name)
        return model

    def remove_model(self, model: Model) -> None:
        """Forget a model; its session stays."""
        self.models.pop(model.name, None)
        if model.session in self.sessions and model.name in self.sessions[model.session].models:
            self.sessions[model.session].models.remove(model.name)

    def silent(self, timeout_s: float) -> list[Session]:
        """List the sessions that have sent nothing for so long."""
        now = self._clock()
        return [session for session in self.sessions.values() if now - session.heard > timeout_s]

    def heard_of_all(self) -> None:
        """Begin to count every session's silence from now on."""
        for session in self.sessions.values():
            session.heard = self._clock()

    def close_session(self, session: Session) -> list[Model]:
        """Forget a session; return its models, which are to be removed."""
        self.sessions.pop(session.name, None)
        return [self.models[name] for name in session.models if name in self.models]
