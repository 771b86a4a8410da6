"""PyTorch's own data parallelism (DDP, FSDP, fully_shard) over the simulated hccl, against the same on CPU and Gloo.

Ranks either see all devices and choose theirs, as torchrun starts them, or see one each, as Ray does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # here, so that it is imported once and not by every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from megascend.testing.distributed import run_distributed

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore"),
]

WORLD, STEPS = 2, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def ddp(model: nn.Module, target_device: torch.device) -> nn.Module:
    ids = [target_device.index] if target_device.type == "npu" else None
    return nn.parallel.DistributedDataParallel(model.to(target_device), device_ids=ids)


def fsdp1(model: nn.Module, target_device: torch.device) -> nn.Module:
    return FullyShardedDataParallel(
        model, device_id=target_device, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})
    )


def fsdp2(model: nn.Module, target_device: torch.device) -> nn.Module:
    mesh = dist.init_device_mesh(target_device.type, (WORLD,))
    model.to(target_device)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_meta(model: nn.Module, target_device: torch.device) -> nn.Module:
    """Wrap as large models are built: without memory first, filled from a full state dict after sharding."""
    full = model.state_dict()
    with torch.device("meta"):
        sharded = Net()
    mesh = dist.init_device_mesh(target_device.type, (WORLD,))
    fully_shard(sharded, mesh=mesh)
    sharded.to_empty(device=target_device)
    set_model_state_dict(sharded, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return sharded


KINDS: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {
    "DDP": ddp,
    "FSDP": fsdp1,
    "fully_shard": fsdp2,
    "fully_shard from meta": fsdp2_meta,
}


def train(kind: str, device_type: str, visible: str) -> Any:
    def body() -> Any:
        rank = int(os.environ["RANK"])
        if visible == "one":
            os.environ["ASCEND_RT_VISIBLE_DEVICES"] = str(rank)
        run_device = torch.device("cpu")
        if device_type == "npu":
            npu = vars(torch)["npu"]
            npu.set_device(0 if visible == "one" else rank)
            run_device = torch.device("npu", npu.current_device())
        store = dist.FileStore(os.environ["MEGASCEND_STORE"], WORLD)
        backend = "cpu:gloo,npu:hccl" if device_type == "npu" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
        torch.manual_seed(0)
        model = KINDS[kind](Net(), run_device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(24).reshape(WORLD, 12).remainder(13)[rank : rank + 1].to(run_device)
        losses, norms = [], []
        for _ in range(STEPS):
            logits = model(tokens)
            assert logits.device == run_device
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())
            loss.backward()
            clip = getattr(model, "clip_grad_norm_", None)
            norm = clip(1.0) if clip else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms

    return run_distributed(body, WORLD, init=False, timeout_s=120)


def reference() -> tuple[list[list[float]], list[float]]:
    """Train in one process on the global batch, float64: losses of each half and norms."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(24).reshape(WORLD, 12).remainder(13)
    losses, norms = [], []
    for _ in range(STEPS):
        halves = [
            nn.functional.cross_entropy(model(part).flatten(0, 1), part.roll(1).flatten()) for part in tokens.split(1)
        ]
        (sum(halves) / WORLD).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append([half.item() for half in halves])
    return losses, norms


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_cpu_and_gloo(kind: str) -> None:
    all_visible = train(kind, "npu", "all")
    expected_losses, expected_norms = run_distributed(reference, 1, init=False, timeout_s=60)[0]
    for rank, (losses, norms) in enumerate(all_visible):
        assert losses == pytest.approx([step[rank] for step in expected_losses], rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert train(kind, "npu", "one") == all_visible
    assert train(kind, "cpu", "all") == [
        (pytest.approx(a, rel=1e-6), pytest.approx(b, rel=1e-6)) for a, b in all_visible
    ]
