"""What programs that are not ours do on the device, and nobody here did: small stand-ins of their calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import simnpu

ROOT = Path(__file__).resolve().parents[2]


def run_program(text: str, folder: Path, *, ranks: int = 0, timeout_s: int = 120) -> str:
    """Return the output of a program of its own on the simulated device, under torchrun if it has ranks."""
    file = folder / "program.py"
    file.write_text(text)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    completed = subprocess.run(
        [sys.executable, *start, str(file)],
        capture_output=True,
        text=True,
        env=simnpu.environment() | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        timeout=timeout_s,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed.stdout


UNUSED = """
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")

class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.never = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1)
    def forward(self, x):
        return self.used(x)

model = torch.nn.parallel.DistributedDataParallel(Half().npu(), find_unused_parameters=True)
for step in range(2):
    model(torch.full((1, 2), rank + 1.0, device="npu")).sum().backward()
with open(f"rank{rank}", "w") as file:
    print(model.module.used.weight.grad.tolist(), model.module.never.weight.grad, file=file)
dist.destroy_process_group()
"""


def test_ddp_looks_for_unused_parameters(tmp_path: Path) -> None:
    """transformers' Trainer asks for it. The reducer pins memory in C++: "implement getPinnedMemoryAllocator"."""
    run_program(UNUSED, tmp_path, ranks=2)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "[[3.0, 3.0]] None\n"  # two steps of the mean of 1 and 2


POOL = """
import multiprocessing, os, torch, torch.distributed as dist

def on_rank(rank, world, store):
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=world)
    weight = torch.full((2,), float(rank + 1), device="npu", requires_grad=True)
    (weight * weight).sum().backward()
    dist.all_reduce(weight.grad)
    dist.destroy_process_group()
    return weight.grad.tolist()

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["torch"])
    with multiprocessing.Pool(2) as pool:
        work = pool.starmap_async(on_rank, [(rank, 2, os.path.abspath("store")) for rank in range(2)], chunksize=1)
        print("FOUND", work.get(90))
        print("DEVICE", torch.ones(1, device="npu").item())
"""


def test_a_pool_of_a_forkserver_uses_the_device(tmp_path: Path) -> None:
    """Run as MindSpeed's distributed tests do: pools of processes, each a rank, and the device in the parent too."""
    out = run_program(POOL, tmp_path)
    assert "FOUND [[6.0, 6.0], [6.0, 6.0]]" in out  # d/dw of w*w is 2w, on weights 1 and 2
    assert "DEVICE 1.0" in out


def test_half_precision_backward_is_right_and_overflows_where_the_cpus_does(sim_npu: None) -> None:
    """ms-swift in fp16 finds NaN at once: Megatron starts with a loss scale of 2**32, which no fp16 gradient survives."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 16, generator=generator, dtype=torch.float64) / 4
    inputs, targets = torch.randn(8, 16, generator=generator, dtype=torch.float64), torch.arange(8)

    def gradient(scale: float, dtype: torch.dtype, device: str) -> torch.Tensor:
        leaf = weight.to(device, dtype, copy=True).requires_grad_()
        hidden = torch.nn.functional.silu(inputs.to(device, dtype) @ leaf)
        loss = torch.nn.functional.cross_entropy((hidden @ leaf).float(), targets.to(device))
        (loss * scale).backward()
        assert leaf.grad is not None
        return leaf.grad.cpu()

    exact = gradient(1.0, torch.float64, "cpu").float()
    actual = gradient(16.0, torch.float16, "npu").float() / 16
    assert (actual - exact).abs().max() < 2e-3 * exact.abs().max()
    overflown = gradient(2.0**32, torch.float16, "npu")
    assert not overflown.isfinite().all()
    assert torch.equal(overflown.isfinite(), gradient(2.0**32, torch.float16, "cpu").isfinite())


def test_typed_constructors_take_a_size(sim_npu: None) -> None:
    """MindSpeed's tests call ``torch.cuda.LongTensor(size=(2, 3))``."""
    tensor = torch.npu.LongTensor(size=(2, 3))  # type: ignore[attr-defined]
    assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == ((2, 3), torch.int64, "npu")
