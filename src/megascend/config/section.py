"""The base class of all sections of settings, the kinds of numbers in them, and messages for pydantic's errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from megascend.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, title: str, kind: type[BaseModel]) -> str:
    """Return a pydantic error as one message that names every key, its value and what was expected; ``title``: file or class."""
    return f"{title}: " + "; ".join(_line(item, title, kind) for item in error.errors())


def _line(item: Mapping[str, Any], title: str, kind: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in item["loc"])
    said, found = item["msg"].removeprefix("Value error, "), item["input"]
    if item["type"] == "extra_forbidden":
        return f"{where or title}: unknown setting (value {found!r:.200}){_advice(item['loc'], kind)}"
    if item["type"] in ("tuple_type", "list_type") and isinstance(found, (str, int, float)):
        return (
            f"{where or title}: a list is expected here (got {found!r:.200}): write {where}: [{found}], "
            f"or --set {where}=[{found}]"
        )
    if found is None and item["type"] not in ("missing", "model_type", "value_error"):
        return f"{where or title}: a value is expected here, and there is none (empty, or null)"
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
    """Return the setting probably meant by an unknown one: its name elsewhere, alike here, alike there; else what there is."""
    *parents, unknown = (str(part) for part in location)
    names = _settings_below(kind, parents)
    elsewhere: dict[str, list[str]] = {}
    for path in _all_settings(kind):
        elsewhere.setdefault(path.rpartition(".")[2], []).append(path)
    own = [".".join((*parents, name)) for name in get_close_matches(unknown, names, 1)]
    very_like = bool(get_close_matches(unknown, names, 1, 0.75))
    others = [path for name in get_close_matches(unknown, elsewhere, 1, 0.73) for path in elsewhere[name]]
    meant = elsewhere.get(unknown) or (own if very_like else others or own)
    if meant:
        return f", did you mean {' or '.join(sorted(meant, key=lambda path: (path.count('.'), path))[:2])}?"
    return f", {parents[-1]} has {', '.join(names)}" if parents and names else ""


def _all_settings(kind: type[BaseModel], depth: int = 3) -> Iterator[str]:
    """Yield the full names of all settings of the sections within ``kind``."""
    for name in kind.model_fields:
        yield name
        if depth and (section := _section_of(kind, name)) is not None:
            yield from (f"{name}.{below}" for below in _all_settings(section, depth - 1))


def _settings_below(kind: type[BaseModel], parents: Sequence[str]) -> list[str]:
    """Return the names of the settings in the section that is reached by ``parents``; none if they lead to no section."""
    for parent in parents:
        section = _section_of(kind, parent)
        if section is None:
            return []
        kind = section
    return [*kind.model_fields]


def _section_of(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the class of the section that a setting is; None for a setting of another type."""
    from pydantic import BaseModel

    field = kind.model_fields.get(name)
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    sections = [each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)]
    return sections[0] if len(sections) == 1 else None


Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[int, Field(ge=1, le=366 * 24 * 3600)]
"""Of waiting: torch's clocks overflow far above a year."""
Seed = Annotated[int, Field(ge=0, lt=2**62)]
"""torch takes 63 bits, and Megatron adds some thousands for each rank."""


class _RaisesConfigError(type(BaseModel)):
    """Turns pydantic's error into ours where a user constructs a section; nested sections keep their key path."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls.__name__, cast("type[BaseModel]", cls))) from None


class Section(BaseModel, metaclass=_RaisesConfigError):
    """Base of all settings: immutable, strict about names, and one error class for whatever is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_it_is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic takes for something else: true for 1, nothing for the present directory."""
        wanted = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and "bool" not in wanted and ("int" in wanted or "float" in wanted):
            raise ValueError("a number is expected here, not true or false")
        if value == "" and "Path" in wanted:
            raise ValueError("a path is expected here, not an empty string")
        return value
