"""What the trainer tells an engine about an update, by an authenticated request: the offer before it, the seal after it.

Both are JSON, read as from a stranger. The store's address travels in the offer and nowhere else; the digests of what was sent
travel in the seal, not beside the bytes that they are to prove.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightwire import PROTOCOL
from weightwire.errors import ManifestError
from weightwire.manifest import MOST_BUCKETS, Manifest, exactly

MOST_MEMBERS = 4096
MOST_OPTIONS_JSON = 65536
MOST_SECONDS = 86400.0


@dataclass(frozen=True)
class Offer:
    """An update that an engine is asked to receive.

    Attributes:
        update: names the update in all later calls; also the name of its group.
        owner: who offers it; an engine has one owner at a time.
        host, port: of the listener where the group meets.
        first: rank in the group of the engine's first worker; worker ``w`` is member ``first + w``.
        workers: how many members the engine is.
        transport, options: how the bytes travel.
        timeout_s: deadline of each wait during the transfer, in seconds.
        lease_s: what was received is dropped when no call has concerned it for so long.
        manifest: what it consists of.
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

    def __post_init__(self) -> None:
        for name in ("update", "owner", "host", "transport"):
            _text(getattr(self, name), f"offer: {name}")
        _whole(self.port, 1, 65535, "offer: port")
        _whole(self.first, 1, MOST_MEMBERS, "offer: first")
        _whole(self.workers, 1, MOST_MEMBERS, "offer: workers")
        for name in ("timeout_s", "lease_s"):
            _seconds(getattr(self, name), f"offer: {name}")
        if not isinstance(self.options, Mapping):
            raise ManifestError("offer: options is no mapping")

    def rank(self, worker: int) -> int:
        """The member of the group that the engine's worker ``worker`` (from 0 on) is.

        Raises:
            ManifestError: the offer is for fewer workers.
        """
        if not 0 <= worker < self.workers:
            raise ManifestError(f"offer {self.update}: it is for {self.workers} workers, and this is worker {worker}")
        return self.first + worker

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "protocol": PROTOCOL,
            "update": self.update,
            "owner": self.owner,
            "host": self.host,
            "port": self.port,
            "first": self.first,
            "workers": self.workers,
            "transport": self.transport,
            "options": dict(self.options),
            "timeout_s": self.timeout_s,
            "lease_s": self.lease_s,
            "manifest": self.manifest.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Offer:
        """The offer of :meth:`to_json`, from a stranger.

        Raises:
            ManifestError: it is malformed, or of another version of weightwire's protocol.
        """
        fields = dict(_of_this_protocol(data, "offer"))
        names = ("update", "owner", "host", "port", "first", "workers", "transport", "options", "timeout_s", "lease_s")
        fields = dict(exactly(fields, (*names, "manifest"), "offer"))
        fields["manifest"] = Manifest.from_json(fields["manifest"])
        try:
            size = len(json.dumps(fields["options"], allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ManifestError(f"offer: options are no JSON: {error}") from None
        if size > MOST_OPTIONS_JSON:
            raise ManifestError(f"offer: options of {size} characters")
        return cls(**fields)


@dataclass(frozen=True)
class Seal:
    """What was sent, said when all of it was.

    Attributes:
        update: of the offer.
        version: of the manifest.
        manifest: :attr:`weightwire.manifest.Manifest.identity`.
        digests: of each bucket, in order, by the manifest's algorithm.
    """

    update: str
    version: int
    manifest: str
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        _text(self.update, "seal: update")
        _text(self.manifest, "seal: manifest")
        _whole(self.version, 0, 2**62, "seal: version")
        for digest in self.digests:
            _text(digest, "seal: digest")

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "protocol": PROTOCOL,
            "update": self.update,
            "version": self.version,
            "manifest": self.manifest,
            "digests": list(self.digests),
        }

    @classmethod
    def from_json(cls, data: Any) -> Seal:
        """The seal of :meth:`to_json`, from a stranger.

        Raises:
            ManifestError: it is malformed, or of another version of weightwire's protocol.
        """
        fields = dict(exactly(_of_this_protocol(data, "seal"), ("update", "version", "manifest", "digests"), "seal"))
        if not isinstance(fields["digests"], list) or len(fields["digests"]) > MOST_BUCKETS:
            raise ManifestError("seal: digests is not a list, or too long")
        fields["digests"] = tuple(fields["digests"])
        return cls(**fields)


def _of_this_protocol(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ManifestError(f"{what}: a mapping was expected, not {type(data).__name__}")
    protocol = data.get("protocol")
    if type(protocol) is not int or protocol != PROTOCOL:  # True and 1.0 are equal to 1
        raise ManifestError(
            f"{what}: protocol {protocol!r:.40}, and this side speaks {PROTOCOL}: install the same weightwire on both"
        )
    return {name: value for name, value in data.items() if name != "protocol"}


def _text(value: Any, what: str) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable():
        raise ManifestError(f"{what} is {value!r:.80}")


def _whole(value: Any, least: int, most: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ManifestError(f"{what} is {value!r:.80}, not a number from {least} to {most}")


def _seconds(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ManifestError(f"{what} is {value!r:.80}, not a number of seconds")
    if not 0 < value <= MOST_SECONDS:
        raise ManifestError(f"{what} is {value!r:.80}; more than 0 and at most {MOST_SECONDS:g} is possible")
