"""``megascend generate``, ``chat`` and ``eval``: try a model, a run's export or an adapter."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megascend.apps.cli.export import find_adapter, find_checkpoint, other_base, weight_type
from megascend.config.documents import load_json, load_yaml

if TYPE_CHECKING:
    from megascend.apps.sampling.request import SamplingParams
    from megascend.apps.train.inference import InferenceSettings, ResponseModel
    from megascend.config import ValidationTasks


Model = Annotated[
    Path,
    typer.Argument(help="Checkpoint, adapter, Hub name, or run directory of `megascend train`."),
]
AdapterNames = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="[NAME=]DIR", help="Load this LoRA adapter beside MODEL; may be repeated."),
]
Base = Annotated[
    Path | None,
    typer.Option("--base", help="Base model of an adapter, if its own record of it is not a directory here."),
]
Engine = Annotated[str, typer.Option("--engine", help="What loads the model: single (transformers), fsdp or megatron.")]
Platform = Annotated[str, typer.Option("--platform", help="auto, cpu, cuda or npu.")]
Dtype = Annotated[
    str, typer.Option("--dtype", parser=weight_type, metavar="fp32|fp16|bf16", help="Type of weights and compute.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest response, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0: always the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this total probability.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of sampling; default: another one each time.")]


def generate_command(
    model: Model,
    prompts: Annotated[
        str, typer.Argument(help="JSONL file whose lines have `prompt` or `messages`, or - for standard input.")
    ] = "-",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSONL file to write; default: standard output.")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Each line of PROMPTS is the user's turn of a conversation, not JSON.")
    ] = False,
    adapters: AdapterNames = None,
    base: Base = None,
    engine: Engine = "single",
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Start this many processes.")] = 1,
    tensor: Annotated[int, typer.Option("--tensor", min=1, help="Tensor parallel size (engine megatron).")] = 1,
    platform: Platform = "auto",
    dtype: Dtype = "bf16",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
) -> None:
    """Answer prompts, and write their lines with response, tokens and finish_reason added.

    A line's `adapter` names the adapter to answer with (null: the base model); without it, the only one that is loaded answers.
    """
    from megascend.apps.cli.launch import start_ranks, under_torchrun
    from megascend.apps.sampling.request import SamplingParams
    from megascend.errors import ConfigError, DataError

    if output is not None and output.exists():
        raise ConfigError(f"--output {output} exists; choose another file, or remove it")
    settings = inference_settings(model, adapters, base, engine, platform, dtype, tensor)
    sampling = SamplingParams(max_tokens, temperature, top_p, seed=seed)
    if sampling.problem is not None:
        raise ConfigError(sampling.problem)
    records = read_lines(prompts, text=text)
    unknown = sorted({str(name) for record in records if (name := record.get("adapter"))} - settings.adapters.keys())
    if unknown:
        raise ConfigError(
            f"a prompt names the adapter {unknown[0]!r}; --adapter NAME=DIR has loaded: {', '.join(settings.adapters) or 'none'}"
        )
    arguments = (settings, records, sampling, output)
    refused = generate_rank(*arguments) if under_torchrun() else start_ranks(generate_rank, *arguments, nproc=nproc)
    if refused:
        raise DataError(f"{refused} of {len(records)} prompts could not be answered; their lines have 'error'")


def generate_rank(
    settings: InferenceSettings, records: list[dict[str, Any]], sampling: SamplingParams, output: Path | None
) -> int:
    """Run one rank; return how many prompts could not be answered."""
    from megascend.apps.cli.messages import show_messages
    from megascend.apps.train.inference import generate

    show_messages()
    return generate(settings, records, sampling, output)


def read_lines(source: str, *, text: bool) -> list[dict[str, Any]]:
    """Read prompts from a JSONL file or standard input (``-``); ``text``: each line is a user's turn."""
    from megascend.apps.data.findings import Findings
    from megascend.apps.rl.rollout.prompts import parse_prompt
    from megascend.errors import DataError

    name = "standard input" if source == "-" else source
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text (byte {error.start}: {error.reason})") from None
    findings, records = Findings(), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if text:
            records.append({"messages": [{"role": "user", "content": line.rstrip("\r")}]})
            continue
        with findings.collecting():
            if not line.lstrip().startswith("{"):
                raise DataError(f"{name}:{number}: not a JSON object; for lines of plain text: --text")
            records.append(parse_prompt(line, f"{name}:{number}"))
    findings.raise_problems("prompts")
    if not records:
        raise DataError(f"{name} holds no prompts")
    return records


def chat_command(
    model: Model,
    adapters: AdapterNames = None,
    base: Base = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of every conversation.")] = None,
    engine: Engine = "single",
    platform: Platform = "auto",
    dtype: Dtype = "bf16",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    seed: Seed = None,
) -> None:
    """Talk with a model in the terminal, in one process: /reset begins again, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    from megascend.apps.cli.messages import show_messages
    from megascend.apps.sampling.request import SamplingParams
    from megascend.apps.train.inference import loaded_model
    from megascend.errors import ConfigError

    settings = inference_settings(model, adapters, base, engine, platform, dtype, 1)
    if len(settings.adapters) > 1:
        raise ConfigError(
            f"chat answers with one adapter, and {len(settings.adapters)} are given: {', '.join(settings.adapters)}"
        )
    sampling = SamplingParams(max_tokens, temperature, top_p, seed=seed)
    if sampling.problem is not None:
        raise ConfigError(sampling.problem)
    show_messages()
    with loaded_model(settings) as loaded:
        if not loaded.tokenizer.chat_template:
            raise ConfigError(
                f"{settings.model}: the tokenizer has no chat template; megascend generate continues plain texts"
            )
        name = f" with {next(iter(settings.adapters.values()))}" if settings.adapters else ""
        typer.echo(f"{settings.model}{name}; /reset begins again, /exit ends")
        converse(loaded, sampling, system)


def eval_command(
    model: Model,
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
    adapters: AdapterNames = None,
    base: Base = None,
    engine: Engine = "single",
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Start this many processes.")] = 1,
    tensor: Annotated[int, typer.Option("--tensor", min=1, help="Tensor parallel size (engine megatron).")] = 1,
    platform: Platform = "auto",
    dtype: Dtype = "bf16",
) -> None:
    """Measure tasks of lm-eval-harness on a model, or on each of its adapters; nothing is downloaded."""
    from megascend.apps.cli.launch import start_ranks, under_torchrun
    from megascend.apps.train.preflight import require_harness
    from megascend.config import ValidationTasks
    from megascend.errors import ConfigError

    require_harness("megascend eval")
    if output is not None and output.exists():
        raise ConfigError(f"--output {output} exists; choose another file, or remove it")
    settings = inference_settings(model, adapters, base, engine, platform, dtype, tensor)
    chosen = ValidationTasks(names=tuple(tasks), fewshot=fewshot, limit=limit, chat_template=chat_template)
    arguments = (settings, chosen, output)
    eval_rank(*arguments) if under_torchrun() else start_ranks(eval_rank, *arguments, nproc=nproc)


def eval_rank(settings: InferenceSettings, tasks: ValidationTasks, output: Path | None) -> None:
    """Run one rank; the first one prints the metrics."""
    from megascend.apps.cli.messages import show_messages
    from megascend.apps.train.inference import evaluate_model
    from megascend.runtime.distributed.launch import Launch

    show_messages()
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


def converse(model: ResponseModel, sampling: SamplingParams, system: str | None) -> None:
    """Read the user's turns from standard input and answer them, until its end."""
    import contextlib
    from dataclasses import replace

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and a history

    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            return
        if not line:
            continue
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            typer.echo("a new conversation")
            continue
        if line.startswith("/"):
            typer.echo(f"{line.split()[0]} is not a command; /reset begins again, /exit ends")
            continue
        turn = {"role": "user", "content": line}
        request = model.request({"messages": [*messages, turn]}, sampling)
        room = model.limit - len(request.prompt)
        if room < 1:
            typer.echo(
                f"the conversation has {len(request.prompt)} tokens, and the model takes {model.limit}: /reset begins again"
            )
            continue
        params = replace(request.params, max_tokens=min(room, request.params.max_tokens))
        with interrupts() as interrupted:
            response = model.stream(replace(request, params=params), write, interrupted)
        typer.echo("")
        if response.error is not None:
            typer.secho(response.error, fg=typer.colors.RED, err=True)
            continue
        if response.finish_reason != "stop":
            typer.echo(
                f"[{'stopped' if response.finish_reason == 'cancelled' else f'cut off after {response.tokens} tokens'}]"
            )
        messages += [turn, {"role": "assistant", "content": response.text}]


def write(text: str) -> None:
    """Write a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Count Ctrl-C within the context in place of raising it; yield a function that returns True after the first."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)


def inference_settings(
    model: Path, adapters: list[str] | None, base: Path | None, engine: str, platform: str, precision: str, tensor: int
) -> InferenceSettings:
    """Find the model, its adapters and its tokenizer; adapters without a name are called by their directory's."""
    from megascend.apps.train.inference import InferenceSettings
    from megascend.config.registry import ENGINES
    from megascend.errors import CheckpointError, ConfigError
    from megascend.models.checkpoint_files.hub import snapshot

    ENGINES.require(engine, setting="--engine")
    if platform not in ("auto", "cpu", "cuda", "npu"):
        raise ConfigError(f"--platform {platform}: known are auto, cpu, cuda, npu")
    model = snapshot(model, setting="MODEL")
    paths: dict[str, Path] = {}
    trained = next((path for path in (model, model / "adapter") if (path / "adapter_config.json").is_file()), None)
    if trained is not None and not (model / "hf" / "config.json").is_file():
        paths["default"] = trained
        recorded = load_json((trained / "adapter_config.json").read_bytes()).get("base_model_name_or_path")
        source = snapshot(base or Path(recorded or ""), setting=f"base model of {trained} (or --base)")
        if not (source / "config.json").is_file():
            raise CheckpointError(
                f"{trained} was trained on {recorded}, which is not a directory here: name it with --base"
            )
    else:
        source = find_checkpoint(model)
    for entry in adapters or []:
        name, separator, folder = entry.partition("=")
        path = find_adapter(Path(folder if separator else entry))
        name = name if separator else path.resolve().parent.name if path.name == "adapter" else path.resolve().name
        if not name or name in paths:
            raise ConfigError(
                f"--adapter {entry}: the name {name!r} is empty or taken; name it with --adapter NAME=DIR"
            )
        paths[name] = path
    for path in paths.values():
        if (recorded := other_base(path, source)) is not None:
            typer.secho(
                f"{path} says that it was trained on {recorded}, and is used on {source}",
                fg=typer.colors.YELLOW,
                err=True,
            )
    # A run's adapter has the tokenizer with the template that it was trained with.
    trained = next((path for path in paths.values() if (path / "tokenizer_config.json").is_file()), None)
    tokenizer = trained if len(paths) == 1 else None
    options = run_template_options(trained if tokenizer is not None else source)
    return InferenceSettings(source, paths, tokenizer, options, engine, platform, precision, tensor)  # type: ignore[arg-type]


def run_template_options(export: Path | None) -> dict[str, Any]:
    """Return ``data.chat_template_options`` of the run that exported a model or adapter, if its directory is inside the run's."""
    import yaml

    if export is None or export.resolve().name not in ("hf", "adapter"):
        return {}
    run_file = export.resolve().parent / "config.yaml"
    try:
        values = load_yaml(run_file.read_text(encoding="utf-8"))
        options = (values.get("data") or {}).get("chat_template_options") or {}
    except (OSError, yaml.YAMLError, AttributeError):  # AttributeError: not the settings of a run
        return {}
    if options:
        variables = ", ".join(f"{name}: {value}" for name, value in options.items())
        typer.secho(f"chat template with {variables} (data.chat_template_options of {run_file})", err=True)
    return options
