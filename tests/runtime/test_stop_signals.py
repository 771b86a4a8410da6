"""Signals are recorded and do not interrupt, until the second Ctrl-C."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from megascend.runtime import stop_signals
from megascend.runtime.stop_signals import STOPPING, UNLESS_HANDLED, StopSignals, stopping


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)  # to this thread: a signal to the process may be delivered to another thread, and later
    time.sleep(0)  # Python runs handlers between two instructions


@pytest.fixture(autouse=True)
def default_actions() -> Iterator[None]:
    """Restore the default actions: the tests may run under nohup, or with another handler."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in UNLESS_HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING)
def test_first_signal_is_recorded_and_handlers_are_restored(number: signal.Signals) -> None:
    before = [signal.getsignal(stop_signal) for stop_signal in STOPPING]
    with StopSignals() as signals:
        assert signals.received is None
        send(number)
        assert signals.received is number
    assert [signal.getsignal(stop_signal) for stop_signal in STOPPING] == before


@pytest.mark.parametrize("number", UNLESS_HANDLED)
def test_ignored_and_handled_signals_are_unchanged(number: signal.Signals) -> None:
    observed: list[int] = []
    for handler in (signal.SIG_IGN, lambda number, frame: observed.append(number)):
        signal.signal(number, handler)
        with StopSignals() as signals:
            send(number)
            assert signals.received is None
            assert signal.getsignal(number) is handler
    assert observed == [number]


def test_handler_set_in_c_is_kept() -> None:
    faulthandler.register(signal.SIGUSR1)
    try:
        assert signal.SIGUSR1 not in stopping()
        assert signal.SIGUSR2 in stopping()
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def test_first_signal_is_kept() -> None:
    with StopSignals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert signals.received is signal.SIGTERM


def test_second_ctrl_c_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        send(signal.SIGINT)
        assert signals.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_duplicate_ctrl_c_under_a_launcher_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignals(launched=True) as signals:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert signals.received is signal.SIGINT
        later = time.monotonic() + stop_signals.DUPLICATE_S
        monkeypatch.setattr(stop_signals.time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_unchanged_outside_the_main_thread() -> None:
    before = [signal.getsignal(stop_signal) for stop_signal in STOPPING]
    observed = []

    def work() -> None:
        with StopSignals():
            observed.append([signal.getsignal(stop_signal) for stop_signal in STOPPING])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert observed == [before]
