"""Who kept a collective from ending, found from what every rank last said about itself. Pure: no store, no clock.

A rank publishes a :class:`RankRecord` about once a second. A reader turns the records of its peers into :class:`PeerStatus`
s, which add for how long each has been silent, and :func:`diagnose` names the culprits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum

from megascend.diagnostics.collective_sequence import CollectiveCounts
from weightwire.liveness import Identity

SILENT_S = 3.0
"""A rank whose heartbeat does not advance for so long, in seconds, is gone: there is one every second."""
LISTED = 16
"""How many ranks' positions a message lists."""
TEXT_LIMIT = 400
"""Characters of another rank's error that a message repeats."""


@dataclass(frozen=True)
class PhaseFailure:
    """An exception that left a phase.

    Attributes:
        place: the phase (and its step) that it left.
        outer: the outermost phase around it.
        error: class and text.
        secondary: it only says that another rank was missed.
    """

    place: str
    outer: str
    error: str
    secondary: bool


@dataclass(frozen=True)
class RankRecord:
    """What a rank says about itself.

    Attributes:
        heartbeat: counts the records; one that no longer advances belongs to a rank that is gone.
        step: number of the optimizer step being worked on, from 1.
        label: the innermost phase the rank is in, or was in last.
        inside: it is in the phase; else it has left it.
        seconds: in (or since) that phase, when the record was written.
        outer: the outermost phase, in whose terms ranks are compared: all of them enter it equally often.
        counts: how often each outermost phase has been entered.
        collectives: object collectives that it has entered.
        open: outermost phases the rank is in; several if it has threads in the background.
        frame: where its Python stands, if it has been in the phase for long; else "".
        waiting: that is inside ``torch.distributed``.
        clock: ``time.time()`` of the writer.
        failure: what left its last phase; gone again as soon as the rank enters another from outside of all phases, or the phase
            around it ends well.
        ended: the rank has left its process groups, or its process is exiting.
        process: the writer's, with the name of its host; None if unknown.
    """

    heartbeat: int = 0
    step: int = 1
    label: str = "start-up"
    inside: bool = True
    seconds: float = 0.0
    outer: str = "start-up"
    counts: dict[str, int] = field(default_factory=dict)
    collectives: CollectiveCounts = field(default_factory=CollectiveCounts)
    open: list[str] = field(default_factory=list)
    frame: str = ""
    waiting: bool = False
    clock: float = 0.0
    failure: PhaseFailure | None = None
    ended: bool = False
    process: Identity | None = None

    def encode(self) -> str:
        """Encode as text, for the store."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str | bytes) -> RankRecord:
        """Decode what :meth:`encode` returned."""
        values = json.loads(text)
        if values["failure"] is not None:
            values["failure"] = PhaseFailure(**values["failure"])
        values["collectives"] = CollectiveCounts(**values["collectives"])
        if values["process"] is not None:
            values["process"] = Identity(**values["process"])
        return cls(**values)

    @property
    def place(self) -> str:
        """Return ``"in grad reduce of step 3"``."""
        return f"{'in' if self.inside else 'after'} {of_step(self.label, self.step)}"


@dataclass(frozen=True)
class PeerStatus:
    """A peer's last record, and for how many seconds its heartbeat has not advanced before the reader's eyes.

    Attributes:
        age: the record's, in seconds, as far as the two machines' clocks agree; only messages use it.
        state: ``ended`` or ``stopped``, if its process is on this machine and can be seen to be.
    """

    record: RankRecord
    silent: float = 0.0
    age: float = 0.0
    state: str | None = None

    @property
    def gone(self) -> bool:
        """Check whether it is lost without having said so."""
        silent = self.silent >= SILENT_S or self.state == "ended"
        return silent and not self.record.ended and self.record.failure is None

    @property
    def conclusive(self) -> bool:
        """Check whether it is to blame, whatever the other ranks do."""
        failure = self.record.failure
        return self.state == "ended" if failure is None else not failure.secondary


class PeerVerdict(IntEnum):
    """What is wrong with a peer; the first of these that any peer shows is the cause, later ones follow from it."""

    FAILED = 0
    GONE = 1
    LATE = 2
    LEFT = 3
    GAVE_UP = 4
    FINE = 5


LOST = (PeerVerdict.FAILED, PeerVerdict.GONE, PeerVerdict.GAVE_UP)
"""Kinds of a peer that will not come any more."""


@dataclass(frozen=True)
class Diagnosis:
    """What is to blame.

    Attributes:
        kind: FINE if no rank could be blamed.
        culprits: their ranks.
        reasons: a clause for each culprit: ``"rank 1 is gone: last heard of 12 s ago in grad reduce of step 3"``.
        positions: where every rank is, in one line; if no rank could be blamed, with the places in their Python.
    """

    kind: PeerVerdict
    culprits: tuple[int, ...]
    reasons: tuple[str, ...]
    positions: str


def of_step(label: str, step: int) -> str:
    """Return ``"grad reduce of step 3"``; nothing is counted yet in the start-up."""
    return label if label == "start-up" else f"{label} of step {step}"


def diagnose(
    rank: int, mine: RankRecord, peers: Mapping[int, PeerStatus | None], suspects: Iterable[int] | None = None
) -> Diagnosis:
    """Find who keeps ``rank`` from going on.

    Args:
        mine: this rank's record.
        peers: the other ranks' statuses; None for one that has never been heard of.
        suspects: ranks known not to have come to the collective (default: told from the records). They are blamed even
            if their records show nothing.
    """
    verdicts = {peer: judge(peer, mine, seen) for peer, seen in peers.items()}
    blamed = set(peers) if suspects is None else set(suspects)
    for peer in [] if suspects is None else blamed:
        kind, reason = verdicts[peer]
        if kind in (PeerVerdict.FINE, PeerVerdict.LEFT):
            verdicts[peer] = PeerVerdict.LATE, _late(peer, mine, peers[peer])
        elif kind is PeerVerdict.GAVE_UP:
            verdicts[peer] = PeerVerdict.FAILED, reason  # it gave up before it came, so it is the cause here
    kind = min((verdict for verdict, _ in verdicts.values()), default=PeerVerdict.FINE)
    culprits = tuple(sorted(peer for peer, (verdict, _) in verdicts.items() if verdict is kind))
    if kind is PeerVerdict.FINE:
        culprits = ()
    return Diagnosis(
        kind, culprits, tuple(verdicts[peer][1] for peer in culprits[:LISTED]), positions(rank, mine, peers, culprits)
    )


def not_arrived(channel: str, number: int, peers: Mapping[int, PeerStatus | None]) -> list[int]:
    """Return the ``peers`` that have not entered collective ``number`` of ``channel`` yet, as far as is known."""
    return [peer for peer, seen in peers.items() if seen is None or seen.record.collectives.of(channel) < number]


def judge(peer: int, mine: RankRecord, seen: PeerStatus | None) -> tuple[PeerVerdict, str]:
    """Return what is wrong with one peer, and a clause that says so."""
    if seen is None:
        return PeerVerdict.LATE, f"rank {peer} has not been heard of at all"
    record, who = seen.record, name(peer, mine, seen)
    entered, needed = record.counts.get(mine.outer, 0), mine.counts.get(mine.outer, 0)
    if record.failure is not None:
        reason = f"{who} failed in {record.failure.place} with {record.failure.error}"
        if not record.failure.secondary:
            return PeerVerdict.FAILED, reason
        if entered > needed or (entered == needed and record.failure.outer != mine.outer):
            now = f"then it failed in {record.failure.place}"
            return PeerVerdict.LEFT, f"{who} has left {of_step(mine.outer, mine.step)} without the others ({now})"
        return PeerVerdict.GAVE_UP, reason
    if record.ended:
        return PeerVerdict.GONE, f"{who} has ended: it left its process groups {record.place}"
    if seen.gone:
        why = {"ended": "its process has ended, ", "stopped": "its process is stopped, "}.get(seen.state or "", "")
        heard = max(seen.silent, seen.age)
        return PeerVerdict.GONE, f"{who} is gone: {why}last heard of {heard:.0f} s ago {record.place}"
    if entered < needed:
        return PeerVerdict.LATE, _late(peer, mine, seen)
    if entered > needed or mine.outer not in record.open:
        left = of_step(mine.outer, mine.step)
        now = f"now {record.place}" if record.inside else "now between phases"
        return PeerVerdict.LEFT, f"{who} has left {left} without the others ({now})"
    if mine.waiting and record.frame and not record.waiting:
        return PeerVerdict.LATE, _late(peer, mine, seen)  # in the same phase, but not in a collective
    return PeerVerdict.FINE, ""


def name(peer: int, mine: RankRecord, seen: PeerStatus) -> str:
    """Return ``"rank 3"``, or ``"rank 3 on node-b"`` if that is another host than the reader's."""
    host, here = (record.process.host if record.process else "" for record in (seen.record, mine))
    return f"rank {peer} on {host}" if host and host != here else f"rank {peer}"


def _late(peer: int, mine: RankRecord, seen: PeerStatus | None) -> str:
    if seen is None:
        return f"rank {peer} has not been heard of at all"
    return f"{name(peer, mine, seen)} has not come: {_spell(seen)}{f', at {seen.record.frame}' if seen.record.frame else ''}"


def _spell(seen: PeerStatus) -> str:
    return f"{seen.record.place} for {seen.record.seconds:.0f} s"


def positions(rank: int, mine: RankRecord, peers: Mapping[int, PeerStatus | None], culprits: Sequence[int] = ()) -> str:
    """Return ``"Ranks: 0 in grad reduce of step 3 for 8 s; 1 gone"``; at most :data:`LISTED` ranks, culprits before others."""
    order = [*culprits, *(number for number in sorted([rank, *peers]) if number not in set(culprits))]
    texts = []
    for number in sorted(order[:LISTED]):
        seen = PeerStatus(mine) if number == rank else peers[number]
        if seen is None:
            state = "not heard of"
        elif number == rank:
            state = _spell(seen)
        elif seen.record.failure is not None:
            state = f"failed in {seen.record.failure.place}"
        elif seen.record.ended:
            state = "ended"
        elif seen.gone:
            state = f"gone, last {seen.record.place}"
        else:
            state = _spell(seen)
        frame = seen.record.frame if seen is not None and not culprits else ""
        texts.append(f"{number} {state}{f', at {frame}' if frame else ''}")
    more = f"; and {len(order) - LISTED} more" if len(order) > LISTED else ""
    return f"Ranks: {'; '.join(texts)}{more}"


def shorten(text: str) -> str:
    """Return an error's text in one line of at most :data:`TEXT_LIMIT` characters."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_LIMIT else line[: TEXT_LIMIT - 3] + "..."
