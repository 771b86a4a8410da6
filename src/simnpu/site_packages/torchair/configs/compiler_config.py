"""Stand-in for ``torchair.configs.compiler_config``: options are kept and mean nothing, since nothing is compiled."""

from __future__ import annotations

from typing import Any


class Section:
    """Options by name; one that was not set is a section of its own (``config.debug.graph_dump.type = "pbtxt"``)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = Section()
        setattr(self, name, found)
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"


class CompilerConfig(Section):
    """Options of Ascend's graph compiler."""
