"""Settings as YAML with comments, and as JSON Schema, for people and their editors. Pure."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from megascend.config.section import is_optional, section_of

WIDTH = 110
"""Longest line of a comment, in columns."""
PLURALS = {"string": "strings", "mapping": "mappings", "section": "sections"}


def default_settings(kind: type[BaseModel], title: str) -> str:
    """Return all settings of ``kind`` with their defaults, each under a comment: a run file once the required ones are filled in.

    Optional sections are commented out.
    """
    lines = [*comment(title), ""]
    for name in kind.model_fields:
        lines += [*_default(kind, name), ""]
    return "\n".join(lines[:-1]) + "\n"


def commented_settings(kind: type[BaseModel], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of ``values`` as YAML, each setting under its description; top-level ones after an empty line."""
    for name, value in values.items():
        yield ""
        yield from _setting(kind, name, value)


def commented_out(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of YAML as comments; removing the first ``# `` of each brings them back."""
    for line in lines:
        yield f"# {line}".rstrip()


def json_schema(kind: type[BaseModel], title: str) -> dict[str, Any]:
    """Return a JSON Schema of the settings, for editors: names, types and ranges, not what depends on several settings."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | kind.model_json_schema() | {"title": title}


def comment(text: str, indent: str = "") -> list[str]:
    """Wrap text as lines of a comment."""
    prefix = f"{indent}# "
    # break_on_hyphens: options and paths can be copied.
    return textwrap.wrap(text, WIDTH, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False)


def description(kind: type[BaseModel], name: str) -> str:
    """Return the description of a setting: of a section without one, the first line of its class."""
    section = section_of(kind, name)
    text = kind.model_fields[name].description or (section.__doc__ or "" if section is not None else "")
    return text.strip().partition("\n")[0].replace("``", "`").removesuffix(".")


def _default(kind: type[BaseModel], name: str, indent: str = "") -> Iterator[str]:
    field, section = kind.model_fields[name], section_of(kind, name)
    if section is None:
        accepted = type_text(field.annotation, field.metadata)
        yield from comment(f"{description(kind, name)} [{accepted}]", indent)
        default = "  # required" if field.is_required() else f" {yaml_value(field.default)}"
        yield f"{indent}{name}:{default}"
        return
    below = [line for inner in section.model_fields for line in _default(section, inner, indent + "  ")]
    yield from comment(description(kind, name) + (" [optional section]" if is_optional(kind, name) else ""), indent)
    lines = [f"{indent}{name}:", *below]
    yield from commented_out(lines) if is_optional(kind, name) else lines


def _setting(kind: type[BaseModel], name: str, value: Any, indent: str = "") -> Iterator[str]:
    section = section_of(kind, name)
    if text := description(kind, name):
        yield from comment(text, indent)
    if section is None or not isinstance(value, Mapping):
        yield f"{indent}{name}: {yaml_value(value)}"
        return
    yield f"{indent}{name}:"
    for inner, content in value.items():
        yield from _setting(section, inner, content, indent + "  ")


def yaml_value(value: Any) -> str:
    """Return a value as YAML in one line."""
    import yaml

    text = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


# --- types ---


def type_text(annotation: Any, metadata: Iterable[Any] = (), quote: str = "") -> str:
    """Describe the type of a setting, with the bounds of a number.

    Args:
        quote: sign around each of a few choices.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], [*metadata, *arguments[1:]], quote)
    if origin in (Union, types.UnionType):
        kinds = (type_text(kind, metadata, quote) for kind in arguments if kind is not type(None))
        return " or ".join(dict.fromkeys(kinds))
    if origin is Literal:
        return ", ".join(f"{quote}{choice}{quote}" for choice in arguments)
    if origin in (tuple, list):
        members = [kind for kind in arguments if kind is not ...]
        if len(members) > 1:
            return f"list of {len(members)} numbers" if members[0] == members[1] else "list"
        member = type_text(members[0], quote=quote)
        compound = get_origin(members[0]) in (Literal, Union, types.UnionType)
        return f"list of {member}" if compound else f"list of {PLURALS.get(member, member)}"
    if origin is dict:
        return "mapping"
    name = {int: "integer", float: "number", str: "string", bool: "boolean", Path: "path"}.get(annotation)
    if name is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        name = "section"
    elif name is None:
        name = "mapping" if getattr(annotation, "__total__", None) is not None else annotation.__name__
    return name + bounds(metadata)


def bounds(metadata: Iterable[Any]) -> str:
    """Format the bounds in a setting's metadata: `` >= 1``. Upper bounds that are irrelevant in practice are left out."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = {}
    for item in metadata:
        for inner in getattr(item, "metadata", [item]):  # a Field inside Annotated holds its own
            limits |= {name: value for name in signs if (value := getattr(inner, name, None)) is not None}
    return "".join(f" {signs[name]} {value:g}" for name, value in limits.items() if value < 2**20)
