"""Programs and commands of tests, in forks of one process that has imported torch, transformers and other third-party packages.

A new process spends 4 of its 5 s of processor time on these imports. Nothing of megascend, Megatron-Core or mcore-bridge is
imported before the fork. Tests of process start (the first import, signals, launchers) must start a process instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megascend.testing.reference import IMPORTED, ProgramServer, as_at_start

PACKAGES = [
    *(module for modules in IMPORTED.values() for module in modules),
    *("torch.distributed", "torch.utils.tensorboard", "transformers.generation.utils", "datasets", "modelscope"),
    *("pydantic.fields", "pydantic.functional_validators", "pydantic.type_adapter", "pydantic.main", "einops"),
    *("typer", "typer.rich_utils"),
]
"""Third-party modules that megascend and mcore-bridge import."""
COMMAND = "import runpy\nrunpy.run_module('megascend.apps.cli.main', run_name='__main__', alter_sys=True)"
PLUGGED_COMMAND = f"import sys\nsys.path.insert(0, '')\n{COMMAND}"
"""The command, which also finds plug-ins in its working directory: another PYTHONPATH would start another server."""

_server = ProgramServer(PACKAGES)


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a program with this process's import path and one thread."""
    variables = as_at_start({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    return variables | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | changes


def run_forked(
    program: Path | str,
    *arguments: object,
    directory: Path | None = None,
    timeout_s: float = 300.0,
    variables: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a script, or a program passed as text (``python -c``), to its end and return its output.

    Args:
        arguments: ``sys.argv[1:]``.
        directory: working directory; default: the current one.
        variables: its environment; default: :func:`environment`.
        stdin: its standard input.
    """
    variables = environment() if variables is None else variables
    return _server.run(program, arguments, variables, stdin, timeout_s, directory=directory)


def run_command(
    *arguments: object,
    directory: Path | None = None,
    timeout_s: float = 300.0,
    variables: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run ``megascend ARGUMENTS`` to its end and return its output. Arguments as of :func:`run_forked`."""
    return run_forked(COMMAND, *arguments, directory=directory, timeout_s=timeout_s, variables=variables, stdin=stdin)


def run_launched(
    program: Path, ranks: int, *arguments: object, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a script on ``ranks`` ranks: several under torchrun, one as :func:`run_forked` runs it."""
    if ranks == 1:
        return run_forked(program, *arguments, timeout_s=timeout_s)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment())
