"""Errors that weightwire raises on purpose.

One hierarchy, of two kinds. Each class takes one message, which names the member at fault, and survives pickling and
:func:`to_json`, the form in which errors travel from an engine to the trainer.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal


class WireError(Exception):
    """Base of all errors of weightwire.

    Attributes:
        kind: ``refused``: the same call would be refused again; ``lost``: a process is gone, too slow, or has failed at it, and
            another one, or the same one later, may take it.
    """

    kind: ClassVar[Literal["refused", "lost"]] = "refused"


class ManifestError(WireError, ValueError):
    """A manifest, an offer or a seal is malformed or does not match the tensors: one is missing, extra, or of another dtype or
    shape."""


class PlanError(WireError, ValueError):
    """A sharded update cannot be planned, or a plan does not bring what a worker needs; the message names the tensors."""


class TransportError(WireError, RuntimeError):
    """A transport is unknown, cannot work here, or has failed."""


class GroupError(TransportError):
    """A group cannot be joined: the name is unknown, it has ended, or the rank is taken."""


class PeerLostError(TransportError, ConnectionError):
    """A member of the group has failed or is gone; the message names it."""

    kind = "lost"


class DeadlineError(TransportError, TimeoutError):
    """A member missed a deadline; the message names it and its progress."""

    kind = "lost"


class UpdateError(WireError, RuntimeError):
    """An update is not in the state that this call needs."""

    kind = "lost"


class VersionError(UpdateError, ValueError):
    """The offered weights are not newer than the active ones."""

    kind = "refused"


class BaseError(UpdateError):
    """Differences from a version are offered that is not kept here; a complete update is possible."""

    kind = "refused"


class OwnerError(UpdateError):
    """Another owner's update is open."""

    kind = "refused"


class DigestError(UpdateError):
    """Received bytes differ from those sent; the message names the buckets and their tensors."""


class CommitError(UpdateError):
    """The commit failed; the weights from before it are active again."""


class NotServingError(CommitError):
    """The commit failed and the old weights could not be restored: the engine must not answer until a commit succeeds."""


class UnsupportedCallError(WireError, NotImplementedError):
    """The engine does not have this call of the contract."""


class SecretKeyError(WireError, ValueError):
    """The secret key is missing, too short, or its file is readable by others; the message never contains the key."""


class AuthError(WireError, PermissionError):
    """A request or an answer was not signed with our key, is too old, or has been seen before."""


class AuthBusyError(AuthError):
    """More signed requests arrived than nonces can be remembered; this one is valid and may be sent again later."""


class InstanceError(AuthError):
    """A request was signed with our key for another server, or for this one before its restart; it had no effect.

    Attributes:
        nonce: of the request, with which the refusal is signed.
    """

    def __init__(self, message: str, nonce: str = "") -> None:
        super().__init__(message)
        self.nonce = nonce


_CLASSES = {name: kind for name, kind in vars().items() if isinstance(kind, type) and issubclass(kind, WireError)}


def to_json(error: WireError) -> dict[str, str]:
    """Return ``{"error": class name, "message": text}``."""
    return {"error": type(error).__name__, "message": str(error)}


def from_json(data: Any, source: str = "") -> WireError:
    """Rebuild an error from :func:`to_json`; a :class:`WireError` if its class is not one of ours.

    Args:
        source: put in front of the message.
    """
    name, message = (data.get("error"), data.get("message")) if isinstance(data, dict) else (None, data)
    text = message if isinstance(message, str) else repr(message)
    kind = _CLASSES.get(name, WireError) if isinstance(name, str) else WireError
    return kind(f"{source}: {text}" if source else text)
