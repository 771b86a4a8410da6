"""The engines that a run file names, and their updates while some are lost and found again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from megascend.apps.rl.servers import owner_name
from megascend.apps.train.generation import stop_tokens
from megascend.config.registry import inference_engine, load
from megascend.config.rl import SGLANG, RlConfig
from megascend.errors import (
    ConfigError,
    ControllerError,
    ControllerLostError,
    EngineError,
    EngineFaultError,
    EngineLostError,
    WeightSyncError,
)
from megascend.models.checkpoint_files.tokenizer import following_tokens
from megascend.surroundings import announce
from weightwire.engine_calls import LoopThread
from weightwire.errors import AuthError, SecretKeyError
from weightwire.keys import load_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.rl.rollout.collector import RolloutCollector
    from megascend.apps.rl.rollouts import SharedRollouts
    from megascend.apps.rl.servers import EngineServers
    from megascend.backend import Backend
    from megascend.sync import WeightSync
    from megascend.sync.push import PushResult
    from weightwire.engine import InferenceEngine

log = logging.getLogger(__name__)

CLAIM_S = 120.0
"""Seconds to wait until another owner releases a controller's engines: an earlier run's lease may have to lapse."""


CONNECT_S = 5.0
"""Seconds for which rank 0 waits for engines at a time; in between, ranks see that all of them are there."""
FAILURES = 2
"""Failures of updates in a row after which an engine counts as lost, not counting those that the loss of another explains."""


class EngineUpdates:
    """Updates of the engines that answer. Every method is collective.

    An engine that is lost during an update is left out, and the update is repeated for the others that do not have it. One that
    is back gets the current weights before it gets a prompt. If an update fails and no engine is lost, each engine gets it alone:
    one that fails again counts as lost although it reports its version, and holds up no other from then on.

    Args:
        rollouts: rollouts whose collector knows the engines.

    Attributes:
        offset: engines' versions minus the trainer's steps. Engines count up for as long as they run, and may have lived longer
            than this process.
    """

    def __init__(self, backend: Backend, rollouts: SharedRollouts, sync: WeightSync, adapter: str | None) -> None:
        self._backend, self._rollouts, self._sync, self._adapter = backend, rollouts, sync, adapter
        self._failures: dict[InferenceEngine, int] = {}  # in a row, on rank 0; by engines of updates that failed
        self.offset = 0

    def begin(self, stop: Callable[[], bool]) -> bool:
        """Give the trainer's weights to the engines that answer, once at least one does; return False if ``stop`` came first.

        Args:
            stop: returns True once this rank has received a signal.

        Raises:
            EngineLostError: none has answered for ``rollout.engines_lost_s``.
            EngineError, WeightSyncError: an engine refused.
        """
        announce("waiting for the inference engines; local ones load the model")
        slice_s = min(CONNECT_S, self._backend.groups.timeout_s / 4)
        with self._backend.groups.monitor.phase("engines"):
            while (
                versions := self._rollouts.on_rank_0(lambda collector: collector.run(collector.pool.connect(slice_s)))
            ) is None:
                (stopping,) = self._backend.any_rank(stop())
                if stopping:
                    return False
        steps = self._backend.step_count
        self.offset = 1 + max(versions) - steps
        # Also after a resume: engines may have been restarted with the checkpoint's first weights.
        self._push(steps, returned=True)
        return True

    def push(self, step: int) -> list[PushResult]:
        """Give the weights after ``step`` to all engines that have earlier ones of this run.

        Returns:
            What was pushed: several results if engines got the weights one after the other, none if there was no engine to push
            to, or all of them were lost.

        Raises:
            WeightSyncError: an engine has refused the weights, or the trainer cannot send them.
        """
        return self._push(step, returned=False)

    def recover(self) -> None:
        """Send the current weights to engines that have returned; one that refuses them remains excluded."""
        if self._rollouts.on_rank_0(lambda collector: collector.pool.returned):
            try:
                self._push(self._backend.step_count, returned=True)
            except (WeightSyncError, ConfigError) as error:
                # On every rank; the other engines keep sampling.
                problem = error
                self._rollouts.on_rank_0(
                    lambda collector: collector.call(collector.pool.reject, self._sync.engines, problem)
                )

    def _push(self, step: int, *, returned: bool) -> list[PushResult]:
        version = step + self.offset
        pushed: list[PushResult] = []

        def choose(collector: RolloutCollector) -> tuple[int, bool]:
            """Choose the engines of the next update; return their number, and whether others have to wait for another one."""
            # Only rank 0 has engines.
            engines = collector.run(collector.pool.targets(version, returned=returned))
            sound = [engine for engine in engines if engine not in self._failures]
            self._sync.engines = sound or engines[:1]
            return len(self._sync.engines), len(self._sync.engines) < len(engines)

        while True:
            count, incomplete = self._rollouts.on_rank_0(choose)
            if not count:
                return pushed
            start = time.monotonic()
            try:
                pushed.append(self._sync.push(version=version, adapter=self._adapter))
            except WeightSyncError as error:
                seconds = time.monotonic() - start
                if self._rollouts.on_rank_0(partial(self._failed, version=version, error=error, seconds=seconds)):
                    raise
            else:
                self._rollouts.on_rank_0(lambda collector: self._succeeded(collector, version))
                if not incomplete:
                    return pushed

    def _succeeded(self, collector: RolloutCollector, version: int) -> None:
        for engine in self._sync.engines:
            self._failures.pop(engine, None)
        collector.updated(version, self._sync.engines)

    def _failed(self, collector: RolloutCollector, version: int, error: WeightSyncError, seconds: float) -> bool:
        """Find out which engines an update that failed is repeated for; return True if it ends the run. On rank 0."""
        engines = collector.run(collector.pool.update_failed(version, self._sync.engines))
        for engine in engines:
            self._failures[engine] = self._failures.get(engine, 0) + 1
        if len(engines) == 1 and self._failures[engines[0]] >= FAILURES:
            if not isinstance(error, EngineFaultError):
                return True
            problem = EngineFaultError(
                f"it reports its version and took no weights, twice (sync.timeout_s: {self._sync.timeout_s:g}): {error}"
            )
            collector.call(collector.pool.reject, engines, problem, seconds)
            return False
        log.warning("the update to version %d is repeated for the engines that need it: %s", version, error)
        return False


def make_engines(config: RlConfig, servers: EngineServers | None = None) -> list[InferenceEngine]:
    """Make an engine for each entry of ``config.engines``, or for each engine of ``rollout.controller``.

    Args:
        servers: servers that the run has started, for the entries ``vllm``.
    """
    controller = config.rollout.controller
    if controller is not None:
        from megascend.apps.rl.rollout.controller.client import ControllerEngine

        # A claim for each: one of all of them would be lost with any.
        return [
            ControllerEngine(
                controller,
                load_key(),
                owner=owner_name(config),
                engines=[name],
                generate_timeout_s=config.rollout.timeout_s,
                wait_s=CLAIM_S,
            )
            for name in controller_engines(config, controller)
        ]
    return [make_engine(config, index, address, servers) for index, address in enumerate(config.engines)]


def controller_engines(config: RlConfig, controller: str) -> list[str]:
    """Return the names of a controller's engines; wait for it if it does not run yet."""
    from megascend.apps.rl.rollout.controller.client import ControllerClient
    from megascend.apps.rl.servers import START_S

    wait_s = min(float(config.rollout.engines_lost_s), START_S)
    client = ControllerClient(controller, load_key(), caller=owner_name(config), timeout_s=wait_s)
    with LoopThread("controller status") as thread:
        try:
            return list(thread.run(client.status())["engines"])
        except ControllerLostError as error:
            raise EngineLostError(f"rollout.controller: {error} ({wait_s:g} s, rollout.engines_lost_s)") from error
        except (ControllerError, AuthError) as error:
            raise EngineError(f"rollout.controller: {error}") from error


def check_engines(engines: Sequence[str], controller: str | None = None, teacher: str = "local") -> None:
    """Check the settings ``engines``, ``rollout.controller`` and ``teacher.engine`` without a request."""
    servers = [f"engines: {address}" for address in engines if inference_engine(address).is_server]
    if controller is not None:
        servers = [f"rollout.controller: {controller}"]
    if teacher != "local" and not teacher.startswith(SGLANG):
        servers.append(f"teacher.engine: {teacher}")
    if servers:
        try:
            load_key()
        except SecretKeyError as error:
            raise ConfigError(f"{servers[0]} takes signed requests, and there is {error}") from error


def make_engine(config: RlConfig, index: int, address: str, servers: EngineServers | None = None) -> InferenceEngine:
    make: MakeEngine = load(inference_engine(address).make)
    return make(config, index, address, servers)


def local_engine(config: RlConfig, index: int, address: str, servers: EngineServers | None) -> InferenceEngine:
    from megascend.apps.rl.rollout.engines.local import LocalEngine

    return LocalEngine(
        config.model,
        name=f"local engine {index}",
        timeout_s=config.rollout.timeout_s,
        precision=config.precision,
        # With the same seed, all engines would draw the same numbers for requests without a seed.
        seed=config.seed + index,
    )


def started_vllm_engine(config: RlConfig, index: int, address: str, servers: EngineServers | None) -> InferenceEngine:
    return cast("EngineServers", servers).client(index)


def vllm_engine(config: RlConfig, index: int, address: str, servers: EngineServers | None) -> InferenceEngine:
    from megascend.apps.rl.rollout.engines.vllm import VllmEngine

    return VllmEngine(address, owner=owner_name(config), generate_timeout_s=config.rollout.timeout_s)


MakeEngine = Callable[["RlConfig", int, str, "EngineServers | None"], "InferenceEngine"]
"""Makes the client of the engine ``index`` of a run from its entry of ``engines`` and the servers that the run has started."""


def response_ends(tokenizer: PreTrainedTokenizerBase, config: RlConfig) -> tuple[int, ...]:
    """Return the token ids that end a response: those of the model, and those that ``rollout.stop`` names."""
    tokens = stop_tokens(tokenizer, config.model)
    for name in config.rollout.stop:
        ids = following_tokens(name, tokenizer)
        if len(ids) != 1:
            raise ConfigError(f"rollout.stop: {name!r} is {len(ids)} tokens of the model's tokenizer, not one")
        tokens.add(ids[0])
    if not tokens:
        raise ConfigError(
            "rollout.stop: neither tokenizer nor generation_config.json names an end-of-sequence token, so a token that ends "
            "responses must be named"
        )
    return tuple(sorted(tokens, key=lambda token: (token != tokenizer.eos_token_id, token)))
