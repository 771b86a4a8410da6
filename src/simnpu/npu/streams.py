"""Streams and events. Work runs when it is called, in order; in strict mode ``order`` keeps what has waited for what."""

from __future__ import annotations

import itertools
import time
from types import TracebackType
from typing import Any

import torch

from simnpu.npu.devices import device_index
from simnpu.order import ORDER, Clock, queue_of
from simnpu.visible import CURRENT

_numbers = itertools.count(1)


PRIVATE_USE_1 = 20  # c10::DeviceType


class Stream(torch.Stream):
    """A queue of work that is always empty: an operator has finished when its call returns."""

    def __new__(
        cls, device: torch.device | str | int | None = None, priority: int = 0, stream_id: int | None = None, **_: Any
    ) -> Stream:
        number = next(_numbers) if stream_id is None else stream_id
        index = device_index(None if device == -1 else device)
        return super().__new__(cls, stream_id=number, device_index=index, device_type=PRIVATE_USE_1)

    def __init__(self, device: torch.device | str | int | None = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self._contexts: list[StreamContext] = []

    @property
    def npu_stream(self) -> int:
        return self.stream_id

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""
        if ORDER:
            ORDER.host_waits(ORDER.now(queue_of(self)))

    def __enter__(self) -> Stream:
        self._contexts.append(StreamContext(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.pop().__exit__(kind, value, traceback)

    def __repr__(self) -> str:
        return f"<torch_npu.npu.Stream device={self.device} npu_stream={self.stream_id:#x}>"


class Event(torch.Event):
    """A point in a stream. Recording notes the time, so that ``elapsed_time`` is that of the host."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        return super().__new__(cls, "cpu")

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self.recorded_at: float | None = None
        self._clock: Clock = {}
        self._device_index = CURRENT.index

    @property
    def device(self) -> torch.device:
        return torch.device("npu", self._device_index)

    def record(self, stream: Stream | None = None) -> None:
        self.recorded_at = time.perf_counter()
        self._device_index = CURRENT.index if stream is None else stream.device_index
        if ORDER:
            self._clock = ORDER.now(queue_of(stream))

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once: there is nothing to wait for."""
        if ORDER:
            ORDER.wait(queue_of(stream), self._clock)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""
        if ORDER:
            ORDER.host_waits(self._clock)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time between two recorded events."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Event.elapsed_time: both events must be made with enable_timing=True")
        if self.recorded_at is None or end_event.recorded_at is None:
            raise RuntimeError("Event.elapsed_time: both events must be recorded first")
        return (end_event.recorded_at - self.recorded_at) * 1000.0


def event_of_device(device: torch.device | str | int | None, *options: Any, **keywords: Any) -> Event:
    """``torch.Event(device, ...)`` of the simulated device, which it takes from the stream that it is recorded in."""
    return Event(*options, **keywords)


class Streams:
    """The default stream of every device, and the one that a thread uses."""

    def __init__(self) -> None:
        self.default: dict[int, Stream] = {}

    def default_of(self, index: int) -> Stream:
        if index not in self.default:
            self.default[index] = Stream(index, stream_id=0)
        return self.default[index]

    def used_on(self, index: int) -> Stream:
        return CURRENT.streams.get(index) or self.default_of(index)


STREAMS = Streams()


def default_stream(device: torch.device | str | int | None = None) -> Stream:
    return STREAMS.default_of(device_index(device))


def current_stream(device: torch.device | str | int | None = None) -> Stream:
    return STREAMS.used_on(device_index(device))


def set_stream(stream: Stream | None) -> None:
    """Use ``stream`` (and its device) from now on; None changes nothing."""
    if stream is None:
        return
    CURRENT.index = stream.device_index
    CURRENT.streams[stream.device_index] = stream


class StreamContext:
    """Context manager that uses a stream and goes back to the one before; None does nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.before: tuple[int, Stream] | None = None

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self.before = (CURRENT.index, STREAMS.used_on(self.stream.device_index))
        set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.before is not None:
            CURRENT.index, stream = self.before
            CURRENT.streams[stream.device_index] = stream
            self.before = None


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)
