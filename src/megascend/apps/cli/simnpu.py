"""``megascend simnpu``: run any program on a simulated Ascend device."""

from __future__ import annotations

from typing import Annotated

import typer


def simnpu_command(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.", metavar="-- COMMAND...")],
) -> None:
    """Run COMMAND with a simulated Ascend device: megascend simnpu -- torchrun --nproc_per_node 8 train.py

    The device is CPU memory, hccl runs over Gloo, and torch_npu's operators check their arguments as the kernels do.
    Speed and memory use say nothing about hardware. Ends with COMMAND's exit code. `python -m simnpu` does the same and
    has options.
    """
    from megascend.runtime.bootstrap.versions import installed_versions, require_package
    from simnpu.launcher import launch

    # Named here: torch autoloads the device, and its error would not say so.
    require_package("torch", installed_versions())
    launch(command)
