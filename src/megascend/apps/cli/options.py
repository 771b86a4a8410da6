"""Arguments and options that several commands share, and how the run files that they name are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from megascend.config import PlatformName

if TYPE_CHECKING:
    from megascend.apps.sampling.request import SamplingParams
    from megascend.config import TrainerConfig
    from megascend.config.serve import ServeConfig

Settings = TypeVar("Settings", bound="TrainerConfig | ServeConfig")


def weight_type(text: str) -> str:
    """Parse the name of a precision, in any of its spellings."""
    from megascend.config.training import PRECISIONS, precision_name

    if (name := precision_name(text)) not in PRECISIONS.values():
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(dict.fromkeys(PRECISIONS.values()))}")
    return name


# --- run files ---

RunFile = Annotated[Path, typer.Argument(help="YAML file with the run's settings (see `megascend show-config`).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
]
Processes = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Start this many processes here (not under torchrun).")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's files in the output directory.")]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|PATH",
        help="Resume from a checkpoint: the newest complete one in the output directory, or that at PATH.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check all that can be known before training, and show what a run would do; no training."
    ),
]
Profiled = Annotated[
    bool, typer.Option("--profile", help="Record three steps: a trace for Perfetto, and what took the time in them.")
]

# --- models that a run file is written for ---

ModelOrConfig = typer.Argument(
    help="Checkpoint directory, Hub name, or the config.json of a model whose weights are elsewhere."
)
LoraRank = Annotated[int | None, typer.Option("--lora", min=1, help="Train an adapter of this rank, not the model.")]

# --- models that answer ---

Model = Annotated[Path, typer.Argument(help="Checkpoint, adapter, Hub name, or run directory of `megascend train`.")]
AdapterNames = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="[NAME=]DIR", help="Load this LoRA adapter beside MODEL; may be repeated."),
]
Base = Annotated[
    Path | None,
    typer.Option("--base", help="Base model of an adapter, if its own record of it is not a directory here."),
]
Engine = Annotated[str, typer.Option("--engine", help="What loads the model: single (transformers), fsdp or megatron.")]
Ranks = Annotated[int, typer.Option("--nproc", min=1, help="Start this many processes.")]
Tensor = Annotated[int, typer.Option("--tensor", min=1, help="Tensor parallel size (engine megatron).")]
Platform = Annotated[PlatformName, typer.Option("--platform", help="Device.")]
Dtype = Annotated[
    str, typer.Option("--dtype", parser=weight_type, metavar="fp32|fp16|bf16", help="Type of the weights.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest response, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0: always the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this total probability.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of sampling; default: another one each time.")]


def read_run_file(load: Callable[..., Settings], *arguments: object) -> Settings:
    """Return ``load(*arguments)``, in which models that are names on the Hub have been downloaded."""
    from megascend.models.checkpoint_files.hub import with_snapshots

    return with_snapshots(load(*arguments))


def read_any_run_file(path: Path, overrides: list[str] | None) -> TrainerConfig:
    """Read a run file of ``rl`` if it has a section ``rollout``, else of ``train``; models are not looked up."""
    from megascend.config import RunConfig, parsed, read_settings
    from megascend.config.rl import RlConfig

    for_rl = "rollout" in read_settings(path) or any(name.startswith("rollout.") for name in overrides or ())
    kind: type[TrainerConfig] = RlConfig if for_rl else RunConfig
    return parsed(kind, read_settings(path, overrides, kind), path)


def require_no_file(option: str, path: Path | None) -> None:
    from megascend.errors import ConfigError

    if path is not None and path.exists():
        raise ConfigError(f"{option} {path} exists; choose another file, or remove it")


def sampling_params(max_tokens: int, temperature: float, top_p: float, seed: int | None) -> SamplingParams:
    """Return the settings of sampling."""
    from megascend.apps.sampling.request import SamplingParams
    from megascend.errors import ConfigError

    sampling = SamplingParams(max_tokens, temperature, top_p, seed=seed)
    if sampling.problem is not None:
        raise ConfigError(sampling.problem)
    return sampling
