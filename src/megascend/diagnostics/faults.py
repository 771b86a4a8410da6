"""Faults to inject at a named phase of a rank, for tests: it dies, stops, hangs, skips the phase or raises.

Armed through the environment variable ``MEGASCEND_FAULTS``, which the hang monitor reads when it is made. Tests arm them through
:mod:`megascend.testing.faults`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from megascend.errors import ConfigError

VARIABLE = "MEGASCEND_FAULTS"
Action = Literal["die", "stop", "hang", "skip", "raise"]


@dataclass(frozen=True)
class Fault:
    """What one rank does when it enters a phase. Fires once in a process.

    Attributes:
        action: ``die`` (SIGKILL itself), ``stop`` (SIGSTOP itself), ``hang`` (sleep for ever, in Python), ``skip`` (the
            phase's body does not run; only where that returns nothing: ``grad reduce``), ``raise`` (a RuntimeError).
        rank: global rank.
        phase: name of the phase.
        step: number of the optimizer step, from 1; None: any.
        attempt: how often torchrun must have restarted the run (``--max-restarts``).

    Raises:
        ConfigError: a value cannot be.
    """

    action: Action
    rank: int
    phase: str
    step: int | None = None
    attempt: int = 0

    def __post_init__(self) -> None:
        actions = get_args(Action)
        if self.action not in actions:
            raise ConfigError(f"fault: action must be one of {', '.join(actions)}, got {self.action!r}")
        numbers = {"rank": (self.rank, 0), "attempt": (self.attempt, 0)}
        if self.step is not None:
            numbers["step"] = self.step, 1
        for name, (value, least) in numbers.items():
            if type(value) is not int or value < least:
                raise ConfigError(f"fault: {name} must be a whole number from {least}, got {value!r}")
        if not isinstance(self.phase, str) or not self.phase:
            raise ConfigError(f"fault: phase must be a name, got {self.phase!r}")

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.action} in {self.phase}{step} on rank {self.rank}"


# --- arming ---


def environment(*faults: Fault) -> dict[str, str]:
    """Return the variable that arms ``faults``, for the ``env`` of a subprocess."""
    return {VARIABLE: json.dumps([asdict(fault) for fault in faults])}


@contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Arm ``faults`` for this process and its children until the block ends.

    A process arms them when it creates its process groups, and says so on stderr.
    """
    before = os.environ.get(VARIABLE)
    os.environ.update(environment(*faults))
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def read(text: str) -> list[Fault]:
    """Decode what :func:`environment` returned.

    Raises:
        ConfigError: ``text`` is not a JSON list of faults.
    """
    try:
        return [Fault(**values) for values in json.loads(text)]
    except (TypeError, ValueError) as error:  # a ConfigError is a ValueError too
        raise ConfigError(f"{VARIABLE}={text!r} cannot be read: {error}") from error


class Armed:
    """The faults of this rank, for the monitor."""

    def __init__(self, faults: list[Fault]) -> None:
        self.waiting = faults

    @classmethod
    def from_text(cls, text: str, rank: int, attempt: int) -> Armed | None:
        """Return those of ``rank`` in this attempt; None if there are none.

        Raises:
            ConfigError: see :func:`read`.
        """
        mine = [fault for fault in read(text) if fault.rank == rank and fault.attempt == attempt]
        return cls(mine) if mine else None

    def __str__(self) -> str:
        return ", ".join(str(fault) for fault in self.waiting)

    def fire(
        self,
        phase: str,
        step: int,
        *,
        skippable: bool,
        publish: Callable[[], None],
        quiet: Callable[[], AbstractContextManager[object]],
    ) -> bool:
        """Do what is armed for ``phase``; True if its body is to be skipped.

        Args:
            publish: tells the other ranks where this one is, as they would know had it been there for a moment.
            quiet: a lock that keeps this process's threads out of the store: stopped inside, it would stop the others too.

        Raises:
            RuntimeError: the fault ``raise``.
            ConfigError: this phase cannot be skipped.
        """
        fault = next((f for f in self.waiting if f.phase == phase and f.step in (None, step)), None)
        if fault is None:
            return False
        self.waiting.remove(fault)
        _disarm(fault)
        if fault.action == "skip":
            if not skippable:
                raise ConfigError(f"fault: the phase {phase!r} cannot be skipped: what it returns is needed")
            return True
        if fault.action == "raise":
            raise RuntimeError(f"injected fault: {fault}")
        publish()
        if fault.action == "hang":
            hang()
        with quiet():
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "die" else signal.SIGSTOP)
        return False


def hang() -> None:
    """Sleep for ever, in Python."""
    while True:
        time.sleep(3600)


def _disarm(fault: Fault) -> None:
    """Make it fire once, even if this process makes its groups anew."""
    text = os.environ.get(VARIABLE)
    if text:
        faults = read(text)
        if fault in faults:
            faults.remove(fault)
        os.environ.update(environment(*faults))
