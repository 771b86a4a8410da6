"""Ascend's packages for the installed stack: checkouts that the environment names, and doubles of the others."""

from __future__ import annotations

import os
from pathlib import Path

from packaging.version import Version

from support.stacks import MEGATRON_CORE

DOUBLES = Path(__file__).resolve().parents[1] / "doubles"
ON_ADAPTOR = Version("0.17") <= MEGATRON_CORE
"""The stack's provider is ``megatron_adaptor``, not ``mindspeed``."""
PROVIDER_PACKAGES = ("megatron_adaptor", "transformer_engine") if ON_ADAPTOR else ("mindspeed",)
"""Packages without which the provider refuses the stack."""

WITHOUT_EXPERTS = ON_ADAPTOR and bool(os.environ.get("MEGASCEND_MINDSPEED"))
"""MindSpeed core_r0.18.0 is in use, which refuses models with experts."""


def package_folders() -> list[str]:
    """Return the folders of the packages, for ``sys.path``; MEGASCEND_MINDSPEED names a checkout of MindSpeed."""
    checkout = os.environ.get("MEGASCEND_MINDSPEED")
    if ON_ADAPTOR:
        return [str(DOUBLES / "adaptor_packages"), *([checkout] if checkout else [])]
    return [checkout or str(DOUBLES)]
