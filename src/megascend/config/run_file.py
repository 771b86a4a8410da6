"""Reading of run files: YAML with ``a.b=value`` overrides. Settings are checked elsewhere."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megascend.config.documents import yaml_loader
from megascend.config.section import all_settings, is_optional, section_of
from megascend.errors import ConfigError

logger = logging.getLogger(__name__)

ALTERNATIVES = (
    ("steps", "epochs"),
    ("validation.path", "validation.fraction"),
    ("validation.split", "validation.fraction"),
)
"""Settings that exclude each other: an override of one removes the file's other."""


def read_settings(
    path: str | Path | None, overrides: Sequence[str] | None = None, kind: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Return the unchecked settings of a YAML file (None: no file) with ``a.b=value`` overrides applied.

    Args:
        kind: class of the settings, with which an override may name only the end of a setting (:func:`full_names`).
    """
    values = {} if path is None else _read_yaml(Path(path))
    overrides = overrides or []
    apply_overrides(values, overrides if kind is None else full_names(overrides, values, kind))
    return values


def full_names(overrides: Sequence[str], values: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """Return overrides with full names: ``lr=1e-4`` sets ``optimizer.lr``. Logs what a short name sets.

    A short name is the end of a setting in a section that the run has, or else in an optional one. Names that end no
    setting stay as they are, for the check of the settings to explain.
    """
    split = [_split(override) for override in overrides]
    sections = {key.rpartition(".")[0] for key, _ in split}
    names = []
    for key, text in split:
        name = key if key.partition(".")[0] in kind.model_fields else _full_name(key, values, kind, sections)
        if name != key:
            logger.warning("--set %s=%s sets %s", key, text, name)
        names.append(f"{name}={text}")
    return names


def _full_name(key: str, values: Mapping[str, Any], kind: type[BaseModel], sections: set[str]) -> str:
    """Return the setting that ``key`` ends, or ``key``."""
    endings = [name for name in all_settings(kind) if name.endswith(f".{key}")]
    present = [name for name in endings if _has_section(name, values, kind, sections)]
    candidates = present or endings
    if len(candidates) > 1:
        raise ConfigError(f"--set {key}: several settings end so, {', '.join(candidates)}: give the full name of one")
    return candidates[0] if candidates else key


def _has_section(name: str, values: Mapping[str, Any], kind: type[BaseModel], sections: set[str]) -> bool:
    """Check whether the run has the section of a setting: by default, in its file, or by another override."""
    *parents, _ = name.split(".")
    section: type[BaseModel] | None = kind
    level: Any = values
    for depth, parent in enumerate(parents, start=1):
        assert section is not None, name
        level = level.get(parent) if isinstance(level, Mapping) else None
        prefix = ".".join(parents[:depth])
        overridden = any(other == prefix or other.startswith(f"{prefix}.") for other in sections)
        if level is None and not overridden and is_optional(section, parent):
            return False
        section = section_of(section, parent)
    return True


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory; expected a run file in YAML (which names the model's directory as model:)"
        )
    if not os.path.lexists(path):  # a dangling link exists and fails below, when it is read
        check_file_name(path)
        raise ConfigError(f"no config file at {path.absolute()}")
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows write a byte order mark
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 text (byte {error.start}: {error.reason}); save the file as UTF-8"
        ) from None
    values = _parse(text, str(path), in_file=True)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, found {type(values).__name__}")
    return values


def check_file_name(path: Path) -> None:
    """Raise ConfigError for a setting in place of a file's name, as some programs take them."""
    if re.fullmatch(r"[a-z_]+(\.\w+)*=.*", str(path), re.DOTALL):
        raise ConfigError(f"{path} is not the name of a file; a setting is changed with --set {path}")


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set each ``a.b.c=value`` in nested ``values`` (in place)."""
    split = [_split(override) for override in overrides]
    overridden = {key for key, _ in split}
    for pair in ALTERNATIVES:
        # Both directions: either setting of a pair may be the one in the file.
        for setting, alternative in (pair, pair[::-1]):
            if setting in overridden and alternative not in overridden:
                _remove(values, alternative)
    for key, text in split:
        _set(values, key, text)


def _split(override: str) -> tuple[str, str]:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set takes KEY=VALUE, for example parallel.tensor=2; got {override!r}")
    return key, text


def _set(values: dict[str, Any], key: str, text: str) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        if values.get(parent) is None:  # left out, or an optional section written as null
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ConfigError(f"--set {key}={text}: {parent!r} is not a section")
    # As YAML, so that numbers, lists and null have the types that they have in a file.
    values[leaf] = _parse(text, f"--set {key}={text}")


def _remove(values: dict[str, Any], key: str) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        values = values.get(parent) or {}
        if not isinstance(values, dict):
            return
    values.pop(leaf, None)


def _parse(text: str, source: str, *, in_file: bool = False) -> Any:
    """Parse YAML; ConfigError with the position in ``source``."""
    import yaml

    try:
        return yaml.load(text, _loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f":{mark.line + 1}:{mark.column + 1}" if mark is not None and in_file else ""
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source}{position}: not valid YAML: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date such as 2026-13-01 is a ValueError
        problem = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError(f"{source}: not valid YAML: {problem}") from None


@cache
def _loader() -> Any:
    """Build a loader that refuses duplicate keys and keys that are not strings, unlike PyYAML's."""
    import yaml

    class Loader(yaml_loader()):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":  # <<, which is not a setting
                    continue
                key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
                # YAML 1.1 reads on, off, yes and no as booleans, and 1 as a number.
                if not isinstance(key, str):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r:.60} is read as {key!r:.60}, not as a name: quote it",
                        key_node.start_mark,
                    )  # fmt: skip
                # PyYAML silently keeps the last of several.
                if key in lines:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} appears twice, first in line {lines[key]}",
                        key_node.start_mark,
                    )  # fmt: skip
                lines[key] = line
            return super().construct_mapping(node, deep)

    return Loader
