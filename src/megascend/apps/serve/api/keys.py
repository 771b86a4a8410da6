"""API keys and their tenants. Only SHA-256 digests of keys are kept."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from megascend.errors import ConfigError
from megascend.runtime.io.atomic import replacing
from megascend.runtime.io.paths import make_directory

VARIABLE = "MEGASCEND_API_KEYS"
PREFIX = "tml-"
"""Prefix that Tinker clients require."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Keys:
    """Lookup of tenants by key.

    Args:
        tenants: hexadecimal SHA-256 digest of a key to tenant name.
    """

    def __init__(self, tenants: Mapping[str, str]) -> None:
        if not tenants:
            raise ConfigError(f"no API keys: set {VARIABLE}, or name a file of digests (keys)")
        self._tenants = {bytes.fromhex(digest): name for digest, name in tenants.items()}

    def tenant(self, key: str | bytes) -> str | None:
        """Return the tenant of ``key``, or None, in constant time for any key."""
        digest = hashlib.sha256(key.encode("utf-8", "replace") if isinstance(key, str) else key).digest()
        owner = None
        for stored, name in self._tenants.items():  # no break: the time must not depend on which key matches
            if hmac.compare_digest(stored, digest):
                owner = name
        return owner


def key_digest(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Generate a random key that clients accept."""
    return PREFIX + secrets.token_urlsafe(32)


def parse_keys(text: str) -> dict[str, str]:
    """Parse ``MEGASCEND_API_KEYS``, comma-separated ``tml-...`` or ``NAME=tml-...``, into tenants by digest.

    The tenant of a key without a name is ``k`` and the first 12 digits of its digest, the same after a restart.
    """
    tenants: dict[str, str] = {}
    for number, entry in enumerate((part.strip() for part in text.split(",")), 1):
        if not entry:
            continue
        name, separator, key = entry.partition("=")
        if not separator or entry.startswith(PREFIX):
            name, key = "", entry
        if not key.startswith(PREFIX) or len(key) < 20:
            raise ConfigError(
                f"{VARIABLE}: key number {number} must begin with {PREFIX!r}, as clients demand, and have 20 characters or more"
            )
        _add(tenants, key_digest(key), name or f"k{key_digest(key)[:12]}", f"{VARIABLE}: key number {number}")
    return tenants


def read_keys(path: Path) -> dict[str, str]:
    """Read tenants by digest from a file with lines ``NAME SHA256``; ``#`` starts a comment."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys: {path} cannot be read: {error}") from None
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not _DIGEST.fullmatch(words[1].lower()):
            raise ConfigError(f"{path}:{number}: expected NAME and the SHA-256 of a key in 64 hexadecimal digits")
        _add(tenants, words[1].lower(), words[0], f"{path}:{number}")
    return tenants


def _add(tenants: dict[str, str], digest: str, name: str, source: str) -> None:
    if not _TENANT.fullmatch(name):
        raise ConfigError(f"{source}: {name!r} is not a valid tenant name: up to 64 letters, digits, '_' and '-'")
    if digest in tenants:
        raise ConfigError(f"{source}: this key occurs twice")
    tenants[digest] = name


def load_or_create(path: Path) -> tuple[dict[str, str], str | None]:
    """Read a key file, or create it with a new key, which is then returned as well.

    The key itself is not stored: it is printed once, at the first start.
    """
    if path.exists():
        return read_keys(path), None
    # The digest is on disk before the key is printed: a key that clients were given must be valid after a restart.
    key = new_key()
    make_directory(path.parent)
    with replacing(path, durable=True) as temporary:
        temporary.touch(0o600)
        temporary.write_text(f"local {key_digest(key)}\n", "utf-8")
    return read_keys(path), key
