"""Doubles for the controller's tests: a recording engine, a manual clock, and a served controller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megascend.apps.rl.rollout.controller.client import ControllerClient, ControllerEngine
from megascend.apps.rl.rollout.controller.controller import Controller, ControllerLimits
from megascend.apps.rl.rollout.controller.messages import AUDIENCE, new_id, write_call
from megascend.apps.rl.rollout.controller.server import ControllerServer
from megascend.apps.rl.rollout.controller.tasks import Timer
from megascend.errors import EngineError
from weightwire.auth import sign
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import LoopThread
from weightwire.keys import Key
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal

KEY = "0123456789abcdef" * 2


def an_offer(update: str, workers: int) -> Offer:
    """Build the offer of one small tensor."""
    manifest = Manifest(1, (TensorSpec("w", "float32", (2,)),))
    return Offer(update, "trainer", "127.0.0.1", 1, 1, workers, "gloo", 60.0, 60.0, manifest)


def a_seal(update: str) -> Seal:
    """Build the seal of the update."""
    return Seal(update, 1, "0" * 64, ("0",))


class ManualClock:
    """Time that passes when a test says so. Timers fire in :meth:`advance`, in order."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[_ManualTimer] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = _ManualTimer(when, callback)
        self._timers.append(timer)
        return timer

    async def advance(self, seconds: float) -> None:
        """Advance the time, fire the due timers in order, and run every task that is ready."""
        await settle()
        end = self._now + seconds
        while due := sorted((timer for timer in self._timers if timer.moment <= end), key=lambda timer: timer.moment):
            self._timers.remove(due[0])
            self._now = max(self._now, due[0].moment)
            if not due[0].cancelled:
                due[0].callback()
            await settle()
        self._now = end
        await settle()


class _ManualTimer:
    def __init__(self, moment: float, callback: Callable[[], object]) -> None:
        self.moment = moment
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


async def settle() -> None:
    """Run the tasks that wait for nothing outside this loop."""
    for _ in range(30):
        await asyncio.sleep(0)


class NotingEngine(InferenceEngine):
    """Engine double: records pauses and updates, and fails where a test asks for it.

    Attributes:
        calls: the calls it received, in order.
        fails: names of methods that raise.
        hangs: names of methods that do not return until cancelled.
        holds: names of methods that return once a test removes the name.
    """

    def __init__(self, name: str, receivers: int = 1) -> None:
        self.name = name
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.holds: set[str] = set()
        self.paused = False
        self.open: str | None = None
        self.in_force = ""
        self._receivers = receivers

    async def _called(self, call: str, detail: object = "") -> None:
        self.calls.append(f"{call} {detail}".strip())
        if call in self.hangs:
            await asyncio.Event().wait()
        while call in self.holds:
            await asyncio.sleep(0.01)
        if call in self.fails:
            raise EngineError(f"{self.name} cannot {call}")

    async def receivers(self) -> int:
        await self._called("receivers")
        return self._receivers

    async def begin_update(self, offer: Offer) -> None:
        self.open = offer.update
        await self._called("begin", f"{offer.update} as {offer.first}+{offer.workers}")

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        await self._called("verify", seal.update)

    async def commit(self, update: str) -> None:
        await self._called("commit", update)
        assert self.open == update
        self.in_force, self.open = update, None

    async def drop(self, update: str) -> None:
        await self._called("drop", update)
        self.open = None

    async def pause(self, lease_s: float) -> None:
        self.paused = True  # also when the answer never comes
        await self._called("pause", f"{lease_s:g}")

    async def resume(self) -> None:
        await self._called("resume")
        self.paused = False


class Blocking:
    """An object with asynchronous methods, whose calls wait: coroutines, contexts and streams run on a thread's loop."""

    def __init__(self, target: Any, thread: LoopThread) -> None:
        self.target, self._thread = target, thread

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.target, name)
        if not callable(member):
            return member

        def call(*arguments: Any, **settings: Any) -> Any:
            result = member(*arguments, **settings)
            if hasattr(result, "__aenter__"):
                return self._within(result)
            if hasattr(result, "__anext__"):
                return self._items(result)
            return self._thread.run(result) if asyncio.iscoroutine(result) else result

        return call

    @contextlib.contextmanager
    def _within(self, context: Any) -> Iterator[Any]:
        entered = self._thread.run(context.__aenter__())
        try:
            yield None if entered is None else Blocking(entered, self._thread)
        finally:
            self._thread.run(context.__aexit__(None, None, None))

    def _items(self, stream: Any) -> Iterator[Any]:
        while (result := self._thread.run(anext(stream, None))) is not None:
            yield result


class BlockingClient(Blocking):
    """A blocking client of a controller, on its own thread."""

    def __init__(self, address: object, key: Key, **options: Any) -> None:
        super().__init__(
            ControllerClient(address, key, **{"caller": "test", **options}),  # type: ignore[arg-type]
            LoopThread("rollout controller client"),
        )
        self._source, self._key = address, key

    @contextlib.contextmanager
    def claim(self, owner: str, engines: Sequence[str] | None = None, **options: Any) -> Iterator[Any]:
        """Own engines within the context, as another process would."""
        engine = ControllerEngine(self._source, self._key, owner=owner, engines=engines, **options)  # type: ignore[arg-type]
        try:
            self._thread.run(engine.quantised())  # a call that reaches no engine
            yield Blocking(engine, self._thread)
        finally:
            self._thread.run(engine.close())

    def submit(self, work: Any) -> Any:
        return self._thread.submit(work)

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.close()


class Served:
    """A controller served on a thread, with access to its state."""

    def __init__(
        self,
        clock: ManualClock | None = None,
        controller: ControllerLimits | None = None,
        engines: Sequence[NotingEngine] | None = None,
        **options: Any,
    ) -> None:
        self.thread = LoopThread("served controller")
        self.engines = [NotingEngine("one"), NotingEngine("two")] if engines is None else engines
        self.key = Key(KEY)

        async def start() -> tuple[Controller, ControllerServer]:
            control = Controller(self.engines, limits=controller, clock=clock)
            server = ControllerServer(control, self.key, **options)
            await server.start()
            return control, server

        try:
            self.controller, self.server = self.thread.run(start())
        except BaseException:
            self.thread.close()
            raise

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exception: object) -> None:
        self.thread.run(self.server.close())
        self.thread.close()
        assert not any(engine.paused for engine in self.engines)

    @property
    def where(self) -> str:
        return str(self.server.address)

    def client(self, **options: Any) -> BlockingClient:
        return BlockingClient(self.where, self.key, **{"timeout_s": 30.0, **options})

    def connect(self) -> socket.socket:
        return socket.create_connection((self.server.address.host, self.server.address.port), timeout=30)

    def state(self) -> Any:
        """Return the state that a call could have changed."""

        async def look() -> Any:
            owners = [claim.owner for claim in self.controller._claims.values()]
            calls = [list(engine.calls) for engine in self.engines]
            return owners, calls, dict(self.controller.tasks.status()), len(self.server._replies)

        return self.thread.run(look())

    @property
    def connections(self) -> set[Any]:
        assert self.server._server is not None
        return self.server._server.server_state.connections

    def idle(self) -> bool:
        """Check that no request is being served."""

        async def look() -> bool:
            return not self.connections and self.server._requests == self.server._buffered == 0

        return self.thread.run(look())

    def call(self, route: str, **arguments: Any) -> bytes:
        """Build the body of a new call."""
        return write_call(self.controller.instance, new_id(), "test", arguments)

    def request(self, route: str, body: bytes, key: Key | None = None) -> bytes:
        """Build a complete request, signed now."""
        signed = sign(key or self.key, "POST", route, body, audience=AUDIENCE)
        return self.head(route, len(body), signed.headers) + body

    @staticmethod
    def head(route: str, length: object, headers: dict[str, str]) -> bytes:
        fields = {"Host": "x", "Content-Length": str(length), **headers}
        return (f"POST {route} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n").encode(
            "latin-1"
        )

    def send(self, data: bytes, *, end: bool = False) -> tuple[int, Any]:
        """Send bytes; return the answer's status (0 without an answer) and JSON."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
                if end:
                    connection.shutdown(socket.SHUT_WR)
            return read_response(connection)


def read_response(connection: socket.socket) -> tuple[int, Any]:
    """Read until the connection ends; return status and JSON (or text), or 0 and None without an answer."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(2**16):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    if not head:
        return 0, None
    is_json = b"application/json" in head.lower()
    return int(head.split(b" ")[1]), json.loads(body) if is_json else body.decode()
