"""Offer and seal: the trainer's authenticated messages to an engine before and after it sends an update.

Both are JSON and parsed as untrusted input. Only the offer contains the store's address; only the seal contains the digests,
which must not travel beside the bytes that they verify.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightwire import PROTOCOL
from weightwire.errors import ManifestError
from weightwire.manifest import MAX_BUCKETS, Manifest, check_size, exactly
from weightwire.plan import Share

MAX_MEMBERS = 4096
MAX_OPTIONS_JSON = 65536
MAX_SECONDS = 86400.0


@dataclass(frozen=True)
class Sharding:
    """The part of an offer that concerns a sharded update (:mod:`weightwire.plan`).

    Attributes:
        plan: identity of the plan.
        senders: number of trainer ranks, the first members of the group.
        shares: part of each of the engine's workers; None: the workers have them from an earlier offer with the same plan.
        base: version from which differences are sent; None: complete messages.
        keep: the workers keep what they have received after the commit, as the base of the next update.
    """

    plan: str
    senders: int
    shares: tuple[Share, ...] | None
    base: int | None = None
    keep: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "shares": None if self.shares is None else [share.to_json() for share in self.shares]}

    @classmethod
    def from_json(cls, data: Any, manifest: Manifest) -> Sharding:
        """Parse the untrusted output of :meth:`to_json`."""
        fields = dict(exactly(data, ("plan", "senders", "shares", "base", "keep"), "offer: sharded"))
        _check_text(fields["plan"], "offer: plan")
        _check_integer(fields["senders"], 1, MAX_MEMBERS, "offer: senders")
        if fields["base"] is not None:
            _check_integer(fields["base"], 0, 2**62, "offer: base")
        if type(fields["keep"]) is not bool:
            raise ManifestError(f"offer: keep must be true or false, got {fields['keep']!r:.40}")
        if fields["shares"] is not None:
            check_size(fields["shares"], list, MAX_MEMBERS, "offer: shares")
            fields["shares"] = tuple(Share.from_json(share, manifest.tensors) for share in fields["shares"])
            if foreign_plans := [share.plan for share in fields["shares"] if share.plan != fields["plan"]]:
                raise ManifestError(
                    f"offer: a share is of plan {foreign_plans[0]:.80}, the offer of plan {fields['plan']:.80}"
                )
        return cls(**fields)


@dataclass(frozen=True)
class Offer:
    """An update that an engine is asked to receive.

    Attributes:
        update: name of the update in all later calls, and of its group.
        owner: the trainer; an engine has one owner at a time.
        host, port: address of the group's listener.
        first: rank in the group of the engine's first worker; worker ``w`` has rank ``first + w``.
        workers: number of the engine's workers, each a member of the group.
        transport, options: transport and options of the transfer.
        timeout_s: deadline of each wait during the transfer, in seconds.
        lease_s: the update is dropped when no call has touched it for so many seconds.
        manifest: manifest of the tensors.
        sharded: set if every trainer rank sends its own slices; None: rank 0 sends whole tensors.
    """

    update: str
    owner: str
    host: str
    port: int
    first: int
    workers: int
    transport: str
    timeout_s: float
    lease_s: float
    manifest: Manifest
    options: Mapping[str, Any] = field(default_factory=dict)
    sharded: Sharding | None = None

    def __post_init__(self) -> None:
        # In the constructor, not in from_json: the trainer learns of its mistake before a request.
        for name in ("update", "owner", "host", "transport"):
            _check_text(getattr(self, name), f"offer: {name}")
        _check_integer(self.port, 1, 65535, "offer: port")
        _check_integer(self.first, 1, MAX_MEMBERS, "offer: first")
        _check_integer(self.workers, 1, MAX_MEMBERS, "offer: workers")
        for name in ("timeout_s", "lease_s"):
            _check_seconds(getattr(self, name), f"offer: {name}")
        if not isinstance(self.options, Mapping):
            raise ManifestError("offer: options is not a mapping")
        if self.sharded is not None and self.sharded.shares is not None and len(self.sharded.shares) != self.workers:
            raise ManifestError(f"offer: {len(self.sharded.shares)} shares for {self.workers} workers")

    def __str__(self) -> str:
        return f"update {self.update} of {self.manifest.target} to version {self.manifest.version}"

    def rank(self, worker: int) -> int:
        """Return the rank in the group of the engine's worker ``worker``, counted from 0."""
        if not 0 <= worker < self.workers:
            raise ManifestError(f"offer {self.update}: it is for {self.workers} workers, and this is worker {worker}")
        return self.first + worker

    def to_json(self) -> dict[str, Any]:
        # Left out where it is not used: engines of an earlier version refuse fields that they do not know.
        sharded = {} if self.sharded is None else {"sharded": self.sharded.to_json()}
        plain = {name: value for name, value in vars(self).items() if name != "sharded"}
        return {
            "protocol": PROTOCOL,
            **plain,
            "options": dict(self.options),
            "manifest": self.manifest.to_json(),
            **sharded,
        }

    @classmethod
    def from_json(cls, data: Any) -> Offer:
        """Parse the untrusted output of :meth:`to_json`."""
        fields = _check_protocol(data, "offer")
        sharded = fields.pop("sharded", None)
        fields = exactly(fields, tuple(name for name in cls.__dataclass_fields__ if name != "sharded"), "offer")
        fields["manifest"] = Manifest.from_json(fields["manifest"])
        fields["sharded"] = None if sharded is None else Sharding.from_json(sharded, fields["manifest"])
        try:
            # Options are free-form, so their size is the only bound on what a transport may be handed.
            size = len(json.dumps(fields["options"], allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ManifestError(f"offer: options are not valid JSON: {error}") from None
        if size > MAX_OPTIONS_JSON:
            raise ManifestError(f"offer: options of {size} characters; at most {MAX_OPTIONS_JSON} are possible")
        return cls(**fields)


@dataclass(frozen=True)
class Seal:
    """Digests of a sent update, which receivers compare with what arrived.

    Attributes:
        update: name of the offered update.
        version: version of the manifest.
        manifest: :attr:`weightwire.manifest.Manifest.identity`.
        digests: digest of each bucket, in order, by the manifest's algorithm; empty for a sharded update.
        by_member: digests of a sharded update: by rank in the group, those of the worker's chunks in the order in which it
            receives them.
    """

    update: str
    version: int
    manifest: str
    digests: tuple[str, ...]
    by_member: Mapping[int, tuple[str, ...]] | None = None

    def __post_init__(self) -> None:
        _check_text(self.update, "seal: update")
        _check_text(self.manifest, "seal: manifest")
        _check_integer(self.version, 0, 2**62, "seal: version")
        for digest in (*self.digests, *itertools.chain(*(self.by_member or {}).values())):
            _check_text(digest, "seal: digest")

    def to_json(self) -> dict[str, Any]:
        fields = {"protocol": PROTOCOL, **vars(self), "digests": list(self.digests)}
        if self.by_member is None:
            del fields["by_member"]
        else:
            fields["by_member"] = {str(rank): list(digests) for rank, digests in self.by_member.items()}
        return fields

    @classmethod
    def from_json(cls, data: Any) -> Seal:
        """Parse the untrusted output of :meth:`to_json`."""
        fields = _check_protocol(data, "seal")
        by_member = fields.pop("by_member", None)
        fields = dict(exactly(fields, ("update", "version", "manifest", "digests"), "seal"))
        check_size(fields["digests"], list, MAX_BUCKETS, "seal: digests")
        fields["digests"] = tuple(fields["digests"])
        return cls(**fields, by_member=None if by_member is None else _by_member(by_member))


def _by_member(data: Any) -> dict[int, tuple[str, ...]]:
    """Parse the untrusted digests of each member."""
    check_size(data, dict, MAX_MEMBERS, "seal: by_member")
    digests_by_rank = {}
    for rank, digests in data.items():
        if not isinstance(rank, str) or not rank.isdecimal() or len(rank) > 8:
            raise ManifestError(f"seal: by_member: {rank!r:.40} is not the rank of a member")
        check_size(digests, list, MAX_BUCKETS, f"seal: digests of member {rank}")
        digests_by_rank[int(rank)] = tuple(digests)
    return digests_by_rank


def _check_protocol(data: Any, label: str) -> dict[str, Any]:
    """Return a copy of ``data`` without its protocol version, which must be ours."""
    if not isinstance(data, dict):
        raise ManifestError(f"{label}: a mapping was expected, not {type(data).__name__}")
    # First of all: with another protocol, every other field may mean something else.
    protocol = data.get("protocol")
    if type(protocol) is not int or protocol != PROTOCOL:  # True and 1.0 are equal to 1
        raise ManifestError(
            f"{label}: protocol {protocol!r:.40}, and this side speaks {PROTOCOL}: install the same weightwire on both"
        )
    return {name: value for name, value in data.items() if name != "protocol"}


def _check_text(value: Any, label: str) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable():
        raise ManifestError(f"{label} is {value!r:.80}, not a printable text of 1 to 256 characters")


def _check_integer(value: Any, minimum: int, maximum: int, label: str) -> None:
    # bool is a subclass of int.
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise ManifestError(f"{label} is {value!r:.80}, not a number from {minimum} to {maximum}")


def _check_seconds(value: Any, label: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ManifestError(f"{label} is {value!r:.80}, not a number of seconds")
    if not 0 < value <= MAX_SECONDS:
        raise ManifestError(f"{label} is {value!r:.80}; more than 0 and at most {MAX_SECONDS:g} is possible")
