"""What pydantic says about settings, as a user would be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, title: str, kind: type[BaseModel]) -> str:
    """A pydantic error as one readable message that names every key, its value and what was expected.

    Args:
        title: what the settings are of: a run file, or a class.
        kind: the class.
    """
    return f"{title}: " + "; ".join(_line(item, title, kind) for item in error.errors())


def _line(item: Mapping[str, Any], title: str, kind: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in item["loc"])
    said, found = item["msg"].removeprefix("Value error, "), item["input"]
    if item["type"] == "extra_forbidden":
        return f"{where or title}: unknown setting (value {found!r:.200}){_advice(item['loc'], kind)}"
    if item["type"] == "missing":
        return f"{where or title}: required, but not set"
    if item["type"] == "model_type":
        return f"{where or title}: a section of settings is expected here, or none at all (got {found!r:.200})"
    if item["type"] == "string_pattern_mismatch":  # of the one kind of text that has a pattern
        return f"{where or title}: the name of a module is expected here, like package.module (got {found!r:.200})"
    if isinstance(found, Mapping) and item["type"] == "value_error":  # a check over several settings, which names them
        section = where.rpartition(".")[2]
        return said if not where or said.startswith(section) else f"{where}: {said}"
    return f"{where or title}: {said} (got {found!r:.200})"


def _advice(location: Sequence[int | str], kind: type[BaseModel]) -> str:
    """The setting whose name is like that of one that is not known; of a section, otherwise all that it has."""
    *parents, unknown = (str(part) for part in location)
    names = _settings_below(kind, parents)
    alike = get_close_matches(unknown, names, n=1)
    if alike:
        return f", did you mean {'.'.join((*parents, alike[0]))}?"
    return f", {parents[-1]} has {', '.join(names)}" if parents and names else ""


def _settings_below(kind: type[BaseModel], parents: Sequence[str]) -> list[str]:
    """Names of the settings in the section that is reached by ``parents``; none if they lead to no section."""
    from pydantic import BaseModel

    for parent in parents:
        field = kind.model_fields.get(parent)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        sections = [each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)]
        if len(sections) != 1:
            return []
        (kind,) = sections
    return [*kind.model_fields]
