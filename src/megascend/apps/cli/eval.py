"""``megascend eval``: measure tasks of lm-eval-harness on a model, a run's export or adapters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megascend.apps.cli import options

if TYPE_CHECKING:
    from megascend.apps.train.inference import InferenceSettings
    from megascend.config import ValidationTasks


def eval_command(
    model: options.Model,
    tasks: Annotated[
        list[str],
        typer.Option("--tasks", help="Task, group or tag of lm-eval-harness, or a task's YAML file; may be repeated."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file to write, with every document and response.")
    ] = None,
    fewshot: Annotated[
        int | None, typer.Option("--fewshot", min=0, help="Examples before each question; default: the task's number.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Measure this many documents of each task, the first ones.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Render questions as conversations with the chat template.")
    ] = False,
    adapters: options.AdapterNames = None,
    base: options.Base = None,
    engine: options.Engine = "single",
    nproc: options.Ranks = 1,
    tensor: options.Tensor = 1,
    platform: options.Platform = "auto",
    dtype: options.Dtype = "bf16",
) -> None:
    """Measure tasks of lm-eval-harness on a model, or on each of its adapters; nothing is downloaded."""
    from megascend.apps.cli.launch import on_ranks
    from megascend.apps.train.exports import inference_settings
    from megascend.apps.train.preflight import require_harness
    from megascend.config import ValidationTasks

    require_harness("megascend eval")
    options.require_no_file("--output", output)
    settings = inference_settings(model, adapters, base, engine, platform, dtype, tensor)
    chosen = ValidationTasks(names=tuple(tasks), fewshot=fewshot, limit=limit, chat_template=chat_template)
    on_ranks(eval_rank, settings, chosen, output, nproc=nproc)


def eval_rank(settings: InferenceSettings, tasks: ValidationTasks, output: Path | None) -> None:
    """Run one rank; the first one prints the metrics."""
    from megascend.apps.train.inference import evaluate_model
    from megascend.runtime.distributed.launch import Launch

    main_rank = Launch.from_environment().rank == 0
    scores = evaluate_model(settings, tasks, show=main_rank and sys.stderr.isatty())
    if not main_rank:
        return
    if output is not None:
        from megascend.apps.train.harness import write_reports

        write_reports(output, scores)
    for adapter, part in scores.items():
        count = sum(part.documents.values())
        typer.echo(f"{settings.adapters[adapter] if adapter else settings.model}: {count} documents")
        for line in part.lines():
            typer.echo(line)
