"""Removal of private data from text; all content of the bundle passes through here.

Two methods are combined. Identifiers of this machine (names of host and user, folders, values of environment variables) are
replaced everywhere. Text that only looks private (addresses, paths, identifiers) is replaced by a placeholder for its form.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import megascend
from megascend.surroundings import home

PUBLIC_VARIABLES = re.compile(
    r"^(ASCEND_\w*(LEVEL|DEVICES|BLOCKING)|HCCL_(?!.*IF)\w*|OMP_NUM_THREADS|PYTHON(WARNINGS|UNBUFFERED)|LANG|LC_\w+|TERM|SHLVL|"
    r"(SIMNPU|MEGASCEND_ACCEPTANCE)\w*|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_NPU_ALLOC_CONF|_)$"
)
"""Environment variables whose values may stay: settings that say nothing about a person, a machine or a network."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|SESSION", re.IGNORECASE)
SHORTEST, SHORTEST_SECRET = 8, 3
"""Values of environment variables shorter than this are words of the language; a secret's may be shorter."""

FORMS = {
    r"\b[\w.+-]+@[\w-]+(\.[\w-]+)+\b": "<email>",
    r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>)\]]+": "<url>",
    r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b": "<id>",
    r"\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b": "<mac>",
    r"(?<![\w:])([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}(?![\w:])": "<ip>",
    r"(?<![\w:])([0-9a-f]{1,4}:)*([0-9a-f]{1,4})?::([0-9a-f]{1,4}:)*[0-9a-f]{1,4}(?![\w:])": "<ip>",
    r"(?<![\w:])([0-9a-f]{1,4}:){1,6}:([0-9a-f]{1,4}:)*[0-9a-f]{1,4}(?![\w:])": "<ip>",
    r"(?<![\d.])(\d{1,3}\.){3}\d{1,3}(?![\d.])": "<ip>",
    r"\b[0-9a-f]{32,}\b": "<id>",
    r"(?<![\w.<>/])~?(/[\w.@+~%:=,-]+){2,}/?": "<path>",
    r"\b[a-z]:\\[^\s'\"]+": "<path>",
}
"""Regular expressions (case-insensitive) of text that looks private, and its replacement; applied in this order."""
COMPILED = [(re.compile(form, re.IGNORECASE), name) for form, name in FORMS.items()]


class Scrubber:
    """Replaces private data in text.

    Args:
        secrets: pairs of a text to remove everywhere and its replacement.
        roots: replacement names of code folders; paths below them are kept.
    """

    def __init__(self, secrets: Iterable[tuple[str, str]], roots: Mapping[str, str]) -> None:
        # The longest first: a home directory contains the user's name.
        self._roots = sorted(roots.items(), key=lambda item: -len(item[0]))
        by_length = sorted({(text, name) for text, name in secrets if text}, key=lambda item: -len(item[0]))
        self._secrets = [(_pattern(text), name) for text, name in by_length]

    def text(self, text: str) -> str:
        """Return ``text`` without private data."""
        for folder, name in self._roots:
            text = text.replace(f"{folder}/", f"<{name}> ")
        for pattern, name in self._secrets:
            text = pattern.sub(name, text)
        for pattern, name in COMPILED:
            text = pattern.sub(name, text)
        return text

    def value(self, value: Any) -> Any:
        """Return a JSON value without private data, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value


def _pattern(text: str) -> re.Pattern[str]:
    """Compile ``text`` as a case-insensitive pattern that matches whole words where it begins and ends with one."""
    before = r"(?<![A-Za-z0-9])" if text[0].isalnum() else ""
    after = r"(?![A-Za-z0-9])" if text[-1].isalnum() else ""
    return re.compile(before + re.escape(text) + after, re.IGNORECASE)


def machine_scrubber(environment: Mapping[str, str] = os.environ) -> Scrubber:
    """Build a scrubber of this machine's names, the user's names, and private environment values."""
    host = socket.gethostname()
    hosts = [host, environment.get("HOSTNAME", ""), environment.get("MASTER_ADDR", "")]
    hosts += [name.partition(".")[0] for name in hosts if not name[:1].isdigit()]
    names = [(name, "<host>") for name in hosts]
    users = {environment.get("USER", ""), environment.get("LOGNAME", ""), _user(), home().name} - {"root", ""}
    names += [(name, "<user>") for name in users]
    names += [(value, f"<{name}>") for name, value in environment.items() if is_private(name, value)]
    names += [(str(folder), "<path>") for folder in (home(), Path.cwd()) if len(folder.parts) > 1]
    roots = {
        str(Path(__file__).resolve().parents[3]): "megascend",
        str(Path(megascend.__file__).parents[1]): "megascend",
        sysconfig.get_path("purelib"): "site-packages",
        sysconfig.get_path("stdlib"): "python",
        sys.prefix: "python",
    }
    return Scrubber([(text, name) for text, name in names if text not in ("localhost", "")], roots)


def is_private(name: str, value: str) -> bool:
    """Check whether the value of an environment variable must be removed from the bundle."""
    if SECRET.search(name):
        return len(value) >= SHORTEST_SECRET
    return not PUBLIC_VARIABLES.match(name) and len(value) >= SHORTEST and not value.replace(".", "").isdigit()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return ""
