"""Start SkyRL's Tinker server with megascend as its backend, until SkyRL accepts a class path for ``--backend``.

    python -m megascend.integrations.skyrl.launch --base-model MODEL --backend-config '{"ranks": 2}' [SkyRL's options]

starts SkyRL's own API server. Its engine process is this module again (with ``--engine``), under torchrun for several ranks. Two
functions of SkyRL are patched: the lookup of backends by name, and the start of the engine by ``uv run``.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from typing import Any

from megascend.config.registry import load
from megascend.config.serve import ServeConfig
from megascend.integrations.skyrl.settings import NAME, BackendConfig, serve_settings

ENGINE = "--engine"
MODULE = "megascend.integrations.skyrl.launch"


def backend_classes(name: str) -> tuple[Any, Any]:
    """Return the backend class of a class path, ``package.module:Class``, and its settings class."""
    backend = load(name)
    return backend, backend.config_class


def engine_command(config: Any, arguments: list[str]) -> list[str]:
    """Build the command line of the engine process from SkyRL's EngineConfig, and the same as options."""
    ranks = BackendConfig(**config.backend_config).ranks
    # --standalone: a free port of this host, so that two servers do not collide on torchrun's default.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *torchrun, "-m", MODULE, ENGINE, *arguments]


def take_class_paths() -> None:
    """Patch SkyRL's engine in this process to accept a backend's class path."""
    from skyrl.tinker import engine

    from megascend.changes import patch

    builtin = engine.get_backend_classes

    def get_backend_classes(backend_name: str, use_ray: bool = False) -> tuple[Any, Any]:
        # SkyRL's own backends have plain names without a colon.
        return backend_classes(backend_name) if ":" in backend_name else builtin(backend_name, use_ray=use_ray)

    patch(engine, "get_backend_classes", get_backend_classes, "takes a class path, too")


def run_server(arguments: list[str]) -> None:
    """Run SkyRL's API server, which starts the engine."""
    from skyrl.tinker import config as skyrl_config

    from megascend.changes import patch

    sys.argv = ["skyrl.tinker.api", *arguments]
    api = import_module("skyrl.tinker.api")

    def command(parent_cmd: list[str], engine_config: Any) -> list[str]:
        return engine_command(engine_config, skyrl_config.config_to_argv(engine_config))

    # SkyRL starts its engine by `uv run` in a new environment, which would have no megascend.
    patch(api, "_build_uv_run_cmd_engine", command, "starts megascend's ranks instead of uv")
    parser = argparse.ArgumentParser(prog="SkyRL's Tinker server on megascend")
    skyrl_config.add_model(parser, skyrl_config.EngineConfig)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = vars(parser.parse_args(arguments))
    host, port = options.pop("host"), options.pop("port")
    api.app.state.engine_config = skyrl_config.EngineConfig.model_validate(options)
    import uvicorn

    uvicorn.run(api.app, host=host, port=port, log_level="warning")


def run_engine(arguments: list[str]) -> None:
    """Run SkyRL's engine on rank 0, and the work loop on other ranks."""
    import os

    # SkyRL's engine polls its database and must run once; the other ranks follow rank 0's commands.
    if os.environ.get("RANK", "0") == "0":
        take_class_paths()
        from skyrl.tinker import engine

        sys.argv = ["skyrl.tinker.engine", *arguments]
        engine.main()
        return
    from megascend.integrations.skyrl.ranks import follow

    follow(settings_from(arguments))


def settings_from(arguments: list[str]) -> ServeConfig:
    """Parse megascend's settings from the engine's command line, on ranks without SkyRL's engine."""
    parser = argparse.ArgumentParser(allow_abbrev=False)  # otherwise --backend would parse as --backend-config
    parser.add_argument("--base-model")
    parser.add_argument("--backend-config", type=json.loads, default={})
    # The rest are SkyRL's options, which only rank 0 needs.
    options, _ = parser.parse_known_args(arguments)
    return serve_settings(options.base_model, BackendConfig(**options.backend_config))


def main() -> None:
    """Run the engine process if the first argument is ``--engine``, else the server; the default backend is megascend's."""
    arguments = sys.argv[1:]
    if arguments[:1] == [ENGINE]:
        run_engine(arguments[1:])
        return
    if not any(word.partition("=")[0] == "--backend" for word in arguments):
        arguments = ["--backend", NAME, *arguments]
    run_server(arguments)


if __name__ == "__main__":
    main()
