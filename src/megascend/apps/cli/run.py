"""``megascend run``: run any program on Megatron-Core, made ready for a platform."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

import megascend
from megascend.apps.cli import options

SITE = Path(megascend.__file__).parent / "runtime" / "bootstrap" / "run_site"
PLATFORM_VARIABLE = "MEGASCEND_RUN_PLATFORM"


def run_command(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.", metavar="-- COMMAND...")],
    platform: options.Platform = "auto",
    simulated: Annotated[
        bool, typer.Option("--simulated", help="options.Platform npu on a simulated device, on this machine.")
    ] = False,
) -> None:
    """Run COMMAND with Megatron-Core made ready for a platform: megascend run --platform cpu -- torchrun pretrain_gpt.py

    Every Python process of COMMAND calls megascend.bootstrap() just before it first imports Megatron. Ends with COMMAND's
    exit code.
    """
    from megascend.errors import ConfigError

    if simulated and platform not in ("auto", "npu"):
        raise ConfigError(f"--simulated is platform npu on a simulated device, and --platform says {platform}")
    if (option := isolating_option(command)) is not None:
        raise ConfigError(
            f"{command[0]} {option}: with it Python ignores PYTHONPATH or imports no sitecustomize; leave it out, or begin the "
            "program with megascend.bootstrap()"
        )
    environment = os.environ.copy()
    if simulated:
        from megascend.runtime.bootstrap.versions import installed_versions, require_package
        from simnpu.launcher import prepared

        require_package("torch", installed_versions())
        environment = prepared()
        platform = "npu"
    try:
        # exec, not a child process: signals and the exit code are then the program's own.
        os.execvpe(command[0], command, with_hook(environment, platform))
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error


def with_hook(environment: Mapping[str, str], platform: str) -> dict[str, str]:
    """Return an environment that bootstraps every Python process for ``platform`` when it imports Megatron."""
    # In front: Python imports the first sitecustomize on its path, and ours runs the others.
    paths = [str(SITE), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), PLATFORM_VARIABLE: platform}


def isolating_option(command: Sequence[str]) -> str | None:
    """Return the option of Python in ``command`` that disables the hook (``-I``, ``-E``, ``-S``, possibly combined), if any."""
    if not re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        return None
    for argument in command[1:]:
        # The program begins here; what follows are its own options.
        if not re.fullmatch(r"-[A-Za-z]+", argument) or argument[1] in "cm":
            return None
        # -W and -X take a value, whose letters are not options.
        if set(argument[1:]) & set("IES") and argument[1] not in "WX":
            return argument
    return None
