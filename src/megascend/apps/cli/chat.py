"""``megascend chat``: talk with a model, a run's export or an adapter in the terminal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from megascend.apps.cli import options
from megascend.apps.cli.messages import report

if TYPE_CHECKING:
    from megascend.apps.sampling.request import SamplingParams
    from megascend.apps.train.inference import ResponseModel


def chat_command(
    model: options.Model,
    adapters: options.AdapterNames = None,
    base: options.Base = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of every conversation.")] = None,
    engine: options.Engine = "single",
    platform: options.Platform = "auto",
    dtype: options.Dtype = "bf16",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
) -> None:
    """Talk with a model in the terminal, in one process: /reset begins again, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    from megascend.apps.train.exports import inference_settings
    from megascend.errors import ConfigError

    settings = inference_settings(model, adapters, base, engine, platform, dtype)
    if len(settings.adapters) > 1:
        raise ConfigError(
            f"chat answers with one adapter, and {len(settings.adapters)} are given: {', '.join(settings.adapters)}"
        )
    sampling = options.sampling_params(max_tokens, temperature, top_p, seed)
    from megascend.apps.train.inference import loaded_model

    with loaded_model(settings) as loaded:
        if not loaded.tokenizer.chat_template:
            raise ConfigError(
                f"{settings.model}: the tokenizer has no chat template; megascend generate continues plain texts"
            )
        name = f" with {next(iter(settings.adapters.values()))}" if settings.adapters else ""
        typer.echo(f"{settings.model}{name}; /reset begins again, /exit ends")
        converse(loaded, sampling, system)


def converse(model: ResponseModel, sampling: SamplingParams, system: str | None) -> None:
    """Read the user's turns from standard input and answer them, until its end."""
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
            response = model.stream(replace(request, params=params), partial(print, end="", flush=True), interrupted)
        typer.echo("")
        if response.error is not None:
            report(response.error)
            continue
        if response.finish_reason != "stop":
            typer.echo(
                f"[{'stopped' if response.finish_reason == 'cancelled' else f'cut off after {response.tokens} tokens'}]"
            )
        messages += [turn, {"role": "assistant", "content": response.text}]


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Count Ctrl-C within the context in place of raising it; yield a function that returns True after the first."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)
