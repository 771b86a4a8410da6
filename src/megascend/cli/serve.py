"""``megascend serve``: the training service, on one process, on N started here, or under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def serve_command(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file with settings (docs/serve.md); options come on top.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Directory of a Hugging Face checkpoint.")] = None,
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
        bool | None, typer.Option("--durable", help="Keep the service's state in --storage, so that a restart loses no step.")
    ] = None,
    vllm: Annotated[
        list[str] | None,
        typer.Option("--vllm", metavar="URL", help="A vLLM server that samples, http://HOST:PORT; may be repeated."),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Make a small random model and serve it; shows a client program to try.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
) -> None:
    """Serve a Hugging Face checkpoint to programs written for the Tinker API, which train LoRA adapters on it.

    API keys come from MEGASCEND_API_KEYS or a file (keys); without either, one is made and shown, for this machine alone.
    --demo keeps its model and checkpoints in --storage, or in a directory that is removed at the end.
    Runs until SIGTERM or Ctrl-C. An error exits with 2.
    """
    import os
    from contextlib import ExitStack

    from megascend.cli.launch import launch, under_torchrun
    from megascend.cli.messages import show_messages
    from megascend.cli.preflight import check_service
    from megascend.cli.serve_demo import demo_directory, demo_settings
    from megascend.config.serve import load_serve_config
    from megascend.errors import ConfigError
    from megascend.serve.server import check_address, check_packages, keys_of, serve_rank

    given: dict[str, Any] = {
        "model": model, "name": name, "host": host, "port": port, "storage": storage, "precision": precision, "engine": engine,
        "durable": durable,
    }  # fmt: skip
    values = {key: value for key, value in given.items() if value is not None} | ({"vllm": vllm} if vllm else {})
    parallel = {"tensor": tensor, "pipeline": pipeline, "context": context}
    values["parallel"] = {key: value for key, value in parallel.items() if value is not None}
    show_messages()
    if demo and (config is not None or model is not None or under_torchrun()):
        raise ConfigError("--demo makes its own model on this host: leave out the file, --model and torchrun")
    with ExitStack() as stack:
        client = None
        if demo:
            directory = stack.enter_context(demo_directory(storage))
            values, client = demo_settings(directory, values), str(directory / "demo_client.py")
        settings = load_serve_config(config, values, overrides)
        if not under_torchrun():
            check_service(settings, nproc or 1)
            check_address(settings)
        check_packages()
        keys, made = keys_of(settings, dict(os.environ))
        if under_torchrun():
            if nproc is not None:
                raise ConfigError(
                    f"--nproc {nproc} under torchrun: torchrun has started the processes already; leave it out"
                )
            serve_rank(settings.model_dump_json(), keys, made)
            return
        try:
            if (nproc or 1) == 1:
                serve_rank(settings.model_dump_json(), keys, made, client)
            else:
                launch(serve_rank, settings.model_dump_json(), keys, made, client, nproc=nproc or 1)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
