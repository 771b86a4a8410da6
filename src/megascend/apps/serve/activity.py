"""Lines on the terminal about what the service does: sessions, models, steps, waiting requests, and failures as they happen."""

from __future__ import annotations

import sys
import time

from megascend.apps.serve.service import Service

EVERY_S = 5.0  # between two lines of progress
FAILURES, CHARACTERS = 5, 200


class Activity:
    """Reports of one service; its event loop calls :meth:`report` at every tick."""

    def __init__(self, service: Service) -> None:
        self._service, self._progress = service, ""
        self._written = self._seen = service.clock()

    def report(self, *, last: bool = False) -> None:
        """Write new failures, and progress since the last line if that is some seconds old, or if it is the ``last`` one."""
        service, now = self._service, self._service.clock()
        figures, tenancy = service.figures, service.tenancy
        failures = [problem for each in figures.problems.values() for problem in each if problem.time > self._seen]
        self._seen = now
        for problem in failures[-FAILURES:]:
            # Clients choose parts of a message: no control characters reach the terminal.
            text = "".join(character if character.isprintable() else " " for character in problem.message)
            _write(f"{problem.kind} {problem.model} failed ({problem.category}'s fault): {text[:CHARACTERS]}")
        steps, waiting = figures.ended.get(("optim_step", "ok"), 0), sum(service.futures.pending_by_kind().values())
        progress = (
            f"sessions {len(tenancy.sessions)}, models {len(tenancy.models)}, steps {steps:,}, waiting {waiting:,}"
        )
        begun = self._progress or tenancy.sessions
        if begun and progress != self._progress and (last or now - self._written >= EVERY_S):
            self._progress, self._written = progress, now
            _write(progress)


def _write(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
