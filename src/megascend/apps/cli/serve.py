"""``megascend serve``: the training service, on one process, on N started here, or under torchrun."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from megascend.apps.cli import options

DEMO = "demo"

DEMO_CLIENT = '''\
"""Teaches an adapter one line, byte by byte, and lets it complete the line. TINKER_BASE_URL and TINKER_API_KEY say where."""

import os

import tinker
from tinker import types

LINE, KNOWN = b"the quick brown fox jumps over the lazy dog", 10

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model="demo", rank=16, seed=0).result()
tokens = list(LINE)  # this model's tokens are bytes
inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
for step in range(60):
    learned = trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=5e-3))
    if step % 20 == 19:
        print(f"step {step + 1}: loss per token {learned.result().metrics['loss:sum'] / len(tokens[1:]):.3f}", flush=True)

sampler = trainer.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=len(tokens) - KNOWN, temperature=0.0)
found = sampler.sample(types.ModelInput.from_ints(tokens[:KNOWN]), 1, params).result().sequences[0].tokens
print("completed:", (LINE[:KNOWN] + bytes(token for token in found if token < 256)).decode("utf-8", "replace"), flush=True)
os._exit(0)  # the client's threads would wait for a minute
'''


def serve_command(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file with settings (docs/serve.md); options come on top.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint directory, or Hub name.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients may call the model, beside its path.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port to listen on; default: 8000. 0: any free one.")
    ] = None,
    storage: Annotated[
        Path | None, typer.Option("--storage", help="Directory of the checkpoints that clients save.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, fp16 or bf16 (default).")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="megatron (default), fsdp or single.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="Start this many processes here.")] = None,
    tensor: Annotated[int | None, typer.Option("--tensor", min=1, help="Tensor parallel size.")] = None,
    pipeline: Annotated[int | None, typer.Option("--pipeline", min=1, help="Pipeline parallel size.")] = None,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Context parallel size.")] = None,
    durable: Annotated[
        bool | None,
        typer.Option("--durable", help="Keep the service's state in --storage, so that a restart loses no step."),
    ] = None,
    vllm: Annotated[
        list[str] | None,
        typer.Option("--vllm", metavar="URL", help="A vLLM server that samples, http://HOST:PORT; may be repeated."),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Make a small random model and serve it; shows a client program to try.")
    ] = False,
    overrides: options.Overrides = None,
) -> None:
    """Serve a Hugging Face checkpoint to programs written for the Tinker API, which train LoRA adapters on it.

    API keys come from MEGASCEND_API_KEYS or a file (keys); without either, one is made and shown, for this machine alone.
    --demo keeps its model and checkpoints in --storage, or in a directory that is removed at the end.
    Runs until SIGTERM, Ctrl-C or SIGHUP (a lost terminal), even if nothing reads its output. An error exits with 2.
    """
    from contextlib import ExitStack

    from megascend.apps.cli.launch import start_ranks, under_torchrun
    from megascend.apps.serve.server import check_address, check_packages, keys_of
    from megascend.apps.train.preflight import check_service
    from megascend.config.serve import load_serve_config
    from megascend.errors import ConfigError

    # Only options that were given: defaults belong to the configuration file.
    values = given(
        model=model, name=name, host=host, port=port, storage=storage, precision=precision, engine=engine, durable=durable,
        vllm=vllm or None, parallel=given(tensor=tensor, pipeline=pipeline, context=context),
    )  # fmt: skip
    if demo and (config is not None or model is not None or under_torchrun()):
        raise ConfigError("--demo makes its own model on this host: leave out the file, --model and torchrun")
    with ExitStack() as stack:
        client = None
        if demo:
            directory = stack.enter_context(demo_directory(storage))
            values, client = demo_settings(directory, values), str(directory / "demo_client.py")
        settings = options.read_run_file(load_serve_config, config, values, overrides)
        # Once, in the parent, before it starts the ranks.
        if not under_torchrun():
            check_service(settings, nproc or 1)
            check_address(settings)
        check_packages()
        # Before the ranks start: with several, all must know the same keys, and one generated key is printed once.
        keys, generated_key = keys_of(settings, dict(os.environ))
        arguments = (settings.model_dump_json(), keys, generated_key, client)
        if under_torchrun(nproc):
            serve_process(*arguments)
        else:
            start_ranks(serve_process, *arguments, nproc=nproc or 1)


def given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def serve_process(settings: str, keys: dict[str, str], generated_key: str | None, client: str | None) -> None:
    """Serve as one rank, in order to the end: arguments as those of :func:`~megascend.apps.serve.server.serve_rank`."""
    from megascend.apps.serve.server import serve_rank
    from megascend.runtime.io.lasting_output import LastingOutput
    from megascend.runtime.stop_signals import ALWAYS, stopping

    LastingOutput().install()
    for number in stopping():
        if number not in ALWAYS:  # uvicorn handles SIGINT and SIGTERM itself
            # As on SIGTERM, on which uvicorn finishes open requests.
            signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    serve_rank(settings, keys, generated_key, client)


# --- the demo ---


@contextmanager
def demo_directory(storage: Path | None) -> Iterator[Path]:
    """Make a directory with ``model``, which is made if it is not there, and ``demo_client.py``.

    Args:
        storage: where; None: in a directory that is removed at the end.
    """
    if storage is not None:
        _fill(storage)
        yield storage
        return
    with tempfile.TemporaryDirectory(prefix="megascend-demo-") as directory:
        _fill(Path(directory))
        yield Path(directory)


def demo_settings(directory: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings to serve what :func:`demo_directory` made, under those that the user gave."""
    defaults = {"model": directory / "model", "name": DEMO, "precision": "fp32"}
    return defaults | dict(values) | {"storage": directory / "checkpoints"}


def _fill(directory: Path) -> None:
    from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint

    if not (directory / "model" / "config.json").exists():
        write_checkpoint(directory / "model", ModelSize(hidden=128, layers=2, context=512))
    (directory / "demo_client.py").write_text(DEMO_CLIENT, encoding="utf-8")
