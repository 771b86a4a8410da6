"""Every error that weightwire raises on purpose.

One hierarchy. Each class takes one message, which names the culprit, and survives pickling and :func:`to_json`, in which
errors travel from an engine to the trainer.
"""

from __future__ import annotations

from typing import Any


class WireError(Exception):
    """Base of all errors of weightwire."""


class ManifestError(WireError, ValueError):
    """A manifest, an offer or a seal is malformed, or is not about what there is: a tensor is missing, extra, or of another
    dtype or shape."""


class TransportError(WireError, RuntimeError):
    """A transport is unknown, cannot work here, or has failed."""


class GroupError(TransportError):
    """A group cannot be joined: there is none of that name, it has ended, or the place in it is taken."""


class PeerLostError(TransportError, ConnectionError):
    """A member of the group has failed or is gone; the message names it."""


class DeadlineError(TransportError, TimeoutError):
    """A member did not do in time what the others wait for; the message names it and says how far it is."""


class UpdateError(WireError, RuntimeError):
    """An update is not in the state that this call needs."""


class VersionError(UpdateError, ValueError):
    """The offered weights are not newer than those in force."""


class OwnerError(UpdateError):
    """Another owner's update is open."""


class DigestError(UpdateError):
    """What has arrived is not what was sent; the message names the buckets and the tensors in them."""


class CommitError(UpdateError):
    """The commit failed; the weights from before it are in force again."""


class NotServingError(CommitError):
    """The commit failed and the old weights could not be restored: the engine must not answer until a commit succeeds."""


class UnsupportedCallError(WireError, NotImplementedError):
    """The engine does not have this call of the contract."""


class SecretKeyError(WireError, ValueError):
    """There is no secret key, it is too short, or its file can be read by others; the message never holds the key."""


class AuthError(WireError, PermissionError):
    """A request or an answer was not signed with our key, is too old, or has been seen before."""


class AuthBusyError(AuthError):
    """More signed requests came than are remembered; nothing is wrong with this one, which may be sent again later."""


_CLASSES = {
    kind.__name__: kind
    for kind in (
        WireError,
        ManifestError,
        TransportError,
        GroupError,
        PeerLostError,
        DeadlineError,
        UpdateError,
        VersionError,
        OwnerError,
        DigestError,
        CommitError,
        NotServingError,
        UnsupportedCallError,
        SecretKeyError,
        AuthError,
        AuthBusyError,
    )
}


def to_json(error: WireError) -> dict[str, str]:
    """``{"error": class name, "message": text}``."""
    return {"error": type(error).__name__, "message": str(error)}


def from_json(data: Any, where: str = "") -> WireError:
    """The error that :func:`to_json` has told of; a :class:`WireError` if the class is not one of ours.

    Args:
        where: who told it; put in front of its message.
    """
    name, message = (data.get("error"), data.get("message")) if isinstance(data, dict) else (None, data)
    text = message if isinstance(message, str) else repr(message)
    kind = _CLASSES.get(name, WireError) if isinstance(name, str) else WireError
    return kind(f"{where}: {text}" if where else text)
