"""The frame that each rank sends first in every object collective: its position, in a fixed size. Pure.

All collectives of a group begin with the same exchange of frames, whatever their kind. Ranks that are out of step still complete
it, see each other's positions and raise; an object that fits into the frame needs no second round.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from hashlib import blake2b

from megascend import errors
from megascend.errors import MegascendError, OutOfStepError
from megascend.runtime.distributed.deadlock import Pending

SIZE = 1024
"""Bytes of a frame."""
MAGIC = b"msc1"
MAX_LISTED = 8
"""Maximum number of positions that a message lists."""

# Magic; the part that must be equal on all ranks (number, step, digests of call and kind); flags and lengths.
_HEAD = struct.Struct("<4s q q 8s 8s ? ? I H H")
_EQUAL = slice(4, 4 + 8 + 8 + 8 + 8)
_STRAY = struct.calcsize("<4s q q 8s 8s ?")
"""Offset of the flag of a stray frame."""
_SEPARATOR = "\x1f"  # ASCII unit separator: does not occur in names, paths or messages
_LIMITS = {"kind": 80, "group": 20, "purpose": 260, "phase": 60}
"""Maximum characters of each text in a frame. Ranks compare digests of the full texts, so cutting loses no difference."""


@dataclass(frozen=True)
class Position:
    """A rank's position in the sequence of object collectives.

    Attributes:
        kind: the collective and the parameters that must be equal: ``"all_reduce_numbers, sum of 3"``.
        group: name of the group it is called on.
        number: number of this collective in the group, from 1.
        step: the current optimizer step, from 1.
        purpose: the call it belongs to, with the arguments that must be equal: ``"save 'checkpoints/step-100'"``.
        phase: the phase around it, used in messages only.
        refusal: class and text of the error because of which this rank cannot take part.
    """

    kind: str
    group: str
    number: int
    step: int
    purpose: str = ""
    phase: str = ""
    refusal: tuple[str, str] | None = None

    def __str__(self) -> str:
        position = f"{self.kind}, collective {self.number} of {self.group}, step {self.step}"
        name = self.purpose or self.phase or "an unnamed call"
        repeated = self.purpose.startswith(self.phase.partition(" ")[0])  # "save('a') inside save" would repeat itself
        inside = f" inside {self.phase}" if self.purpose and not repeated else ""
        refused = f", where it raised {self.refusal[0]}: {self.refusal[1]}" if self.refusal else ""
        return f"{name}{inside} ({position}){refused}"


@dataclass(frozen=True)
class Frame:
    """One rank's decoded frame.

    Attributes:
        length: size of its object in bytes.
        content: the object, if it fits into the frame; else empty.
        stray: the rank waits in a collective of another group; see :func:`encode`.
    """

    position: Position
    length: int
    content: bytes
    stray: bool = False

    @property
    def complete(self) -> bool:
        """Check whether the whole object is in the frame."""
        return len(self.content) == self.length


def encode(position: Position, content: bytes, *, stray: bool = False) -> bytes:
    """Return the frame of a rank at ``position`` whose object is ``content``: :data:`SIZE` bytes.

    Args:
        stray: the rank waits in a collective of another group than the one that exchanges this frame.
    """
    refusal = position.refusal
    texts = [getattr(position, name)[:limit] for name, limit in _LIMITS.items()] + list(refusal or ())
    # May cut a UTF-8 character in two; decode() replaces the broken bytes.
    text = _SEPARATOR.join(texts).encode()[: SIZE - _HEAD.size]
    inside = content if len(content) <= SIZE - _HEAD.size - len(text) else b""
    call = _digest(f"{position.group}{_SEPARATOR}{position.purpose}")
    head = _HEAD.pack(
        MAGIC,
        position.number,
        position.step,
        call,
        _digest(position.kind),
        refusal is not None,
        stray,
        len(content),
        len(text),
        len(inside),
    )
    return (head + text + inside).ljust(SIZE, b"\0")


def decode(frame: bytes) -> Frame | None:
    """Decode a frame of :func:`encode`; None if the bytes are not one."""
    magic, number, step, _, _, refused, stray, length, text_size, inside = _HEAD.unpack_from(frame)
    if magic != MAGIC:
        return None
    start = _HEAD.size + text_size
    position = _position(number, step, frame[_HEAD.size : start], refused)
    return Frame(position, length, frame[start : start + inside], stray)


@lru_cache(maxsize=64)  # most ranks are at the same position
def _position(number: int, step: int, text: bytes, refused: bool) -> Position:
    # The two empty strings replace a refusal that did not fit.
    kind, group, purpose, phase, *rest = (*text.decode(errors="replace").split(_SEPARATOR), "", "")
    return Position(kind, group, number, step, purpose, phase, (rest[0], rest[1]) if refused else None)


def aligned_frames(frames: Sequence[bytes], ranks: Sequence[int], rank: int) -> list[Frame]:
    """Decode the frames of all ranks of a group, which must be at the same position.

    Raises:
        OutOfStepError: the positions differ. Every rank of the group raises it, with the same positions.
        MegascendError: the positions are equal, but a rank refuses: an error of the class of that rank's error.
    """
    decoded = [decode(frame) for frame in frames]
    strangers = [number for number, frame in zip(ranks, decoded, strict=True) if frame is None]
    valid = [frame for frame in decoded if frame is not None]
    if strangers:
        raise OutOfStepError(
            f"rank {rank}: data from {_ranks(strangers)} is not a frame of an object collective; other code uses the same group"
        )
    equal = {frame[_EQUAL] for frame in frames}
    refusing = [number for number, frame in zip(ranks, valid, strict=True) if frame.position.refusal]
    if len(equal) == 1 and not refusing:
        return valid
    # Without the digest of the kind (the last 8 bytes): a rank may refuse a call before it knows which collective follows.
    calls = {frame[_EQUAL][:-8] for frame in frames}
    if refusing and len(calls) == 1:
        refusal = valid[list(ranks).index(refusing[0])].position.refusal
        assert refusal is not None
        raise _rebuild_error(refusing[0], *refusal)
    positions = describe({number: frame.position for number, frame in zip(ranks, valid, strict=True)})
    raise OutOfStepError(
        f"rank {rank}: the ranks are out of step: {positions}; make the same calls in the same order on all ranks, with "
        "matching arguments; nothing was exchanged"
    )


def encode_stray(position: Position, pending: Sequence[Pending]) -> bytes:
    """Return the frame with which a rank at ``position`` releases another group; ``pending``: all collectives in the deadlock."""
    return encode(position, json.dumps([astuple(collective) for collective in pending]).encode(), stray=True)


def pending_of(frames: Sequence[bytes]) -> list[Pending]:
    """Return the collectives in deadlock that stray frames list."""
    pending: dict[Pending, None] = {}
    # By the flag first: stray frames are rare, and a large world has many others in every step.
    for frame in (decode(frame) for frame in frames if frame[_STRAY]):
        if frame is not None and frame.stray and frame.content:
            pending |= dict.fromkeys(Pending(*fields) for fields in json.loads(frame.content))
    return list(pending)


def describe(positions: dict[int, Position]) -> str:
    """Return ``"rank 0 is in save ...; ranks 1, 2 are in forward_backward ..."``."""
    ranks_by_position: dict[str, list[int]] = {}
    for rank, position in sorted(positions.items()):
        ranks_by_position.setdefault(str(position), []).append(rank)
    parts = [
        f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {text}" for text, ranks in ranks_by_position.items()
    ]
    suffix = f"; and {len(parts) - MAX_LISTED} other positions" if len(parts) > MAX_LISTED else ""
    return "; ".join(parts[:MAX_LISTED]) + suffix


def _rebuild_error(rank: int, name: str, text: str) -> MegascendError:
    """Rebuild the error that another rank has raised, as one of the same class."""
    # Looked up by name, not unpickled: any megascend error can be rebuilt from its text, and `name` came over the wire,
    # so it may be any other name of the module.
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, MegascendError)):
        kind = MegascendError
    return kind(text if text.startswith("rank ") else f"rank {rank}: {text}")


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(str(rank) for rank in ranks[:16]) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
