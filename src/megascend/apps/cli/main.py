"""The ``megascend`` command line: registers the commands and reports megascend's errors in one line on stderr.

Each command imports what it needs inside its function, so that ``megascend --help`` needs neither torch nor Megatron.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megascend.apps.cli.chat import chat_command
from megascend.apps.cli.doctor import doctor_command
from megascend.apps.cli.eval import eval_command
from megascend.apps.cli.export import export_command
from megascend.apps.cli.generate import generate_command
from megascend.apps.cli.init import init_command
from megascend.apps.cli.job import job_command
from megascend.apps.cli.launch import EXIT_INTERRUPTED
from megascend.apps.cli.messages import report, several_ranks, show_messages
from megascend.apps.cli.new_model import new_model_command
from megascend.apps.cli.plan import plan_command
from megascend.apps.cli.prepare import prepare_command
from megascend.apps.cli.push import push_command
from megascend.apps.cli.rl import rl_command
from megascend.apps.cli.rollouts import rollouts_command
from megascend.apps.cli.run import run_command
from megascend.apps.cli.serve import serve_command
from megascend.apps.cli.show_config import show_config_command
from megascend.apps.cli.simnpu import simnpu_command
from megascend.apps.cli.train import train_command
from megascend.errors import MegascendError
from megascend.surroundings import set_user_variables
from simnpu.errors import SimnpuError

EXIT_ERROR = 2
DEBUG_VARIABLE = "MEGASCEND_DEBUG"


class ReportingGroup(TyperGroup):
    """Prints an error of megascend's, or of the simulated device's, or a wrong option, as one red line and exits with 2.

    Other exceptions keep their traceback.
    """

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **options: Any) -> Any:
        if not standalone_mode:
            return super().main(args, *rest, standalone_mode=False, **options)
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        if arguments[0] == "help":  # megascend help, megascend help COMMAND
            arguments = [*arguments[1:], "--help"]
        try:
            # Not click's standalone mode, which prints usage errors as several lines in a box and exits itself.
            code = super().main(arguments, *rest, standalone_mode=False, **options)
        except Exception as error:
            # Recognised by their attribute: depending on its version, typer raises click's classes or those of its own copy.
            if not hasattr(error, "format_message"):
                raise
            report(describe_usage_error(error))
            sys.exit(EXIT_ERROR)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: typer.Context) -> Any:
        show_messages()
        try:
            return super().invoke(ctx)
        except (MegascendError, SimnpuError) as error:
            if ctx.params.get("debug"):
                raise
            rank = f" (rank {os.environ.get('RANK')})" if several_ranks(os.environ) else ""
            report(f"{type(error).__name__}{rank}: {error}")
            raise typer.Exit(EXIT_ERROR) from None
        except KeyboardInterrupt:
            report("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def describe_usage_error(error: Any) -> str:
    """Describe a command-line error in one line."""
    message = " ".join(error.format_message().split()).replace("Value error, ", "")
    problems = getattr(error.__cause__, "errors", list)()  # pydantic's, which name the value
    value = f" (got {problems[0]['input']!r})" if problems and "input" in problems[0] else ""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "megascend"
    settings = re.findall(r"[\w.]+=[^ )]*", message) if "unexpected extra argument" in message else []
    settings += [f"{option}=VALUE" for option in re.findall(r"No such option: -*([\w.]+)", message)]
    if settings and context and any("--set" in parameter.opts for parameter in context.command.params):
        value += f"; a setting is changed with --set {' --set '.join(settings)}"
    return f"UsageError: {message.rstrip('.')}{value}; see {command} --help"


def show_version(requested: bool) -> None:
    """Print the installed version and stop, if ``--version`` was given."""
    if not requested:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        typer.echo(f"megascend {version('megascend')}")
    except PackageNotFoundError:
        typer.echo("megascend (run from a source tree that is not installed)")
    raise typer.Exit


app = typer.Typer(
    cls=ReportingGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Train Hugging Face models with Megatron-Core on Ascend NPUs, on CUDA and on a plain CPU.",
)


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show the full traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that every command shares."""


COMMANDS = {
    "init": init_command,
    "train": train_command,
    "prepare": prepare_command,
    "rl": rl_command,
    "generate": generate_command,
    "chat": chat_command,
    "eval": eval_command,
    "rollouts": rollouts_command,
    "serve": serve_command,
    "plan": plan_command,
    "run": run_command,
    "job": job_command,
    "doctor": doctor_command,
    "show-config": show_config_command,
    "new-model": new_model_command,
    "export": export_command,
    "push": push_command,
    "simnpu": simnpu_command,
}
for name, function in COMMANDS.items():
    # Of these, options after the program's name are the program's.
    app.command(name, context_settings={"allow_interspersed_args": name not in ("run", "simnpu")})(function)


def main() -> None:
    # First: some packages look up the user's name when imported, and fail in containers where the user id has none.
    set_user_variables()
    atexit.register(gc.freeze)  # skips the final GC pass, about 1 s after importing Megatron
    app(prog_name="megascend")


if __name__ == "__main__":
    main()
