"""Rules: settings that contradict each other or that an engine, a provider or a model does not support, in tables.

Docs and tests read the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from megascend.errors import ConfigError


class Subject(Protocol):
    """What rules are evaluated on: it has an entry for every setting."""

    def __getitem__(self, key: str, /) -> Any: ...


S = TypeVar("S", bound=Subject)


@dataclass(frozen=True)
class Rule(Generic[S]):
    """A setting that is refused.

    Attributes:
        text: ``KEY: BECAUSE; REMEDY`` or ``KEY with WHAT: BECAUSE; REMEDY``: the key of a setting, what it does not work with,
            the reason, and what to set instead. It may have entries of the subject in braces.
        when: decides whether a subject is refused.
    """

    text: str
    when: Callable[[S], bool]

    def message(self, subject: S) -> str:
        """Return the one sentence that a user reads: the text, with the value of the setting after its key."""
        key = re.split("[ :]", self.text, maxsplit=1)[0]
        return f"{key}{_value(subject[key])}{self.text.removeprefix(key).format_map(subject)}"


def enforce(rules: Iterable[Rule[S]], subject: S) -> None:
    """Raise ConfigError with the message of the first rule that refuses ``subject``."""
    for rule in rules:
        if rule.when(subject):
            raise ConfigError(rule.message(subject))


def _value(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _value(value[0] if value and isinstance(value[0], BaseModel) else ", ".join(map(str, value)) or "[]")
    if isinstance(value, (BaseModel, Mapping)):  # a section
        return ""
    if value is None or isinstance(value, bool):
        return f": {'null' if value is None else str(value).lower()}"
    return f": {value:g}" if isinstance(value, float) else f": {value!s:.40}" if value != "" else ": ''"
