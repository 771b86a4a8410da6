"""Phase one: MindSpeed's adaptor is imported, with arguments it did not read from the command line.

Importing ``mindspeed.megatron_adaptor`` parses ``sys.argv``, replaces the root logger's handlers, imports megatron.core and
patches it. Here it is told its arguments beforehand, and logging is put back.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from megascend.bootstrap.mindspeed.arguments import namespace
from megascend.changes import changed, patch
from megascend.errors import ImportOrderError, PlatformError

ADAPTOR = "mindspeed.megatron_adaptor"


def default_arguments() -> dict[str, Any]:
    """Every argument of every MindSpeed feature at its default. No command line is looked at."""
    return vars(import_module("mindspeed.args_utils").get_mindspeed_args(get_defaults=True))


def set_arguments(arguments: Mapping[str, Any]) -> None:
    """Replace what MindSpeed takes for its command line. Values of an earlier model do not stay behind."""
    args_utils: Any = import_module("mindspeed.args_utils")
    args_utils._MINDSPEED_ARGS = namespace(arguments)


def import_adaptor(arguments: Mapping[str, Any]) -> None:
    """Import the adaptor under ``arguments``."""
    if ADAPTOR in sys.modules:
        raise ImportOrderError(
            f"{ADAPTOR} was imported before megascend.bootstrap(): it has read its arguments from sys.argv and patched "
            "Megatron with them. Remove the import; the bootstrap does it"
        )
    set_arguments(arguments)
    guard_module_scan()
    try:
        with quietly():
            import_module(ADAPTOR)
    except SystemExit as error:  # argparse, if a MindSpeed version parses the command line after all
        raise PlatformError(f"importing {ADAPTOR} tried to end the process ({error.code})") from error
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        raise PlatformError(
            f"importing {ADAPTOR} failed: {type(error).__name__}: {error}. This process is patched half-way; start another"
        ) from error
    # It reports at warning level on every rank that megatron.training is absent, which is how megascend runs.
    logging.getLogger("mindspeed.args_utils").setLevel(logging.ERROR)
    changed("the logger mindspeed.args_utils", "logs errors only")


def guard_module_scan() -> None:
    """Keep MindSpeed's scan of ``sys.modules`` from loading what it looks at.

    For every patch it asks every module ``hasattr(module, name)``, which makes lazy modules (transformers, for one)
    import whatever defines that name, and crash where an optional package is missing. A lazy module's attributes are
    not what is to be replaced, so only those are asked for that are there.
    """
    patch_utils: Any = import_module("mindspeed.patch_utils")

    def present(owner: Any, name: str) -> bool:
        return name in vars(owner) if isinstance(owner, ModuleType) else hasattr(owner, name)

    patch(patch_utils, "hasattr", present, "its scan of sys.modules leaves lazy modules alone")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Only errors are logged, no Python warnings, and the root logger is as it was when the block ends."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)
