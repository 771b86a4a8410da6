"""torch's AdamW on this rank's shards: all ranks step, or none."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megascend.config import Adam, Precision, Schedule
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.adamw import MainAdamW
from megascend.engines.fsdp.shards import LocalShard
from megascend.kernels.reductions import square_sum


class Optimizer(MainAdamW):
    """AdamW over fp32 shards; see :class:`megascend.engines.full_model.ModelOptimizer`.

    Args:
        shards: of the trained parameters.
        replicas: copies of the model.
    """

    def __init__(
        self,
        shards: list[LocalShard],
        adam: Adam,
        schedule: Schedule,
        precision: Precision,
        groups: ProcessGroups,
        replicas: int,
    ) -> None:
        self._shards = shards
        self._groups, self._replicas = groups, replicas
        mains = {shard.name: shard.local.requires_grad_() for shard in shards}
        super().__init__({name: (main, main) for name, main in mains.items()}, adam, schedule, precision)

    def gradients(self) -> list[Tensor]:
        """Reduced while the backward pass ran; what they are of is told to AdamW here. Called once a step."""
        of_experts: dict[int, list[Tensor]] = defaultdict(list)
        for shard, (_, main) in zip(self._shards, self._pairs.values(), strict=True):
            gradient = shard.whole.grad
            assert gradient is None or isinstance(gradient, DTensor)
            main.grad = None if gradient is None else gradient._local_tensor
            if shard.divided > 1 and main.grad is not None:
                of_experts[shard.divided].append(main.grad)
        for ranks, grads in of_experts.items():
            # Tokens of all ranks are in them, and fully_shard has averaged over those with the same experts.
            torch._foreach_div_(grads, ranks)
        return super().gradients()

    def norm(self, grads: list[Tensor]) -> float:
        """Every number counts once: each copy of the model is summed over its ranks.

        Summed over all ranks, it is the same float on all of them, and so is what each of them decides.
        """
        device = self._groups.device
        total = torch.stack([square_sum(grad) for grad in grads]).sum() if grads else torch.zeros(())
        total = total.to(device)
        if self._groups.topology.world_size > 1:
            with self._groups.monitor.phase("gradient norm"):
                dist.all_reduce(total, group=self._groups.device_group("world"))
        return float((total / self._replicas).sqrt())

    def discard(self) -> None:
        """Drop all gradients."""
        for shard, (_, main) in zip(self._shards, self._pairs.values(), strict=True):
            shard.whole.grad = main.grad = None
