"""The rollout ``megascend`` for verl: its replicas, which serve requests, and what brings the trainer's weights to them.

verl 0.9.1 has rollouts by vLLM, SGLang and TensorRT-LLM, in verl's own environment only; its Hugging Face rollout is not in its
table (``_ROLLOUT_REGISTRY`` of ``verl/workers/rollout/base.py``) and cannot be constructed. This one's engines need neither an
accelerator nor verl's environment. It is registered under verl's own names by :mod:`megascend.integrations.verl.plugin`.
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
from megascend.integrations.verl.rollout_settings import NAME, RolloutSettings, translate_rollout
from megascend.weightsync.delivery import Delivery
from weightwire.manifest import default_bucket_bytes
from weightwire.remote_engine import RemoteEngine


def settings_of(config: Any) -> RolloutSettings:
    """Of verl's ``RolloutConfig``, or of what it is made from."""
    return translate_rollout(_plain(config))


def _plain(value: Any) -> Any:
    """The value with dictionaries for verl's dataclasses, which are mappings, and for OmegaConf's."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {name: _plain(value[name]) for name in value}
    return value


def actor_name(replica_rank: int) -> str:
    """Ray's name of a replica's server."""
    return f"megascend_rollout_{replica_rank}"


def stop_tokens(model: HFModelConfig) -> tuple[int, ...]:
    """Ids that end a response: those of the generation config, and the tokenizer's end of sequence.

    Raises:
        ConfigError: there is none.
    """
    eos = getattr(model.generation_config, "eos_token_id", None)
    candidates = [*(eos if isinstance(eos, list) else [eos]), getattr(model.tokenizer, "eos_token_id", None)]
    ids = tuple(dict.fromkeys(int(token) for token in candidates if token is not None))
    if not ids:
        raise ConfigError(f"{model.local_path}: neither its generation config nor its tokenizer has an end of sequence")
    return ids


class Replica(replica.RolloutReplica):
    """One engine, with an actor that verl's agents ask. It belongs to as many of the trainer's ranks as it has workers."""

    async def launch_servers(self) -> None:
        """Start the actor on the node of the replica's first rank, and the engine.

        Raises:
            ConfigError: settings that this rollout does not have, or a replica that is none of the policy's.
        """
        if self.is_reward_model or self.is_teacher_model:
            raise ConfigError(
                f"the rollout {NAME} samples from the policy: reward models and teachers need another one"
            )
        if self.nnodes != 1:
            raise ConfigError(f"a replica of {self.world_size} ranks on {self.nnodes} nodes: an engine is on one node")
        settings = settings_of(self.config)
        model: HFModelConfig = omega_conf_to_dataclass(self.model_config, HFModelConfig)
        first = self.workers[0]
        node = await first.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(RolloutServer)
            .options(
                name=actor_name(self.replica_rank),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                max_concurrency=self.max_concurrency,
                num_cpus=0,
            )
            .remote(settings, model.local_path, self.replica_rank, stop_tokens(model))
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.start.remote()


class ServerAdapter(base.BaseRollout):
    """One trainer rank's side: the first rank of a replica sends the weights to its engine, the others take part in the export.

    That rank holds the whole model once more, on the CPU, in the engine's precision: verl hands weights over as a stream, and an
    update begins with the list of its tensors.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._settings = settings_of(self.config)
        replica_index, replica_worker = divmod(int(os.environ["RANK"]), self._settings.tensor_parallel)
        self.replica_rank = replica_index if replica_rank == -1 else replica_rank
        self.is_leader_rank = replica_worker == 0
        self._delivery: Delivery | None = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing: the engine keeps its memory."""

    async def release(self) -> None:
        """Nothing: the engine keeps its memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Put the trainer's weights in force on the replica's engine, verified.

        Raises:
            ConfigError: an adapter is to be sent alone.
            WeightSyncError: the engine did not take them; the message says what happened, and which weights are in force.
        """
        if wire_format != "named_tensors" or peft_config is not None:
            raise ConfigError(
                f"rollout {NAME}: {'an adapter alone' if peft_config is not None else wire_format} is not taken; set "
                "actor_rollout_ref.model.lora.merge=True"
            )
        dtype = getattr(torch, DTYPES[self._settings.precision])
        tensors: dict[str, Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self.is_leader_rank:
                tensors[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        if self.is_leader_rank:
            await asyncio.to_thread(self._send, tensors, global_steps)

    def _send(self, tensors: dict[str, Tensor], global_steps: int | None) -> None:
        server = ray.get_actor(actor_name(self.replica_rank))
        if self._delivery is None:
            self._delivery = Delivery(
                transport="gloo",
                device=torch.device("cpu"),
                host=self._settings.host,
                bucket_bytes=default_bucket_bytes("cpu"),
                digest="multilinear64",
                timeout_s=self._settings.timeout_s,
            )
        engine = _ActorsEngine(server, f"rollout replica {self.replica_rank}")
        self._delivery.push([engine], ray.get(server.announce.remote(global_steps)), tensors)


class _ActorsEngine(RemoteEngine):
    """The engine of a :class:`RolloutServer`, for a delivery, which sets its deadlines."""

    def __init__(self, server: Any, name: str) -> None:
        self.name, self._server = name, server

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            return await asyncio.wrap_future(self._server.call_engine.remote(call, arguments).future())
        except RayTaskError as error:
            raise error.cause from None
