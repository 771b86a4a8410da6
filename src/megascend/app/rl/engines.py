"""The engines that a run file names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megascend.app.rl.servers import owner_name
from megascend.config.rl import VLLM, RlConfig
from megascend.errors import ConfigError
from weightwire.errors import SecretKeyError
from weightwire.keys import load_key

if TYPE_CHECKING:
    from megascend.app.rl.servers import EngineServers
    from weightwire.engine import InferenceEngine


CLAIM_S = 120.0
"""Seconds to wait until another owner releases a controller's engines: an earlier run's lease may have to lapse."""


def make_engines(config: RlConfig, servers: EngineServers | None = None) -> list[InferenceEngine]:
    """Make an engine for each entry of ``config.engines``, or one of all engines of ``rollout.controller``.

    Args:
        servers: servers that the run has started, for the entries ``vllm``.
    """
    if config.rollout.controller is not None:
        from megascend.rollout.controller.client import ControllerEngine

        timeout_s = config.rollout.timeout_s
        return [
            ControllerEngine(
                config.rollout.controller,
                load_key(),
                owner=owner_name(config),
                generate_timeout_s=timeout_s,
                wait_s=CLAIM_S,
            )
        ]
    return [make_engine(config, index, address, servers) for index, address in enumerate(config.engines)]


def check_engines(engines: Sequence[str], controller: str | None = None, teacher: str = "local") -> None:
    """Check the settings ``engines``, ``rollout.controller`` and ``teacher.engine`` without a request."""
    check_addresses(engines)
    servers = [f"engines: {address}" for address in engines if address not in ("local", VLLM)]
    if controller is not None:
        servers = [f"rollout.controller: {controller}"]
    if teacher != "local":
        servers.append(f"teacher.engine: {teacher}")
    if servers:
        try:
            load_key()
        except SecretKeyError as error:
            raise ConfigError(f"{servers[0]} takes signed requests, and there is {error}") from error


def check_addresses(engines: Sequence[str]) -> None:
    """Find out that an entry of ``engines`` names none."""
    for address in engines:
        server = address.startswith("http://") and address.removeprefix("http://").strip("/")
        if address not in ("local", VLLM) and not server:
            raise ConfigError(
                f"engines: {address!r} is neither local nor {VLLM} nor the address of a server (http://HOST:PORT)"
            )


def make_engine(config: RlConfig, index: int, address: str, servers: EngineServers | None = None) -> InferenceEngine:
    """Build the client of engine ``address``, the ``index``-th of the run."""
    if address == "local":
        from megascend.rollout.engines.local import LocalEngine

        return LocalEngine(
            config.model,
            name=f"local engine {index}",
            timeout_s=config.rollout.timeout_s,
            precision=config.precision,
            # With one seed, engines would draw alike for requests that have none of their own.
            seed=config.seed + index,
        )
    if address == VLLM:
        assert servers is not None
        return servers.client(index)
    from megascend.rollout.engines.vllm import VllmEngine

    return VllmEngine(address, owner=owner_name(config), generate_timeout_s=config.rollout.timeout_s)


def stop_tokens(tokenizer: object, names: Sequence[str]) -> tuple[int, ...]:
    """Return the token ids that end a response: the end of sequence, and those of ``names``."""
    eos = tokenizer.eos_token_id  # type: ignore[attr-defined]
    tokens = [] if eos is None else [eos]
    for name in names:
        ids = tokenizer.encode(name, add_special_tokens=False)  # type: ignore[attr-defined]
        if len(ids) != 1:
            raise ConfigError(f"rollout.stop: {name!r} is {len(ids)} tokens of the model's tokenizer, not one")
        tokens.append(ids[0])
    if not tokens:
        raise ConfigError(
            "rollout.stop: the tokenizer has no end-of-sequence token, so a token that ends responses must be named"
        )
    # In order and once: the end of sequence may be named as well.
    return tuple(dict.fromkeys(tokens))
