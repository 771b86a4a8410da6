"""EngineSpec declares the settings of an engine; constructors and run files have the same ones."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

from megascend import Adapters, EngineSpec, MegatronBackend
from megascend.backends import EngineBackend
from megascend.config.section import section_of

OTHERS: dict[str, Any] = {
    "adapters": Adapters(max_count=2),
    "head": "scalar",
    "mtp": "drop",
    "platform": "cpu",
    "precision": "fp32",
    "provider": "reference",
    "provider_options": {"a": 1},
    "self_check": False,
    "tf32": True,
    "vision_tower": "train",
}
"""Values of settings that are not their defaults; numbers and sections follow from these."""


def plain(annotation: Any) -> Any:
    """Return the members of an annotation: of a union, of an alias and of what Annotated has."""
    members = get_args(annotation)
    return frozenset().union(*map(plain, members)) if members else frozenset({annotation})


def test_constructor_has_the_settings_of_the_spec() -> None:
    """Names, types and defaults; None stands for the default of a section."""
    parameters = dict(inspect.signature(EngineBackend.__init__).parameters)
    types = get_type_hints(EngineBackend.__init__) | {"self": None}
    del parameters["self"], parameters["model"]
    fields = {name: field for name, field in EngineSpec.model_fields.items() if name != "model"}
    assert sorted(parameters) == sorted(fields)
    for name, field in fields.items():
        compound = isinstance(field.default, (BaseModel, dict))
        assert parameters[name].default == (None if compound else field.default), name
        if not compound and name != "provider":
            assert plain(types[name]) - {type(None)} == plain(field.annotation) - {type(None)}, name
        elif section := section_of(EngineSpec, name):
            assert section in plain(types[name]), name


@pytest.mark.parametrize("name", [name for name in EngineSpec.model_fields if name != "model"])
def test_constructor_passes_every_argument_to_the_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default, value = EngineSpec.model_fields[name].default, OTHERS.get(name)
    if value is None:
        section = section_of(EngineSpec, name)
        # Equal to the default, but another object.
        value = section.model_validate(default.model_dump()) if section is not None else default + 1
    received: list[EngineSpec] = []
    arguments: dict[str, Any] = {name: value}

    def stop(spec: EngineSpec) -> Any:
        received.append(spec)
        raise InterruptedError

    monkeypatch.setattr(MegatronBackend, "_self_check_worker", staticmethod(stop))
    with pytest.raises(InterruptedError):
        MegatronBackend(Path(), **arguments)
    (spec,) = received
    assert getattr(spec, name) is value or getattr(spec, name) == value != default
