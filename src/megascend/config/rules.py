"""Rules: what an engine, a provider or a model's implementation does not support, as tables that docs and tests read."""

from __future__ import annotations

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
    """A setting that is refused. Its texts may have entries of the subject in braces.

    Attributes:
        setting: ``KEY with WHAT``: the key of a setting, and what it does not work with.
        when: decides whether a subject is refused.
        because: reason.
        remedy: what to set instead.
    """

    setting: str
    when: Callable[[S], bool]
    because: str
    remedy: str

    def message(self, subject: S) -> str:
        """Return the one sentence that a user reads: ``KEY: value with WHAT: because; remedy``."""
        key, _, rest = self.setting.partition(" ")
        text = f"{rest}: {self.because}; {self.remedy}".format_map(_Entries(subject))
        return f"{key}{_value(subject[key])} {text}"


def enforce(rules: Iterable[Rule[S]], subject: S) -> None:
    """Raise ConfigError with the message of the first rule that refuses ``subject``."""
    for rule in rules:
        if rule.when(subject):
            raise ConfigError(rule.message(subject))


def _value(value: Any) -> str:
    if isinstance(value, (BaseModel, Mapping)):  # a section
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f": {', '.join(map(str, value))}"
    if value is None or isinstance(value, bool):
        return f": {'null' if value is None else str(value).lower()}"
    return f": {value:g}" if isinstance(value, float) else f": {value}"


class _Entries(dict[str, Any]):
    """A subject as ``str.format_map`` reads it."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject

    def __missing__(self, key: str) -> Any:
        return self._subject[key]
