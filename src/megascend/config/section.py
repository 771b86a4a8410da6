"""Base class of settings sections, their number types, and messages for pydantic's errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import Self

from megascend.config.rules import Rule, enforce
from megascend.errors import ConfigError, redacted


def explain(error: ValidationError, title: str, kind: type[BaseModel]) -> str:
    """Format a pydantic error as one message with every key, its value and the expectation.

    Args:
        title: file or class that the values are for.
    """
    lines: dict[str, list[str]] = {}
    for item in _setting_errors(error.errors(), kind):
        key, line = ".".join(str(part) for part in item["loc"]), _line(item, title, kind)
        alternatives = lines.setdefault(key, [])
        if line not in alternatives:
            alternatives.append(line.removeprefix(f"{key}: ") if alternatives else line)
    return f"{title}: " + "; ".join("; or ".join(alternatives) for alternatives in lines.values())


def _setting_errors(errors: Sequence[Mapping[str, Any]], kind: type[BaseModel]) -> list[Mapping[str, Any]]:
    """Return pydantic's errors with the keys of a run file.

    A value that no type of a union accepts has an error for each type, whose name is part of the key. If a type accepts the value
    but not a part of it, only its errors are returned.
    """
    locations = [_location(item["loc"], kind) for item in errors]
    depths = {union: max(len(path) for path, other in locations if other == union) for _, union in locations if union}
    # A list is too short, too, if an item of it is wrong.
    incomplete = {path[:end] for path, _ in locations for end in range(len(path))}
    return [
        {**item, "loc": path}
        for item, (path, union) in zip(errors, locations, strict=True)
        if (union is None or len(path) == depths[union]) and not (item["type"] == "too_short" and path in incomplete)
    ]


def _location(
    location: Sequence[int | str], annotation: Any
) -> tuple[tuple[int | str, ...], tuple[int | str, ...] | None]:
    """Return an error's key without the names of a union's types, and the key of the union or None."""
    path: tuple[int | str, ...] = ()
    union = None
    for part in location:
        types = _types(annotation)
        if len(types) > 1:
            union = path
            annotation = next((member for member in types if str(part).startswith(_name(member))), None)
            continue
        path = (*path, part)
        container, arguments = types[0], get_args(types[0])
        if isinstance(container, type) and issubclass(container, BaseModel) and part in container.model_fields:
            annotation = container.model_fields[str(part)].annotation
        else:  # an item of a list or of a mapping
            annotation = arguments[get_origin(container) is dict] if arguments else None
    return path, union


def _types(annotation: Any) -> list[Any]:
    """Return the types of a union but None, or the only type of another annotation."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [argument for argument in get_args(annotation) if argument is not type(None)]
        return [kind for member in members for kind in _types(member)]
    return [annotation]


def _name(annotation: Any) -> str:
    """Return the begin of a type's name in pydantic's keys."""
    return getattr(get_origin(annotation) or annotation, "__name__", "").lower()


def _line(item: Mapping[str, Any], title: str, kind: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    # pydantic's prefix of messages from a validator.
    message, value = item["msg"].removeprefix("Value error, "), redacted(item["input"])
    if item["type"] == "extra_forbidden":
        return f"{key or title}: unknown setting (value {value!r:.200}){_advice(item['loc'], kind)}"
    # The most common mistake in YAML and on the command line: one value without brackets.
    if item["type"] in ("tuple_type", "list_type") and isinstance(value, (str, int, float)):
        return (
            f"{key or title}: a list is expected here (got {value!r:.200}): write {key}: [{value}], "
            f"or --set {key}=[{value}]"
        )
    # "key:" without a value is null in YAML.
    if value is None and item["type"] not in ("missing", "model_type", "value_error"):
        return f"{key or title}: a value is expected here, and there is none (empty, or null)"
    if item["type"] == "missing":
        return f"{key or title}: required, but not set"
    if isinstance(value, bool) and item["type"] in ("string_type", "path_type"):
        return f"{key or title}: text is expected here (got {value}): quote on, off, yes and no, which YAML reads as booleans"
    if item["type"] == "model_type":
        return f"{key or title}: a section of settings is expected here, or none at all (got {value!r:.200})"
    if item["type"] == "literal_error" and isinstance(value, str):
        # pydantic's text of the choices: 'fp32', 'fp16' or 'bf16'.
        choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        similar = get_close_matches(value, choices, 1)
        advice = f"; did you mean {similar[0]}?" if similar else ""
        return f"{key or title}: {message} (got {value!r:.200}{advice})"
    if item["type"] == "string_pattern_mismatch":  # PluginName is the only type with a pattern
        return f"{key or title}: a module is expected here, package.module or path/to/file.py (got {value!r:.200})"
    if isinstance(value, Mapping) and item["type"] == "value_error":  # from a rule, which names settings of its section
        return f"{key}.{message}" if key else message
    return f"{key or title}: {message} (got {value!r:.200})"


def _advice(location: Sequence[int | str], kind: type[BaseModel]) -> str:
    """Suggest settings for an unknown one: same name or alias, similar here, similar elsewhere; else list the section's."""
    *parents, unknown = (str(part) for part in location)
    names = _settings_below(kind, parents)
    elsewhere: dict[str, list[str]] = {}
    for path, field in _all_fields(kind):
        aliases = (alias for also in field.metadata if isinstance(also, Also) for alias in also.names)
        for name in (path.rpartition(".")[2], *aliases):
            elsewhere.setdefault(name, []).append(path)
    local = [".".join((*parents, name)) for name in get_close_matches(unknown, names, 1)]
    very_like = bool(get_close_matches(unknown, names, 1, 0.75))
    similar = [path for name in get_close_matches(unknown, elsewhere, 1, 0.73) for path in elsewhere[name]]
    suggestions = elsewhere.get(unknown) or (local if very_like else similar or local)
    if suggestions:
        return f", did you mean {' or '.join(sorted(suggestions, key=lambda path: (path.count('.'), path))[:2])}?"
    return f", {parents[-1]} has {', '.join(names)}" if parents and names else ""


def all_settings(kind: type[BaseModel]) -> Iterator[str]:
    """Yield the full names of all settings of the sections within ``kind``."""
    yield from (name for name, _ in _all_fields(kind))


def all_rules(kind: type[Section], prefix: str = "") -> Iterator[tuple[str, Rule[Any]]]:
    """Yield the rules of a section and of those within it, each with the prefix of its settings' names."""
    yield from ((prefix, rule) for rule in kind.rules)
    for name in kind.model_fields:
        if (section := section_of(kind, name)) is not None and issubclass(section, Section):
            yield from all_rules(section, f"{prefix}{name}.")


def _all_fields(kind: type[BaseModel], depth: int = 3) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in kind.model_fields.items():
        yield name, field
        if depth and (section := section_of(kind, name)) is not None:
            yield from ((f"{name}.{below}", inner) for below, inner in _all_fields(section, depth - 1))


def _settings_below(kind: type[BaseModel], parents: Sequence[str]) -> list[str]:
    """Return the names of the settings in the section at ``parents``; none if there is no such section."""
    for parent in parents:
        section = section_of(kind, parent)
        if section is None:
            return []
        kind = section
    return [*kind.model_fields]


def section_of(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the class of a setting that is a section; None for a setting of another type, a list of sections among them."""
    field = kind.model_fields.get(name)
    if field is None or get_origin(field.annotation) in (list, tuple):
        return None
    return section_in(field.annotation)


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the class of the one section among an annotation and its members."""
    kinds = (annotation, *get_args(annotation))
    sections = [candidate for candidate in kinds if isinstance(candidate, type) and issubclass(candidate, BaseModel)]
    return sections[0] if len(sections) == 1 else None


def is_optional(kind: type[BaseModel], name: str) -> bool:
    """Check whether a setting may be null."""
    return type(None) in get_args(kind.model_fields[name].annotation)


def has_duplicates(values: Sequence[Any]) -> bool:
    return any(value in values[:index] for index, value in enumerate(values))


class Also:
    """Names of a setting in other programs, in its annotation: for messages about unknown settings."""

    def __init__(self, *names: str) -> None:
        self.names = names


Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[int, Field(ge=1, le=366 * 24 * 3600)]
"""Timeout, at most a year: torch's clocks overflow far above that."""
Seed = Annotated[int, Field(ge=0, lt=2**62)]
"""torch takes 63 bits, and Megatron adds a few thousand for each rank."""


class _RaisesConfigError(type(BaseModel)):
    """Metaclass that raises ConfigError where a user constructs a section; nested sections keep their key path."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            # Only direct construction gets here: pydantic validates nested sections without calling the class.
            raise ConfigError(explain(error, cls.__name__, cast("type[BaseModel]", cls))) from None


class Section(BaseModel, metaclass=_RaisesConfigError):
    """Base class of all settings: immutable, unknown names are errors, and every error is a ConfigError.

    Attributes:
        rules: combinations of its settings that are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    rules: ClassVar[Sequence[Rule[Any]]] = ()

    def __getitem__(self, key: str) -> Any:
        """Return a setting by its key, which may be in a section below."""
        return attrgetter(key)(self)

    @model_validator(mode="after")
    def _enforce_rules(self) -> Self:
        enforce(self.rules, self)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_coercion(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values that pydantic would coerce: true to 1, an empty string to the current directory. Accept off unquoted."""
        # pydantic's strict mode would also refuse strings for paths and lists for tuples, as YAML has them.
        annotation = str(cls.model_fields[info.field_name or ""].annotation)
        if value is False and "'off'" in annotation:
            return "off"  # YAML 1.1 reads off as false
        if isinstance(value, bool) and "bool" not in annotation and ("int" in annotation or "float" in annotation):
            raise ValueError("a number is expected here, not true or false")
        if value == "" and "Path" in annotation:
            raise ValueError("a path is expected here, not an empty string")
        return value
