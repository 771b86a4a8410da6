"""Leases: an owner's right to an engine, which ends if the owner is silent for too long. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class Lease:
    """An owner's right to change an engine.

    Attributes:
        owner: its name.
        lease_s: seconds after the owner's last call when the lease ends.
        until: end of the lease, on the grantor's clock.
    """

    owner: str
    lease_s: float
    until: float

    def renew(self, now: float, lease_s: float | None = None) -> None:
        """Extend the lease to ``lease_s`` (default: its own length) from now; it never becomes shorter."""
        self.lease_s = self.lease_s if lease_s is None else lease_s
        # A late or reordered call with a short lease must not end a longer one.
        self.until = max(self.until, now + self.lease_s)

    def left_s(self, now: float) -> float:
        """Return the seconds until it ends; 0 if it has ended."""
        return max(0.0, self.until - now)
