"""The rollout ``megascend`` for verl: replicas that serve requests, and the adapter that sends them the trainer's weights.

verl 0.9.1 has rollouts with vLLM, SGLang and TensorRT-LLM, all in verl's own environment; its Hugging Face rollout is not
registered (``_ROLLOUT_REGISTRY`` of ``verl/workers/rollout/base.py``). Engines of this rollout need neither an accelerator nor
verl's environment. :mod:`megascend.integrations.verl.plugin` registers it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout import base, replica
from verl.workers.rollout.utils import ensure_async_iterator

from megascend.errors import ConfigError
from megascend.integrations.verl.rollout_server import DTYPES, RolloutServer
from megascend.integrations.verl.rollout_settings import RolloutSettings, translate_rollout
from megascend.integrations.verl.settings_table import ROLLOUT_NAME
from megascend.sync.delivery import Delivery
from megascend.sync.push import push_tensors
from weightwire.remote_engine import RemoteEngine


def rollout_settings(config: Any) -> RolloutSettings:
    """Translate verl's ``RolloutConfig``, or the OmegaConf section that it is built from."""
    return translate_rollout(_plain(config))


def _plain(value: Any) -> Any:
    """Convert verl's dataclasses, which are mappings, and OmegaConf's containers to dictionaries."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {name: _plain(value[name]) for name in value}
    return value


def actor_name(replica_rank: int) -> str:
    """Return the Ray actor name of a replica's server."""
    return f"megascend_rollout_{replica_rank}"


def stop_tokens(model: HFModelConfig) -> tuple[int, ...]:
    """Return the ids that end a response: the generation config's, and the tokenizer's end of sequence."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    candidates = [*(eos if isinstance(eos, list) else [eos]), getattr(model.tokenizer, "eos_token_id", None)]
    ids = tuple(dict.fromkeys(int(token) for token in candidates if token is not None))
    if not ids:
        raise ConfigError(f"{model.local_path}: neither its generation config nor its tokenizer has an end of sequence")
    return ids


class Replica(replica.RolloutReplica):
    """One engine behind an actor that verl's agents call. It has as many workers as the replica has trainer ranks."""

    async def launch_servers(self) -> None:
        """Start the actor on the node of the replica's first rank, and the engine."""
        if self.is_reward_model or self.is_teacher_model:
            raise ConfigError(
                f"the rollout {ROLLOUT_NAME} samples from the policy: reward models and teachers need another one"
            )
        if self.nnodes != 1:
            raise ConfigError(f"a replica of {self.world_size} ranks on {self.nnodes} nodes: an engine is on one node")
        settings = rollout_settings(self.config)
        model: HFModelConfig = omega_conf_to_dataclass(self.model_config, HFModelConfig)
        first = self.workers[0]
        # The actor runs where the first rank is: weights then travel within the host.
        node = await first.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(RolloutServer)
            .options(
                name=actor_name(self.replica_rank),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                # Ray's default of 1000 for async actors would queue requests of large batches.
                max_concurrency=self.max_concurrency,
                # verl's placement groups have reserved the CPUs already; another request could wait forever.
                num_cpus=0,
            )
            .remote(settings, model.local_path, self.replica_rank, stop_tokens(model))
        )
        self.servers = [server]
        self._server_handle = server
        # verl uses it as a key only, so the engine's name will do.
        self._server_address = await server.start.remote()


class ServerAdapter(base.BaseRollout):
    """One trainer rank's side: the first rank of a replica sends the weights to its engine, the others take part in the export.

    The first rank holds a copy of the whole model on the CPU, in the engine's precision: verl passes weights as a stream, but an
    update begins with the list of its tensors.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._settings = rollout_settings(self.config)
        # As verl's own adapters do: consecutive ranks share a replica.
        replica_index, replica_worker = divmod(int(os.environ["RANK"]), self._settings.tensor_parallel)
        self.replica_rank = replica_index if replica_rank == -1 else replica_rank
        self.is_leader_rank = replica_worker == 0
        self._delivery: Delivery | None = None

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the engine keeps its memory."""

    async def release(self) -> None:
        """Do nothing: the engine keeps its memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Update the replica's engine to the trainer's weights, verified."""
        if wire_format != "named_tensors" or peft_config is not None:
            raise ConfigError(
                f"rollout {ROLLOUT_NAME}: {'an adapter alone' if peft_config is not None else wire_format} is not supported; set "
                "actor_rollout_ref.model.lora.merge=True"
            )
        dtype = getattr(torch, DTYPES[self._settings.precision])
        tensors: dict[str, Tensor] = {}
        # Every rank iterates, because the trainer gathers each tensor in a collective; only the first rank keeps them.
        async for name, tensor in ensure_async_iterator(weights):
            if self.is_leader_rank:
                # copy=True: on a CPU the tensor may be a buffer or parameter that the trainer changes later.
                tensors[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        if self.is_leader_rank:
            # On a thread: push() blocks until the update is complete, and this event loop must keep answering Ray.
            await asyncio.to_thread(self._send, tensors, global_steps)

    def _send(self, tensors: dict[str, Tensor], global_steps: int | None) -> None:
        server = ray.get_actor(actor_name(self.replica_rank))
        if self._delivery is None:
            # Created at the first update, and kept for later ones.
            self._delivery = Delivery(
                transport="gloo",
                device=torch.device("cpu"),
                host=self._settings.host,
                timeout_s=self._settings.timeout_s,
            )
        engine = _ActorsEngine(server, f"rollout replica {self.replica_rank}")
        push_tensors(self._delivery, [engine], ray.get(server.announce.remote(global_steps)), tensors)


class _ActorsEngine(RemoteEngine):
    """Client of a :class:`RolloutServer`'s engine, for a Delivery, which applies the deadlines."""

    def __init__(self, server: Any, name: str) -> None:
        self.name, self._server = name, server

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            return await asyncio.wrap_future(self._server.call_engine.remote(call, arguments).future())
        except RayTaskError as error:
            # Ray wraps what an actor raises; callers expect the original error.
            raise error.cause from None
