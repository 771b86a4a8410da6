"""Programs and commands of tests, in forks of one process that has torch, transformers and what else others wrote imported.

A process that imports them by itself spends 4 of its 5 s of processor time on it. Nothing of megascend, Megatron-Core or
mcore-bridge is there before the fork. What is about the start of a process (the first import, signals, launchers) starts one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megascend.testing.reference import IMPORTED, ProgramServer

PACKAGES = [
    *(module for modules in IMPORTED.values() for module in modules),
    *("torch.distributed", "torch.utils.tensorboard", "transformers.generation.utils", "datasets", "modelscope"),
    *("pydantic.fields", "pydantic.functional_validators", "pydantic.type_adapter", "pydantic.main", "einops"),
    *("typer", "typer.rich_utils"),
]
"""What megascend and mcore-bridge import of others."""
COMMAND = "import runpy\nrunpy.run_module('megascend.cli.main', run_name='__main__', alter_sys=True)"

_server = ProgramServer(PACKAGES)


def environment(**changes: str) -> dict[str, str]:
    """Of a program that finds what this process finds and computes on one thread.

    Without what the bootstrap may have set in this process: another value would start another server.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    mine = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    return mine | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | changes


def run_forked(
    program: Path | str,
    *arguments: object,
    directory: Path | None = None,
    timeout_s: float = 300.0,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A script, or a program given as text (``python -c``), ended, with its output.

    Args:
        arguments: ``sys.argv[1:]``.
        directory: to run in; default: the present one.
        variables: its environment; default: :func:`environment`.
    """
    return _server.run(
        program, arguments, environment() if variables is None else variables, timeout_s=timeout_s, directory=directory
    )


def run_command(
    *arguments: object,
    directory: Path | None = None,
    timeout_s: float = 300.0,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """``megascend ARGUMENTS``, ended, with its output. Arguments as of :func:`run_forked`."""
    return run_forked(COMMAND, *arguments, directory=directory, timeout_s=timeout_s, variables=variables)
