"""Taking private data out of text: whatever goes into the bundle passes here.

Two ways at once. What this machine is known by (names of host and user, folders, values of environment variables) is
replaced wherever it stands. What only looks private (addresses, paths, identifiers) is replaced by its form.
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
"""What looks private, as regular expressions (letters in any case), and what stands in its place; in this order."""
COMPILED = [(re.compile(form, re.IGNORECASE), name) for form, name in FORMS.items()]


class Scrubber:
    """Replaces private data in text.

    Args:
        secrets: texts to take out wherever they stand, with what stands there instead.
        roots: folders of code, by the name that stands in their place; what lies below them keeps its path.
    """

    def __init__(self, secrets: Iterable[tuple[str, str]], roots: Mapping[str, str]) -> None:
        # The longest first: a home directory contains the user's name.
        self._roots = sorted(roots.items(), key=lambda item: -len(item[0]))
        by_length = sorted({(text, name) for text, name in secrets if text}, key=lambda item: -len(item[0]))
        self._secrets = [(_pattern(text), name) for text, name in by_length]

    def text(self, text: str) -> str:
        """``text`` without private data."""
        for folder, name in self._roots:
            text = text.replace(f"{folder}/", f"<{name}> ")
        for pattern, name in self._secrets:
            text = pattern.sub(name, text)
        for pattern, name in COMPILED:
            text = pattern.sub(name, text)
        return text

    def value(self, value: Any) -> Any:
        """A JSON value without private data, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value


def _pattern(text: str) -> re.Pattern[str]:
    """``text`` as a whole word, where it begins and ends with one; in any case of letters."""
    before = r"(?<![A-Za-z0-9])" if text[0].isalnum() else ""
    after = r"(?![A-Za-z0-9])" if text[-1].isalnum() else ""
    return re.compile(before + re.escape(text) + after, re.IGNORECASE)


def of_this_machine(environment: Mapping[str, str] = os.environ) -> Scrubber:
    """A scrubber that knows this machine's names, this user's, and the values in its environment."""
    host = socket.gethostname()
    hosts = [host, environment.get("HOSTNAME", ""), environment.get("MASTER_ADDR", "")]
    hosts += [each.partition(".")[0] for each in hosts if not each[:1].isdigit()]
    names = [(each, "<host>") for each in hosts]
    users = {environment.get("USER", ""), environment.get("LOGNAME", ""), _user(), home().name} - {"root", ""}
    names += [(each, "<user>") for each in users]
    names += [(value, f"<{name}>") for name, value in environment.items() if is_private(name, value)]
    names += [(str(folder), "<path>") for folder in (home(), Path.cwd()) if len(folder.parts) > 1]
    roots = {
        str(Path(__file__).resolve().parents[2]): "megascend",
        str(Path(megascend.__file__).parents[1]): "megascend",
        sysconfig.get_path("purelib"): "site-packages",
        sysconfig.get_path("stdlib"): "python",
        sys.prefix: "python",
    }
    return Scrubber([(text, name) for text, name in names if text not in ("localhost", "")], roots)


def is_private(name: str, value: str) -> bool:
    """Is the value of an environment variable to be taken out wherever it stands?"""
    if SECRET.search(name):
        return len(value) >= SHORTEST_SECRET
    return not PUBLIC_VARIABLES.match(name) and len(value) >= SHORTEST and not value.replace(".", "").isdigit()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return ""
