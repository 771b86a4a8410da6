"""Which of MindSpeed's two branches this double behaves as. Not a module of the real MindSpeed."""

from __future__ import annotations

from importlib import metadata
from typing import TypeVar

from packaging.version import Version

IS_0_16 = Version(metadata.version("megatron-core")) >= Version("0.16.0a0")
"""True: core_r0.16.0; False: core_r0.15.3. Decided by the installed megatron-core, as a user would pair them."""

_Class = TypeVar("_Class", bound=type)


def named_by_branch(kind: _Class) -> _Class:
    """Class decorator: on branch 0.15 the classes of ``mindspeed.te`` have ``MindSpeed`` before their names."""
    if not IS_0_16:
        kind.__name__ = kind.__qualname__ = f"MindSpeed{kind.__name__}"
    return kind
