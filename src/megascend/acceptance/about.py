"""What the run ran on: versions and counts, read from files. Nothing that tells one machine or person from another."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import megascend
from megascend.acceptance.settings import Settings
from megascend.bootstrap.providers import provider_for
from megascend.bootstrap.versions import PACKAGES

DRIVER = Path("/usr/local/Ascend/driver/version.info")
IN_TOOLKIT = ("version.cfg", "compiler/version.info", "runtime/version.info")
VERSION = re.compile(r"(?:^Version=|running_version=\[[^:\]]*:)([\w.]+)", re.MULTILINE)


def about(settings: Settings, environment: Mapping[str, str]) -> dict[str, Any]:
    """For the report's head."""
    return {
        "simulated": settings.simulated,
        "cards": settings.cards,
        "quick": settings.quick,
        "versions": versions(settings, environment),
    }


def versions(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Every package that decides what is computed; those of files that are not there are not named."""
    found = {"megascend": megascend.__version__, "Python": platform.python_version(), "machine": platform.machine()}
    for package in (*PACKAGES, "torch_npu", "triton-ascend"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found |= provider_for("npu").versions()
    home = environment.get("ASCEND_HOME_PATH", "")
    toolkit = [version_in(Path(home) / name) for name in IN_TOOLKIT] if home else []
    found["CANN"] = next(filter(None, toolkit), "not found")
    found["driver"] = version_in(DRIVER) or "not found"
    return found


def version_in(path: Path) -> str:
    """The version that a file of Ascend's states; empty if there is none."""
    if not path.is_file():
        return ""
    found = VERSION.search(path.read_text(errors="replace", encoding="utf-8"))
    return found[1] if found else ""
