"""API keys and the tenants that they belong to. Keys are kept as SHA-256 digests only."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from megascend.errors import ConfigError
from megascend.io.atomic import replacing
from megascend.io.paths import make_directory

VARIABLE = "MEGASCEND_API_KEYS"
PREFIX = "tml-"
"""Clients refuse keys that begin with something else."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Keys:
    """Finds the tenant of a key.

    Args:
        tenants: by the SHA-256 digest of a key, in hexadecimal, the tenant's name.
    """

    def __init__(self, tenants: Mapping[str, str]) -> None:
        if not tenants:
            raise ConfigError(f"no API keys: set {VARIABLE}, or name a file of digests (keys)")
        self._tenants = {bytes.fromhex(digest): name for digest, name in tenants.items()}

    def tenant(self, key: str | bytes) -> str | None:
        """Name of the tenant that ``key`` belongs to, or None. Takes as long whichever key it is, and if it is none."""
        digest = hashlib.sha256(key.encode("utf-8", "replace") if isinstance(key, str) else key).digest()
        owner = None
        for known, name in self._tenants.items():
            if hmac.compare_digest(known, digest):
                owner = name
        return owner

    @property
    def tenants(self) -> list[str]:
        """Names of all tenants, sorted."""
        return sorted(set(self._tenants.values()))


def digest_of(key: str) -> str:
    """SHA-256 of a key in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Generate a random key that clients accept."""
    return PREFIX + secrets.token_urlsafe(32)


def of_text(text: str) -> dict[str, str]:
    """Read tenants by digest from ``MEGASCEND_API_KEYS``: ``tml-...`` or ``NAME=tml-...``, separated by commas.

    A key without a name is the tenant ``k`` and the first 12 digits of its digest, so that it stays the same tenant from one
    start to the next.

    Raises:
        ConfigError: a key does not begin with ``tml-``, is shorter than 20 characters, or is there twice. Keys are not repeated.
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
        _add(tenants, digest_of(key), name or f"k{digest_of(key)[:12]}", f"{VARIABLE}: key number {number}")
    return tenants


def of_file(path: Path) -> dict[str, str]:
    """Read tenants by digest from a file with lines ``NAME SHA256``; ``#`` begins a comment.

    Raises:
        ConfigError: it cannot be read, or a line is no such line.
    """
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


def _add(tenants: dict[str, str], digest: str, name: str, where: str) -> None:
    if not _TENANT.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is no name of a tenant: up to 64 letters, digits, '_' and '-'")
    if digest in tenants:
        raise ConfigError(f"{where}: this key is there twice")
    tenants[digest] = name


def made_once(path: Path) -> tuple[dict[str, str], str | None]:
    """Read a file as :func:`of_file` does, or write one with a new key, which is then returned beside its tenants.

    The key itself is nowhere: whoever started the server first was shown it.
    """
    if path.exists():
        return of_file(path), None
    key = new_key()
    make_directory(path.parent)
    with replacing(path, durable=True) as temporary:
        temporary.touch(0o600)
        temporary.write_text(f"local {digest_of(key)}\n", "utf-8")
    return of_file(path), key
