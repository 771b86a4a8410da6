"""The loop of every rank: take what rank 0 has gathered, run a unit of it, tell rank 0's HTTP server what came of it."""

from __future__ import annotations

from collections.abc import Callable

from megascend.backend import Backend
from megascend.lora.queue import AdapterQueue
from megascend.serve.commands import Outcome
from megascend.serve.inbox import Inbox
from megascend.serve.lines import Lines
from megascend.serve.sampling import Generate


def work(
    backend: Backend,
    queue: AdapterQueue,
    inbox: Inbox | None,
    report: Callable[[list[Outcome]], None],
    generate: Generate | None = None,
    max_pending: int = 64,
) -> None:
    """Run commands until the inbox of rank 0 is closed. Collective.

    Args:
        inbox: rank 0's; None on the others.
        generate: answers requests to sample, in slices; collective.
        report: called on every rank with what has ended.
    """
    lines = Lines(backend, queue, max_pending, generate)
    while _turn(backend, lines, inbox, report):
        pass


def _turn(backend: Backend, lines: Lines, inbox: Inbox | None, report: Callable[[list[Outcome]], None]) -> bool:
    """Take what there is, run one unit and report it; False when the inbox is closed.

    What was taken and what came of it end with the turn: no batch is held while the next one is waited for.
    """
    idle, ready = lines.idle, lines.ready

    def gathered():
        assert inbox is not None
        return inbox.take(wait=idle, ready=ready)

    commands = backend.from_rank_0(gathered)
    if commands is None:
        return False
    outcomes = lines.add(commands)
    if not lines.idle:
        outcomes += lines.run_once()
    if outcomes:
        report(outcomes)
    if inbox is not None:
        inbox.answered(lines.answered)
    return True
