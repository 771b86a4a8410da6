"""What a run says about its start: every second belongs to one phase, from the start of the process on."""

from __future__ import annotations

import time

import psutil

from megascend.app.start_phases import StartPhases


def test_phases_add_up_from_the_start_of_the_process() -> None:
    phases = StartPhases()
    phases.ended("Python")
    time.sleep(0.06)
    phases.ended("waiting")
    began = time.process_time()
    while time.process_time() - began < 0.06:
        pass
    born = psutil.Process().create_time()
    before = time.time() - born, time.process_time()
    phases.ended("computing")
    after = time.time() - born, time.process_time()
    assert before[0] - 0.1 < sum(phases.seconds.values()) < after[0] + 0.1
    assert before[1] - 0.05 < sum(phases.processor_s.values()) < after[1] + 0.05
    assert phases.processor_s["waiting"] < 0.05 < phases.seconds["waiting"]
    assert phases.processor_s["computing"] >= 0.06
    assert phases.record() == {
        name: {phase: round(value, 3) for phase, value in getattr(phases, name).items()}
        for name in ("seconds", "processor_s")
    }


def test_what_was_waited_for_is_set_apart_and_little_things_are_left_out() -> None:
    phases = StartPhases()
    phases.seconds, phases.processor_s = {"torch": 3.0, "settings": 0.01, "model": 9.0}, {}
    phases.set_apart("self-check", "model", 8.0)
    assert phases.seconds == {"torch": 3.0, "settings": 0.01, "model": 1.0, "self-check": 8.0}
    assert str(phases) == "12.0 s: torch 3.0, model 1.0, self-check 8.0"
