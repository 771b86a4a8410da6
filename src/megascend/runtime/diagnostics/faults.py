"""Fault injection at a named phase of a rank, for tests: the rank dies, stops, hangs, skips the phase or raises.

The hang monitor reads the environment variable ``MEGASCEND_FAULTS`` when it is created. Tests set it through
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
    """A fault that one rank triggers when it enters a phase. Fires once in a process.

    Attributes:
        action: ``die`` (SIGKILL itself), ``stop`` (SIGSTOP itself), ``hang`` (sleep for ever, in Python), ``skip`` (the
            phase's body does not run; only where the body returns nothing: ``grad reduce``), ``raise`` (a RuntimeError).
        rank: global rank.
        phase: name of the phase.
        step: number of the optimizer step, from 1; None: any.
        attempt: number of restarts by torchrun (``--max-restarts``) at which the fault is armed.
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
    """Arm ``faults`` for this process and its children within the context.

    A process arms them when it creates its process groups, and logs a warning.
    """
    # In the environment rather than in a variable of this module: child processes have to see them too.
    before = os.environ.get(VARIABLE)
    os.environ.update(environment(*faults))
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def read(text: str) -> list[Fault]:
    """Decode the text that :func:`environment` encoded."""
    try:
        return [Fault(**values) for values in json.loads(text)]
    except (TypeError, ValueError) as error:  # a ConfigError is a ValueError too
        raise ConfigError(f"{VARIABLE}={text!r} cannot be read: {error}") from error


class ArmedFaults:
    """The armed faults of this rank, for the monitor."""

    def __init__(self, faults: list[Fault]) -> None:
        self.waiting = faults

    @classmethod
    def from_text(cls, text: str, rank: int, attempt: int) -> ArmedFaults | None:
        """Return the faults of ``rank`` in this attempt; None if it has none."""
        faults = [fault for fault in read(text) if fault.rank == rank and fault.attempt == attempt]
        return cls(faults) if faults else None

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
        """Trigger the fault that is armed for ``phase``; return True if the phase's body is to be skipped.

        Args:
            publish: publishes this rank's record, so that its peers know the phase in which it dies or hangs.
            quiet: a lock that keeps this process's threads out of the store: a process stopped in the middle of a store
                request would block the other ranks too.
        """
        fault = next((f for f in self.waiting if f.phase == phase and f.step in (None, step)), None)
        if fault is None:
            return False
        self.waiting.remove(fault)
        _disarm(fault)
        if fault.action == "skip":
            if not skippable:
                raise ConfigError(f"fault: the phase {phase!r} cannot be skipped: its return value is needed")
            return True
        if fault.action == "raise":
            raise RuntimeError(f"injected fault: {fault}")
        publish()
        if fault.action == "hang":
            hang()
        # SIGKILL and SIGSTOP cannot be caught: nothing after this line runs, or not before SIGCONT.
        with quiet():
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "die" else signal.SIGSTOP)
        return False


def hang() -> None:
    """Sleep forever, in Python."""
    while True:
        time.sleep(3600)


def _disarm(fault: Fault) -> None:
    """Remove a fault from the environment, so that it does not fire again when this process recreates its groups."""
    text = os.environ.get(VARIABLE)
    if text:
        faults = read(text)
        if fault in faults:
            faults.remove(fault)
        os.environ.update(environment(*faults))
