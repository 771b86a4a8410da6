"""What pydantic says about settings, as a user would be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


def explain(error: ValidationError, title: str) -> str:
    """A pydantic error as one readable message that names every key, its value and what was expected.

    Args:
        title: what the settings are of: a run file, or a class.
    """
    return f"{title}: " + "; ".join(_line(item, title) for item in error.errors())


def _line(item: Mapping[str, Any], title: str) -> str:
    where = ".".join(str(part) for part in item["loc"])
    said, found = item["msg"].removeprefix("Value error, "), item["input"]
    if item["type"] == "extra_forbidden":
        return f"{where or title}: unknown setting (value {found!r:.200})"
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
