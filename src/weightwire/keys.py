"""The secret key that the processes of one job share: loading, writing, and keeping it out of logs and pickles."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from weightwire.errors import SecretKeyError

ENVIRONMENT = "WEIGHTWIRE_KEY"
"""Variable that holds the key; with the suffix ``_FILE`` it holds the path of a file with the key."""
SHORTEST = 32
"""Minimum length of a key in characters; :func:`generate_key` returns 43 with 256 random bits."""
LONGEST = 1024


class Key:
    """A secret key, hidden from ``repr`` and refused by pickle.

    Args:
        text: the key as read from a file or a variable; surrounding white space is stripped.

    Raises:
        SecretKeyError: shorter than :data:`SHORTEST` characters, longer than :data:`LONGEST`, or not printable ASCII.
    """

    __slots__ = ("_secret",)

    def __init__(self, text: str) -> None:
        # Files end with a line break.
        text = text.strip()
        if not SHORTEST <= len(text) <= LONGEST:
            raise SecretKeyError(
                f"a key of {len(text)} characters; it must have {SHORTEST} to {LONGEST}: weightwire.keys.generate_key() makes one"
            )
        if not (text.isascii() and text.isprintable()):
            raise SecretKeyError("a key with characters that are not printable ASCII")
        self._secret = text.encode()

    def mac(self, purpose: str, text: str) -> str:
        """Return the HMAC-SHA256 of a text, 64 hexadecimal digits; ``purpose`` (no line break) separates domains."""
        return hmac.new(self._secret, f"{purpose}\n{text}".encode(), "sha256").hexdigest()

    def bearer_token(self, purpose: str) -> str:
        """Return a token for callers that cannot sign. It permits calls, but reveals neither signatures nor the key."""
        return self.mac("weightwire bearer 1", purpose)

    def __repr__(self) -> str:
        return "Key(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a key is not pickled: give the other process the name of its file, or the environment variable"
        )

    def __copy__(self) -> Key:
        return self

    def __deepcopy__(self, memo: object) -> Key:
        return self


def load_key(key: str | Key | None = None, *, file: str | Path | None = None) -> Key:
    """Return the key from the first of: argument, file, variable :data:`ENVIRONMENT`, file named by that with ``_FILE``.

    Args:
        file: readable only by its owner (mode 0600 or 0400), as :func:`write_key` creates it.

    Raises:
        SecretKeyError: both ``key`` and ``file`` were passed, none of the four is set, or the key or its file is unfit.
    """
    if key is not None and file is not None:
        raise SecretKeyError("both key= and file= were passed: pass one of them")
    if key is not None:
        return key if isinstance(key, Key) else Key(key)
    if file is not None:
        return read_key(file)
    if text := os.environ.get(ENVIRONMENT):
        return Key(text)
    if name := os.environ.get(f"{ENVIRONMENT}_FILE"):
        return read_key(name)
    raise SecretKeyError(
        f"no key: pass key= or file=, or set {ENVIRONMENT} or {ENVIRONMENT}_FILE; weightwire.keys.write_key(PATH) makes a file"
    )


def read_key(path: str | Path) -> Key:
    """Read the key from a file that is owned by this user or root and readable only by its owner.

    Raises:
        SecretKeyError: the file is missing, not regular, another user's, open to others, or does not contain a key.
    """
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise SecretKeyError(f"the key's file {path} cannot be read: {error.strerror}") from error
    with stream:
        # The status of the open file: the path may be replaced between a check and the read.
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SecretKeyError(f"the key's file {path} is not a regular file")
        if status.st_uid not in (os.getuid(), 0):
            raise SecretKeyError(
                f"the key's file {path} belongs to user {status.st_uid}, not to this one ({os.getuid()})"
            )
        if mode := stat.S_IMODE(status.st_mode) & 0o077:
            raise SecretKeyError(f"the key's file {path} is open to others (mode bits {mode:03o}): chmod 600 {path}")
        # A bound: the path may be of something large.
        content = stream.read(LONGEST + 64)
    try:
        return Key(content.decode("ascii"))
    except UnicodeDecodeError:
        raise SecretKeyError(f"the key's file {path} holds bytes that are not ASCII") from None
    except SecretKeyError as error:
        raise SecretKeyError(f"{path}: {error}") from None


def generate_key() -> str:
    """Return the text of a new key: 256 random bits in 43 characters."""
    return secrets.token_urlsafe(32)


def write_key(path: str | Path) -> Key:
    """Write a new key to a new file of mode 0600.

    Raises:
        FileExistsError: the file exists; a key in use is not replaced.
    """
    text = generate_key()
    # The mode is set at the creation: a chmod afterwards would leave the key readable for a moment.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text + "\n")
    return Key(text)
