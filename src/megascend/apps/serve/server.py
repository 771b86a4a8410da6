"""``megascend serve`` on one rank: build the backend, serve HTTP on rank 0, run commands until stopped."""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.serve.api import keys as api_keys
from megascend.apps.serve.samplers.vllm import VllmSampling, vllm_servers
from megascend.apps.serve.scheduler.commands import Outcome
from megascend.apps.serve.served_model import ServedModel, allowed_targets
from megascend.config import Adapters
from megascend.config.serve import ServeConfig
from megascend.config.training import ModelSettings
from megascend.errors import ConfigError, MissingDependencyError, PlatformError
from megascend.runtime.platforms.base import MemoryFigures
from megascend.surroundings import open_file_limit
from weightwire.background import BackgroundThread

if TYPE_CHECKING:
    from megascend.apps.data.images import ImageProcessor

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    settings: ServeConfig,
    keys: dict[str, str],
    ready: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until SIGTERM or SIGINT, as one rank of the world. Collective.

    Args:
        keys: tenants by the digests of their keys; used on rank 0 only.
        ready: called on rank 0 with the server's address once it accepts requests.
        stopped: polled on rank 0 about once a second; True ends the server.

    Raises:
        MegascendError: at startup; later only if a rank is lost.
    """
    from megascend.apps.data.images import ImageProcessor
    from megascend.apps.serve.scheduler.inbox import Inbox
    from megascend.apps.serve.scheduler.runner import run_commands
    from megascend.runtime.stop_signals import StopSignals

    with StopSignals(launched=True) as signals, make_backend(settings) as backend:
        servers = vllm_servers(settings, backend)  # collective: before the other ranks enter run_commands()
        generate = sampler(settings, backend).in_slices
        image_processor = ImageProcessor.for_model(settings.model, settings.images)
        if backend.rank != 0:
            run_commands(backend, settings.batch_tokens, None, lambda outcomes: None, generate, image_processor)
            return
        inbox = Inbox(
            settings.window_ms / 1000, settings.batch_tokens, lambda: signals.received is not None or stopped()
        )
        base = base_model(settings, backend, image_processor)
        device = backend.platform
        vllm = None
        if servers is not None:
            ends = end_tokens(settings)[1]
            vllm = partial(VllmSampling, servers, vocab_size=base.vocabulary, max_length=base.max_length, ends=ends)
        memory = device.memory
        with http_server(settings, keys, base, inbox, lambda: (device.name, memory()), vllm) as (address, report):
            ready(address)
            run_commands(backend, settings.batch_tokens, inbox, report, generate, image_processor)


def make_backend(settings: ServeConfig) -> Any:
    """Build the backend from the settings, with adapter slots for all models and samplers."""
    from megascend import backends
    from megascend.models.checkpoint_files.info import inspect_checkpoint, linear_layers

    info = inspect_checkpoint(settings.model)
    images = info.architecture.images
    targets = allowed_targets(
        linear_layers(info, settings.vision_tower),
        unembed=settings.unembed,
        tower=None if images is None else images.tower,
    )
    adapters = Adapters(
        max_count=settings.max_models + (0 if settings.vllm else settings.max_samplers),
        max_rank=settings.max_rank,
        targets=targets,
    )
    values: dict[str, Any] = {"adapters": adapters}
    values |= {name: getattr(settings, name) for name in ModelSettings.model_fields if name != "model"}
    return backends.make_backend(settings.engine, model=settings.model, **backends.applicable(settings.engine, values))


def sampler(settings: ServeConfig, backend: Any) -> Any:
    """Build the sampler. Without a tokenizer beside the weights, stop strings are refused."""
    from megascend.apps.sampling.sampler import Sampler

    tokenizer, ends = end_tokens(settings)
    if tokenizer is None:
        return Sampler(backend, end_tokens=ends)
    return Sampler(backend, decode=lambda tokens: str(tokenizer.decode(list(tokens))), end_tokens=ends)


def end_tokens(settings: ServeConfig) -> tuple[Any, list[int]]:
    """Load the tokenizer beside the weights, None if there is none, and the tokens that end a response."""
    from megascend.apps.train.generation import stop_tokens
    from megascend.errors import CheckpointError
    from megascend.models.checkpoint_files.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(settings.model)
    except CheckpointError:
        tokenizer = None
    return tokenizer, sorted(stop_tokens(tokenizer, settings.model))


def base_model(settings: ServeConfig, backend: Any, image_processor: ImageProcessor | None = None) -> ServedModel:
    """Describe the served model."""
    from megascend.models.checkpoint_files.files import read_config

    path = Path(os.path.abspath(settings.model))
    # Clients may also write the path as it was given here.
    names = tuple(dict.fromkeys(name for name in (settings.name, str(path), str(settings.model)) if name))
    config = read_config(settings.model)
    architecture = str((config.get("architectures") or [config.get("model_type", "unknown")])[0])
    projections = tuple(backend.engine.trainable.projections)
    return ServedModel(names, path, architecture, backend.max_length, backend.vocab_size, projections, image_processor)


def check_packages() -> None:
    """Check for missing packages before the model is loaded."""
    from megascend.apps.serve.api.wire import messages_of_client

    messages_of_client()
    for name in ("starlette", "uvicorn", "zstandard", "prometheus_client"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingDependencyError(
                f"megascend serve needs {name}: pip install 'megascend[serve]' ({error})"
            ) from None


def keys_of(settings: ServeConfig, environment: dict[str, str]) -> tuple[dict[str, str], str | None]:
    """Return tenants by the digests of their keys, and a newly generated key if none is configured.

    With ``durable``, the digest of a generated key is stored in ``storage``, so that it stays valid after a restart.
    """
    tenants = api_keys.parse_keys(environment.get(api_keys.VARIABLE, ""))
    if settings.keys is not None:
        tenants |= api_keys.read_keys(settings.keys)
    if tenants:
        return tenants, None
    if settings.host not in LOOPBACK:
        raise ConfigError(
            f"host {settings.host} is reachable from other machines, and no API keys are set: set {api_keys.VARIABLE} or keys"
        )
    if settings.durable and environment.get("RANK", "0") == "0":
        return api_keys.load_or_create(settings.storage / "made_key.sha256")
    key = api_keys.new_key()
    return {api_keys.key_digest(key): "local"}, key


@contextmanager
def http_server(
    settings: ServeConfig,
    keys: dict[str, str],
    base: ServedModel,
    inbox: Any,
    memory: Callable[[], tuple[str, MemoryFigures]] | None = None,
    vllm: Callable[[Callable[[list[Outcome]], None]], VllmSampling] | None = None,
) -> Iterator[tuple[str, Callable[[list[Outcome]], None]]]:
    """Run the HTTP server in a thread; yield its address and the function to report command outcomes to.

    Args:
        memory: returns the device's name and memory, for the status page.
        vllm: builds the vLLM sampling that replaces the ranks', given the function to report outcomes to.
    """
    from megascend.apps.rl.rollout.connections import BoundedServer
    from megascend.apps.serve.api.application import make_application
    from megascend.apps.serve.service import Service
    from megascend.apps.serve.store.recovery import lock

    with ExitStack() as resources:
        # Before the checkpoints are read; a durable one is locked with its state.
        if not settings.durable:
            resources.callback(lock(settings.storage))
        service = Service(settings, base, inbox)
        service.memory = memory
        # Before listening: a client that reconnects must find its session, and requests must queue behind the replayed ones.
        if settings.durable:
            from megascend.apps.serve.store.recovery import keep_state

            keep_state(service)
        if vllm is not None:
            service.vllm = vllm(service.finish)
            service.figures.registry.register(service.vllm.pool)
        application = make_application(service, api_keys.Keys(keys))
        tls = settings.tls_certificate is not None
        listening = _listen(settings)
        # Forwarded headers count only from the proxies that are configured: clients could choose the address in the audit log.
        server = BoundedServer(
            application, _max_connections(), log_level="error", lifespan="on",
            timeout_keep_alive=75, timeout_graceful_shutdown=5, h11_max_incomplete_event_size=65536,
            proxy_headers=bool(settings.proxies), forwarded_allow_ips=settings.proxies,
            ssl_certfile=settings.tls_certificate, ssl_keyfile=settings.tls_key,
        )  # fmt: skip
        problems: list[BaseException] = []

        def ended(error: BaseException) -> None:
            problems.append(error)
            logging.getLogger(__name__).error("the HTTP server has ended", exc_info=error)
            inbox.close()  # which ends the ranks' loop: without requests they would wait for ever

        thread = BackgroundThread(server.run, [listening], name="http", on_error=ended)
        thread.start()
        while not server.started:  # uvicorn has no event to wait for
            thread.join(0.01)
            if not thread.is_alive():
                raise ConfigError("the HTTP server did not start; see its messages above")
        loop = server.servers[0].get_loop()  # created in the thread by uvicorn
        service.ready = True

        def report(outcomes: list[Outcome]) -> None:
            # Called on the ranks' thread; the service's state belongs to the event loop.
            loop.call_soon_threadsafe(service.finish, outcomes)

        host, port = listening.getsockname()[:2]
        try:
            yield f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}", report
            if problems:
                raise PlatformError(f"the HTTP server has ended: {problems[0]!r:.80}") from problems[0]
        finally:
            try:
                if service.vllm is not None:  # while the loop still runs
                    asyncio.run_coroutine_threadsafe(service.vllm.close(), loop).result(30)
            finally:
                server.should_exit = True
                inbox.close()
                thread.join(10)  # longer than uvicorn's grace for open requests; the thread is a daemon


MAX_CONNECTIONS = 4096


def _max_connections() -> int:
    """Return the maximum number of connections, after raising this process's limit of open files as far as allowed."""
    # The rest is for files, the database and the sockets between ranks.
    return max(64, min(MAX_CONNECTIONS, open_file_limit(MAX_CONNECTIONS + 1024) - 512))


def _listen(settings: ServeConfig) -> socket.socket:
    from megascend.apps.rl.rollout.connections import listen

    try:
        return listen(settings.host, settings.port)
    except OSError as error:
        advice = "; choose another --port (0: any free one)" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}{advice}") from None


def check_address(settings: ServeConfig) -> None:
    """Check before the model is loaded that the address can be bound."""
    _listen(settings).close()


def serve_rank(values: str, keys: dict[str, str], new_key: str | None, client: str | None = None) -> None:
    """Serve as one rank; arguments are cheap to pickle, for spawned ranks.

    Args:
        values: settings as JSON.
        keys: tenants by the digests of their keys.
        new_key: generated key to print, if any.
        client: path of an example client program to print.
    """
    settings = ServeConfig.model_validate_json(values)
    model, storage = os.path.abspath(settings.model), os.path.abspath(settings.storage)

    def ready(address: str) -> None:
        print(f"serving {settings.name or model} at {address}", flush=True)
        print(f"export TINKER_BASE_URL={address}" + (f" TINKER_API_KEY={new_key}" if new_key else ""), flush=True)
        if client is not None:
            print(f"python {client}", flush=True)
        print(f"checkpoints: {storage}", flush=True)
        # A browser keeps what follows # to itself; the page takes the key from there.
        print(f"status page: {address}/{f'#{new_key}' if new_key else ''} (Ctrl-C stops the server)", flush=True)

    serve(settings, keys, ready)
    if os.environ.get("RANK", "0") == "0":
        print("stopped", flush=True)
