"""``python -m simnpu -- COMMAND``: run a program for Ascend NPUs on this machine, on a simulated device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from simnpu import __version__, launcher
from simnpu.errors import SimnpuError
from simnpu.identity import CHIPS, DEFAULT_DEVICES
from simnpu.settings import DEVICES_VARIABLE, LOG_VARIABLE, NAME_VARIABLE, OBJECTS_VARIABLE

EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns only with ``--check`` and after an error, which is one line on stderr."""
    parser = make_parser()
    options = parse(parser, list(sys.argv[1:] if arguments is None else arguments))
    if not options.command and not options.check:
        parser.error("no COMMAND: python -m simnpu -- torchrun --nproc_per_node 2 train.py")
    os.environ.update(chosen_settings(options))
    try:
        if not options.check:
            launcher.launch(options.command)
        print(f"simnpu {__version__}: {launcher.describe()}. SIMULATED: no speed or memory of hardware")
    except SimnpuError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simnpu",
        usage="python -m simnpu [OPTIONS] -- COMMAND...",
        description="Run COMMAND with a simulated Ascend device: torch.device('npu') is CPU memory, hccl runs over Gloo, "
        "and torch_npu's operators check their arguments as the kernels do. Speed and memory use say nothing about "
        "hardware. Ends with COMMAND's exit code.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        help=f"devices of this host (default: torchrun's local ranks, else {DEFAULT_DEVICES}); {DEVICES_VARIABLE}",
    )
    parser.add_argument(
        "--name", metavar="CHIP", help=f"call the device after a chip: {', '.join(CHIPS)}; {NAME_VARIABLE}"
    )
    parser.add_argument(
        "--objects",
        choices=["warn", "refuse"],
        help=f"what to do about object collectives over hccl (default: warn); {OBJECTS_VARIABLE}",
    )
    parser.add_argument(
        "--log", metavar="FOLDER", help=f"log every process's operator calls into FOLDER; {LOG_VARIABLE}"
    )
    parser.add_argument(
        "--check", action="store_true", help="try the device in a process of its own and say in a line what it is"
    )
    parser.add_argument("--version", action="version", version=f"simnpu {__version__}")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND...", help="the program to run")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Return the options in front of the command, and the command unchanged, later ``--`` included."""
    marker = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:marker])
    if options.command:  # a command without -- in front of it: all that follows is its own
        options.command += arguments[marker:]
    else:
        options.command = arguments[marker + 1 :]
    return options


def chosen_settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that stand for the options."""
    settings = {
        DEVICES_VARIABLE: options.devices,
        NAME_VARIABLE: options.name,
        OBJECTS_VARIABLE: options.objects,
        LOG_VARIABLE: options.log and str(Path(options.log).absolute()),
    }
    return {name: value for name, value in settings.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main())
