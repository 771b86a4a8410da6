"""Forked ranks on the simulated device."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megascend.testing.distributed import run_distributed


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process of its own."""
    return run_distributed(function, 1, *args, init=False, timeout_s=60)[0]


def on_ranks(body: Callable[[int, int], Any], world: int = 3, timeout_s: float = 20, **options: Any) -> list[Any]:
    """``body(rank, world)`` on ranks whose default group is hccl."""

    def start() -> Any:
        rank = int(os.environ["RANK"])
        torch.npu.set_device(rank)
        store = dist.FileStore(os.environ["MEGASCEND_STORE"], world)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("hccl", store=store, rank=rank, world_size=world, timeout=timeout, **options)
        return body(rank, world)

    return run_distributed(start, world, init=False, timeout_s=60)
