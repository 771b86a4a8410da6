"""verl's synchronous PPO trainer with critic and reference model in separate processes.

verl 0.9.1 puts all roles into one resource pool (``PPOTrainer._init_resource_pool_mgr``) and the roles of a pool into one
process for each device (``PPOTrainer._setup``, by ``create_colocated_worker_cls``), and makes actor and reference one worker.
Megatron-Core keeps its parallel state in globals, so a process can hold one megascend backend only. verl's worker groups can
share devices: each bundle of a pool's placement groups has room for three groups (``ResourcePoolManager.max_colocate_count``),
each with its own ranks and address. So critic and reference get separate pools here, on the actor's placement groups.

:mod:`megascend.integrations.verl.plugin` registers it under verl's own name, ``trainer.v1.trainer_mode=sync``.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.engine_workers import ActorRolloutRefWorker

from megascend.changes import changed

MODE = "sync"
ENGINE = "megatron"


class _SharedPool(RayResourcePool):
    """A pool of separate processes on another pool's devices, through that pool's placement groups."""

    def __init__(self, pool: RayResourcePool) -> None:
        super().__init__(
            # The same shape as the other pool: verl reads from it how many ranks go to which node.
            process_on_nodes=pool.store,
            use_gpu=pool.use_gpu,
            name_prefix=pool.name_prefix,
            max_colocate_count=pool.max_colocate_count,
        )
        self._owner = pool

    def get_placement_groups(self, *arguments: Any, **keywords: Any) -> list[Any]:
        # No new placement group: Ray would wait for devices that the owner has reserved.
        return self._owner.get_placement_groups(*arguments, **keywords)


class _Pools(ResourcePoolManager):
    """verl's pools plus shared ones, which need no devices and so do not count towards the available ones."""

    shared: dict[str, str]
    """Shared pool name to the name of the pool whose devices it uses."""

    def create_resource_pool(self) -> None:
        super().create_resource_pool()
        for name, owner in self.shared.items():
            self.resource_pool_dict[name] = _SharedPool(self.resource_pool_dict[owner])


class SeparateRolesTrainer(PPOTrainerSync):
    """verl's trainer, with Megatron critic and reference model in separate processes on the actor's devices."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        shared: dict[str, str] = {}
        if Role.Critic in self.mapping and self.config.critic.strategy == ENGINE:
            self._share(Role.Critic, shared)
        self._separate_reference = (
            Role.ActorRolloutRef in self.mapping and self.config.actor_rollout_ref.actor.strategy == ENGINE
        )
        if self._separate_reference:
            # ActorRolloutRef would build the reference into the actor's process.
            worker = self.role_worker_mapping.pop(Role.ActorRolloutRef)
            pool = self.mapping.pop(Role.ActorRolloutRef)
            self.role_worker_mapping[Role.ActorRollout] = worker
            self.mapping[Role.ActorRollout] = self.mapping[Role.RefPolicy] = pool
            self._share(Role.RefPolicy, shared)
        manager, reward = self.resource_pool_manager, self.config.reward.reward_model
        # Each group takes a share of a bundle; with too few shares Ray waits forever for the last group.
        groups = 1 + len(shared) + bool(reward.enable and not reward.enable_resource_pool)
        # Replaced before verl calls create_resource_pool().
        self.resource_pool_manager = _Pools(
            resource_pool_spec=manager.resource_pool_spec,
            mapping=manager.mapping,
            max_colocate_count=max(groups, manager.max_colocate_count),
        )
        self.resource_pool_manager.shared = shared

    def _share(self, role: Role, shared: dict[str, str]) -> None:
        name = f"{role}_pool"
        shared[name] = self.mapping[role]
        self.mapping[role] = name

    def _setup(self) -> None:
        super()._setup()
        if self._separate_reference:
            self.ref_policy_wg = self._reference()

    def _reference(self) -> Any:
        """Start the reference model's workers, which verl's setup does not create with an actor that also samples."""
        name = str(Role.RefPolicy)
        worker_class = RayClassWithInitArgs(
            cls=ray.remote(ActorRolloutRefWorker), config=self.config.actor_rollout_ref, role=name
        )
        group = RayWorkerGroup(
            resource_pool=self.resource_pool_manager.get_resource_pool(Role.RefPolicy),
            ray_cls_with_init=create_colocated_worker_cls(class_dict={name: worker_class}),
            device_name=self.config.trainer.device,
        )
        workers = group.spawn(prefix_set={name})[name]
        workers.init_model()
        return workers


def register() -> None:
    """Replace verl's trainer in its registry directly: verl's register function refuses a second class of a name."""
    TRAINER_REGISTRY[MODE] = SeparateRolesTrainer
    changed("verl's synchronous PPO trainer", "critic and reference model get separate processes")
