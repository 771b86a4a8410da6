"""Putting the stand-in ``transformer_engine`` in place, before anything imports the real one."""

from __future__ import annotations

import importlib.util
import sys

from megascend.errors import ImportOrderError, PlatformError
from megascend.reference_te.package import ROOT, VERSION, build_modules

MUST_COME_LATER = ("megatron.core", "mcore_bridge", ROOT)
MARK = "__megascend_reference__"


def is_installed() -> bool:
    """True if ``transformer_engine`` in this process is the reference implementation."""
    return hasattr(sys.modules.get(ROOT), MARK)


def install(force: bool = False) -> list[str]:
    """Make the reference layers importable as ``transformer_engine``; a second call does nothing.

    Args:
        force: replace a real Transformer Engine even where it could run.

    Returns:
        One line for each change made to the process.

    Raises:
        ImportOrderError: megatron.core, mcore_bridge or transformer_engine is imported already.
        PlatformError: a real Transformer Engine is installed and CUDA is available, and not ``force``.
    """
    if is_installed():
        return []
    early = [name for name in MUST_COME_LATER if name in sys.modules]
    if early:
        raise ImportOrderError(
            f"already imported: {', '.join(early)}. The reference Transformer Engine must be in place before them: "
            "call megascend.bootstrap() first, at the top of the program"
        )
    changes = []
    if importlib.util.find_spec(ROOT) is not None:
        import torch

        if torch.cuda.is_available() and not force:
            raise PlatformError(
                "a real transformer_engine is installed and CUDA is available: use platform 'cuda', or ask for the "
                "reference implementation with force=True"
            )
        changes.append(f"{ROOT}: the installed package is hidden")
    modules = build_modules()
    setattr(modules[ROOT], MARK, True)
    sys.modules.update(modules)
    changes.append(f"{ROOT} {VERSION}: megascend's reference layers in plain PyTorch ({len(modules)} modules)")
    return changes
