"""Ledger of what megascend changed in this process, for ``Runtime.changes``, ``megascend doctor`` and the log.

One ledger for all packages, since changes belong to the process and the code that makes them may have no Runtime. Attributes of
third-party modules, classes and objects are set through :func:`patch` or :func:`patched` only; other changes are reported to
:func:`changed`. ``tests/runtime/bootstrap/test_changes.py`` detects changes that are not listed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ledger: dict[str, None] = {}  # a dict keeps the order

ABSENT = object()
"""Value of an attribute that does not exist."""


def changed(subject: str, reason: str = "") -> None:
    """List a change of the process; a change repeated for another model is listed once."""
    line = f"{subject}: {reason}" if reason else subject
    if line not in _ledger:
        _ledger[line] = None
        logging.getLogger(__name__).debug("changed: %s", line)


def record(lines: Iterable[str]) -> None:
    """List changes that are described already."""
    for line in lines:
        changed(line)


def change_list() -> list[str]:
    """Return every change so far, in order."""
    return list(_ledger)


def patch(owner: Any, name: str, value: Any, reason: str) -> Any:
    """Set an attribute of a foreign module, class or object, and list it.

    Args:
        reason: effect of the new value, in a few words.

    Returns:
        The owner's previous value of ``name``, or :data:`ABSENT`; for :func:`restore`.
    """
    before = vars(owner).get(name, ABSENT)
    changed(f"{owner_name(owner)}.{name}", reason)
    setattr(owner, name, value)
    return before


def restore(owner: Any, name: str, before: Any) -> None:
    """Undo a :func:`patch` that returned ``before``; it is still listed as a change."""
    if before is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any, reason: str) -> Iterator[None]:
    """Apply :func:`patch` within the context."""
    before = patch(owner, name, value, reason)
    try:
        yield
    finally:
        restore(owner, name, before)


def add_modules(
    contents: Mapping[str, Mapping[str, Any]],
    origin: str,
    *,
    modules: MutableMapping[str, ModuleType] = sys.modules,
    packages: bool = True,
) -> None:
    """Create modules with the given contents, by full name, parents before children; each is an attribute of its parent.

    Args:
        origin: module of megascend that makes them, for their ``__spec__``.
        modules: mapping that they are added to.
        packages: False: they cannot have submodules.
    """
    for name, attributes in contents.items():
        module = ModuleType(name, f"put here by {origin}")
        module.__spec__ = ModuleSpec(name, loader=None, origin=origin, is_package=packages)
        if packages:
            module.__path__ = []  # type: ignore[attr-defined]  # Python imports submodules of packages only
            module.__package__ = name
        module.__dict__.update(attributes)
        modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)


def owner_name(owner: Any) -> str:
    """Return the name of an attribute's owner in the list: a module, a class, or the objects of a class."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if isinstance(owner, type) else f"objects of {name}"
