"""Identify the ranks that blocked a collective from every rank's last published record. Pure: no store, no clock.

A rank publishes a :class:`RankRecord` about once a second. A reader turns the records of its peers into
:class:`PeerStatus` objects, which add how long each peer has been silent, and :func:`diagnose` names the culprits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum

from megascend.runtime.diagnostics.collective_sequence import CollectiveCounts
from weightwire.liveness import Identity

SILENT_S = 3.0
"""Seconds without a new heartbeat after which a rank counts as gone, unless its process is known to run; heartbeats are sent
every second. Large worlds wait longer (:class:`megascend.runtime.diagnostics.survey.Pace`)."""
MAX_LISTED = 16
"""Maximum number of ranks whose positions a message lists."""
TEXT_LIMIT = 400
"""Maximum number of characters of another rank's error that a message repeats."""


@dataclass(frozen=True)
class PhaseFailure:
    """An exception that left a phase.

    Attributes:
        phase: the phase that it left, with its step.
        outer: the outermost phase around it.
        error: class and text.
        secondary: the error is a consequence of another rank's failure or absence.
    """

    phase: str
    outer: str
    error: str
    secondary: bool


@dataclass(frozen=True)
class RankRecord:
    """A rank's published state.

    Attributes:
        heartbeat: sequence number of the record; a rank whose number no longer advances is gone.
        step: number of the current optimizer step, from 1.
        label: the innermost phase that the rank is in, or was in last.
        inside: True while the rank is in that phase, False after it left.
        seconds: time in (or since) that phase when the record was written.
        outer: the outermost phase, by which ranks are compared: every rank enters it equally often.
        counts: number of entries into each outermost phase.
        collectives: object collectives that the rank has entered.
        open: outermost phases that the rank is in; several if it has background threads.
        frame: the current Python frame, if the rank has been in the phase for long; else "".
        waiting: the frame is inside ``torch.distributed``.
        clock: ``time.time()`` of the writer.
        failure: the exception that left the last phase; cleared when the rank enters another outermost phase, or when the
            enclosing phase completes without an error.
        ended: the rank has left its process groups, or its process is exiting.
        process: identity of the writing process, with its host name; None if unknown.
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
        # Compact separators: one process stores and serves the records of all ranks.
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
    def location(self) -> str:
        """Return ``"in grad reduce of step 3"``."""
        return f"{'in' if self.inside else 'after'} {phase_text(self.label, self.step)}"


@dataclass(frozen=True)
class PeerStatus:
    """A peer's last record and how long the reader has seen no new heartbeat.

    Attributes:
        silent: seconds since the reader last saw the heartbeat advance.
        age: age of the record in seconds, as far as the two hosts' clocks agree; used in messages only.
        state: ``running``, ``stopped`` or ``ended``, if the process is on this host and its state can be read.
        limit: seconds of silence after which it counts as gone.
    """

    record: RankRecord
    silent: float = 0.0
    age: float = 0.0
    state: str | None = None
    limit: float = SILENT_S

    @property
    def gone(self) -> bool:
        """Check whether the peer disappeared without publishing its end or a failure."""
        # A process on an overloaded machine, or one whose GIL is held by a long call, is silent for a while only.
        silent = (self.silent >= self.limit and self.state != "running") or self.state == "ended"
        return silent and not self.record.ended and self.record.failure is None

    @property
    def conclusive(self) -> bool:
        """Check whether the peer is to blame regardless of the other ranks' states."""
        failure = self.record.failure
        # A secondary failure is not conclusive: the rank that caused it may publish its own failure a moment later.
        return self.state == "ended" if failure is None else not failure.secondary


class PeerVerdict(IntEnum):
    """Kind of a peer's fault, by precedence: the lowest value among all peers is the cause, the others follow from it."""

    FAILED = 0
    GONE = 1
    LATE = 2
    LEFT = 3
    GAVE_UP = 4
    FINE = 5


LOST = (PeerVerdict.FAILED, PeerVerdict.GONE, PeerVerdict.GAVE_UP)
"""Kinds of a peer that will never join the collective."""


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a blocked collective.

    Attributes:
        kind: FINE if no rank could be blamed.
        culprits: ranks to blame.
        reasons: a clause for each culprit: ``"rank 1 is gone: last heard of 12 s ago in grad reduce of step 3"``.
        positions: current phase of every rank, in one line; with their Python frames if no rank could be blamed.
    """

    kind: PeerVerdict
    culprits: tuple[int, ...]
    reasons: tuple[str, ...]
    positions: str


def phase_text(label: str, step: int) -> str:
    """Return ``"grad reduce of step 3"``; the start-up precedes step counting, so it has no step."""
    return label if label == "start-up" else f"{label} of step {step}"


def diagnose(
    rank: int, local: RankRecord, peers: Mapping[int, PeerStatus | None], suspects: Iterable[int] | None = None
) -> Diagnosis:
    """Identify the ranks that block ``rank``.

    Args:
        local: this rank's record.
        peers: the other ranks' statuses; None for a rank that has never published a record.
        suspects: ranks known not to have joined the collective (default: derived from the records). They are blamed even
            if their records show nothing wrong.
    """
    verdicts = {peer: judge(peer, local, status) for peer, status in peers.items()}
    blamed = set(peers) if suspects is None else set(suspects)
    for peer in [] if suspects is None else blamed:
        kind, reason = verdicts[peer]
        # It did not join, whatever its record shows.
        if kind in (PeerVerdict.FINE, PeerVerdict.LEFT):
            verdicts[peer] = PeerVerdict.LATE, _describe_late(peer, local, peers[peer])
        elif kind is PeerVerdict.GAVE_UP:
            # It gave up before it joined this collective, so here it is the cause and not a consequence.
            verdicts[peer] = PeerVerdict.FAILED, reason
    kind = min((verdict for verdict, _ in verdicts.values()), default=PeerVerdict.FINE)
    culprits = tuple(sorted(peer for peer, (verdict, _) in verdicts.items() if verdict is kind))
    if kind is PeerVerdict.FINE:
        culprits = ()
    return Diagnosis(
        kind,
        culprits,
        tuple(verdicts[peer][1] for peer in culprits[:MAX_LISTED]),
        positions(rank, local, peers, culprits),
    )


def store_lost(address: str, blamed: Sequence[int] = ()) -> Diagnosis:
    """Return the diagnosis if the store of the records, at ``address`` as far as it is known, does not answer."""
    reason = (
        f"the store for the ranks' records does not answer; the process that serves it{address} is gone or overloaded, or the "
        "network to it is down"
    )
    return Diagnosis(PeerVerdict.GONE, tuple(blamed), (reason,), "The ranks' phases are unknown")


def not_arrived(channel: str, number: int, peers: Mapping[int, PeerStatus | None]) -> list[int]:
    """Return the ``peers`` whose published records show that they have not entered collective ``number`` of ``channel``."""
    return [peer for peer, status in peers.items() if status is None or status.record.collectives.of(channel) < number]


def judge(peer: int, local: RankRecord, status: PeerStatus | None) -> tuple[PeerVerdict, str]:
    """Return the verdict on one peer and a clause that explains it."""
    if status is None:
        return PeerVerdict.LATE, f"rank {peer} has sent no heartbeat"
    record, peer_name = status.record, name(peer, local, status)
    # Records are written at different times, but every rank enters an outermost phase equally often, so counts are comparable.
    entered, expected = record.counts.get(local.outer, 0), local.counts.get(local.outer, 0)
    if record.failure is not None:
        reason = f"{peer_name} failed in {record.failure.phase} with {record.failure.error}"
        if not record.failure.secondary:
            return PeerVerdict.FAILED, reason
        # The failure came after it had left the phase that this rank is still in.
        if entered > expected or (entered == expected and record.failure.outer != local.outer):
            now = f"then it failed in {record.failure.phase}"
            return (
                PeerVerdict.LEFT,
                f"{peer_name} has left {phase_text(local.outer, local.step)} without the others ({now})",
            )
        return PeerVerdict.GAVE_UP, reason
    if record.ended:
        return PeerVerdict.GONE, f"{peer_name} has ended: it left its process groups {record.location}"
    if status.gone:
        cause = {"ended": "its process has ended, ", "stopped": "its process is stopped, "}.get(status.state or "", "")
        # `silent` starts when the reader first looks, and `age` depends on the hosts' clocks: take the longer one.
        silence = max(status.silent, status.age)
        return PeerVerdict.GONE, f"{peer_name} is gone: {cause}last heard of {silence:.0f} s ago {record.location}"
    if entered < expected:
        return PeerVerdict.LATE, _describe_late(peer, local, status)
    if entered > expected or local.outer not in record.open:
        left = phase_text(local.outer, local.step)
        now = f"now {record.location}" if record.inside else "now between phases"
        return PeerVerdict.LEFT, f"{peer_name} has left {left} without the others ({now})"
    if local.waiting and record.frame and not record.waiting:
        # Same phase, but the peer's frame is outside torch.distributed: it computes or hangs before the collective.
        return PeerVerdict.LATE, _describe_late(peer, local, status)
    return PeerVerdict.FINE, ""


def name(peer: int, local: RankRecord, status: PeerStatus) -> str:
    """Return ``"rank 3"``, or ``"rank 3 on node-b"`` if the peer runs on another host than the reader."""
    host, local_host = (record.process.host if record.process else "" for record in (status.record, local))
    return f"rank {peer} on {host}" if host and host != local_host else f"rank {peer}"


def _describe_late(peer: int, local: RankRecord, status: PeerStatus | None) -> str:
    if status is None:
        return f"rank {peer} has sent no heartbeat"
    frame = f", at {status.record.frame}" if status.record.frame else ""
    silence = (
        f"; its process runs and has been silent for {status.silent:.0f} s" if status.silent >= status.limit else ""
    )
    return f"{name(peer, local, status)} has not arrived: {_describe_location(status)}{frame}{silence}"


def _describe_location(status: PeerStatus) -> str:
    return f"{status.record.location} for {status.record.seconds:.0f} s"


def positions(
    rank: int, local: RankRecord, peers: Mapping[int, PeerStatus | None], culprits: Sequence[int] = ()
) -> str:
    """Return ``"Ranks: 0 in grad reduce of step 3 for 8 s; 1 gone"``; at most :data:`MAX_LISTED` ranks, culprits first."""
    order = [*culprits, *(number for number in sorted([rank, *peers]) if number not in set(culprits))]
    texts = []
    for number in sorted(order[:MAX_LISTED]):
        status = PeerStatus(local) if number == rank else peers[number]
        if status is None:
            state = "not heard of"
        elif number == rank:
            state = _describe_location(status)
        elif status.record.failure is not None:
            state = f"failed in {status.record.failure.phase}"
        elif status.record.ended:
            state = "ended"
        elif status.gone:
            state = f"gone, last {status.record.location}"
        else:
            state = _describe_location(status)
        frame = status.record.frame if status is not None and not culprits else ""
        texts.append(f"{number} {state}{f', at {frame}' if frame else ''}")
    suffix = f"; and {len(order) - MAX_LISTED} more" if len(order) > MAX_LISTED else ""
    return f"Ranks: {'; '.join(texts)}{suffix}"


def shorten(text: str) -> str:
    """Return an error's text in one line of at most :data:`TEXT_LIMIT` characters."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_LIMIT else line[: TEXT_LIMIT - 3] + "..."
