"""What a run says about its start: every second belongs to one phase, from the start of the process on."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest

from megascend.app.start_phases import StartPhases


def test_phases_add_up_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, system, processor = [100.0], 1000.0, [2.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: system)
    monkeypatch.setattr(time, "process_time", lambda: processor[0])
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(create_time=lambda: 997.0))
    phases = StartPhases()
    phases.ended("Python")
    clock[0] += 5.0
    phases.ended("waiting")
    clock[0], processor[0] = clock[0] + 1.25, processor[0] + 1.0
    phases.ended("computing")
    assert phases.seconds == {"Python": 3.0, "waiting": 5.0, "computing": 1.25}
    assert phases.processor_s == {"Python": 2.0, "waiting": 0.0, "computing": 1.0}
    assert phases.record() == {"seconds": phases.seconds, "processor_s": phases.processor_s}


def test_what_was_waited_for_is_set_apart_and_little_things_are_left_out() -> None:
    phases = StartPhases()
    phases.seconds, phases.processor_s = {"torch": 3.0, "settings": 0.01, "model": 9.0}, {}
    phases.set_apart("self-check", "model", 8.0)
    assert phases.seconds == {"torch": 3.0, "settings": 0.01, "model": 1.0, "self-check": 8.0}
    assert str(phases) == "12.0 s: torch 3.0, model 1.0, self-check 8.0"
