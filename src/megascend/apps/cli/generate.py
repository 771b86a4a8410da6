"""``megascend generate``: answer the prompts of a file with a model, a run's export or an adapter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megascend.apps.cli import options


def generate_command(
    model: options.Model,
    prompts: Annotated[
        str, typer.Argument(help="JSONL file whose lines have `prompt` or `messages`, or - for standard input.")
    ] = "-",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSONL file to write; default: standard output.")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Each line of PROMPTS is the user's turn of a conversation, not JSON.")
    ] = False,
    adapters: options.AdapterNames = None,
    base: options.Base = None,
    engine: options.Engine = "single",
    nproc: options.Ranks = 1,
    tensor: options.Tensor = 1,
    platform: options.Platform = "auto",
    dtype: options.Dtype = "bf16",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, help="Longest response, in tokens; default: 256, or what the context has left."
        ),
    ] = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
) -> None:
    """Answer prompts, and write their lines with response, tokens and finish_reason added.

    A line's `adapter` names the adapter to answer with (null: the base model); without it, the only one that is loaded answers.
    """
    from megascend.apps.cli.launch import on_ranks
    from megascend.apps.train.exports import inference_settings
    from megascend.errors import ConfigError, DataError

    options.require_no_file("--output", output)
    sampling = options.sampling_params(max_tokens or 256, temperature, top_p, seed)
    records = read_lines(prompts, text=text)
    settings = inference_settings(model, adapters, base, engine, platform, dtype, tensor)
    from megascend.apps.train.inference import ADAPTER_KEY, generate

    named = {str(record[ADAPTER_KEY]) for record in records if record.get(ADAPTER_KEY) is not None}
    unknown = sorted(named - settings.adapters.keys())
    if unknown:
        raise ConfigError(
            f"a prompt names the adapter {unknown[0]!r}; --adapter NAME=DIR has loaded: {', '.join(settings.adapters) or 'none'}"
        )
    if refused := on_ranks(generate, settings, records, sampling, output, max_tokens is None, nproc=nproc):
        raise DataError(f"{refused} of {len(records)} prompts could not be answered; their lines have 'error'")


def read_lines(source: str, *, text: bool) -> list[dict[str, Any]]:
    """Read prompts from a JSONL file or standard input (``-``); ``text``: each line is a user's turn."""
    from megascend.errors import DataError

    name = "standard input" if source == "-" else source
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{name} cannot be read: {reason}; name a file of prompts, or - for standard input") from None
    from megascend.apps.data.findings import Findings
    from megascend.apps.rl.rollout.prompts import numbered_lines, parse_prompt

    findings, records = Findings(), []
    for number, line in numbered_lines(content, name):
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
