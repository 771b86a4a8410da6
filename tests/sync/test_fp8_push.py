"""Pushes to engines that store weights in fp8 blocks: quantised on the trainer, by rank 0 or by every rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "weightwire"))
from engine_process import engines
from worker_slices import exported, slices_are, specs_of, vllm_like

import megascend
from megascend import Parallel
from megascend.errors import WeightSyncError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from support.fp8_reference import quantise_by_blocks
from support.trainers import make_trainer
from weightwire.fp8 import BlockFormat

pytestmark = pytest.mark.usefixtures("megatron_imported")

Weights = dict[str, torch.Tensor]


def quantised_names(weights: Weights) -> list[str]:
    return [name for name in weights if name.endswith("_proj.weight")]


def in_blocks(weights: Weights, rows: int, columns: int) -> Weights:
    result = {}
    for name, weight in weights.items():
        if name in quantised_names(weights):
            result[name], result[f"{name}_scale_inv"] = quantise_by_blocks(weight, rows, columns)
        else:
            result[name] = weight
    return result


def comparable(weights: Weights) -> Weights:
    """Convert fp8 exactly to float32, which torch compares; the dtype is part of the name."""
    return {f"{name} {w.dtype}": w.float() if w.dtype == torch.float8_e4m3fn else w for name, w in weights.items()}


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.nightly_cases("bf16-full", "fp32-delta")  # covered: fp32-full, bf16-delta
def test_every_rank_quantises_its_slices(parity_folder, tmp_path, precision, mode):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    source = load_file(checkpoint / "model.safetensors")
    formats = {name: BlockFormat(8, 16) for name in quantised_names(source)}
    with engines(tmp_path, "engine", workers=2, needs=vllm_like, formats=formats) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2), precision=precision)
            with megascend.WeightSync(backend, served, bucket_bytes=50_000, mode=mode) as sync:
                pushes = [sync.push(1)]
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
                pushes.append(sync.push(2))
                backend.export_hf(tmp_path / "after")
                order = [name for name, _ in backend.named_weights(receivers="main", device="meta")]
            return pushes, order

        results = run_distributed(on_rank, 2, init=False, timeout_s=150)
        stored = in_blocks(exported(tmp_path / "after", results[0][1]), 8, 16)
        specs = specs_of(stored)
        for number, worker in enumerate(served[0].weights()[0]):
            assert slices_are(comparable(worker), vllm_like(specs, 2, number), comparable(stored))
    for pushes, _ in results:
        assert [push.sharded for push in pushes] == [True, True]
        assert [push.base for push in pushes] == [None, 1 if mode == "delta" else None]


def test_every_rank_quantises_its_experts_and_refuses_infinite_ones(parity_folder, tmp_path):
    """EP2 by differences: complete, after a step, with other scales alone, and after an expert of one rank overflowed.

    A block has rows of two heads of k and of v, which are apart in Megatron's fused weight.
    """
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    formats = {name: BlockFormat(32, 16) for name in quantised_names(load_file(checkpoint / "model.safetensors"))}
    assert any(".experts." in name for name in formats)
    with engines(tmp_path, "engine", workers=2, needs=vllm_like, formats=formats) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(expert=2), precision="fp32")
            state = backend.engine.weights()
            experts = [values for name in state if ".experts." in name for _, values in state[name].slices]
            with megascend.WeightSync(backend, served, bucket_bytes=50_000, mode="delta") as sync, torch.no_grad():
                pushes = [sync.push(1)]
                with torch.enable_grad():
                    backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
                pushes.append(sync.push(2))
                backend.export_hf(tmp_path / "before")
                for tensor in experts:
                    tensor.mul_(2)
                pushes.append(sync.push(3))
                backend.export_hf(tmp_path / "after")
                order = [name for name, _ in backend.named_weights(receivers="main", device="meta")]
                if backend.rank == 1:
                    experts[0].view(-1)[5] = float("inf")
                with pytest.raises(WeightSyncError) as caught:
                    sync.push(4)
            return pushes, order, str(caught.value)

        results = run_distributed(on_rank, 2, init=False, timeout_s=150)
        before, after = (in_blocks(exported(tmp_path / name, results[0][1]), 32, 16) for name in ("before", "after"))
        specs = specs_of(after)
        for number, worker in enumerate(served[0].weights()[0]):
            assert slices_are(comparable(worker), vllm_like(specs, 2, number), comparable(after))
    changed = {name for name, tensor in comparable(after).items() if not torch.equal(tensor, comparable(before)[name])}
    assert changed == {name for name in comparable(after) if ".experts." in name and "_scale_inv" in name}
    for pushes, _, message in results:
        assert [(push.sharded, push.base) for push in pushes] == [(True, None), (True, 1), (True, 2)]
        assert pushes[2].share < 0.1
        assert re.search(
            r"\.experts\.\d+\.\w+_proj\.weight has numbers that are NaN or infinite \(1 weights\)", message
        )


def test_blocks_that_slices_cut_are_quantised_by_rank_0(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    formats = {name: BlockFormat(48, 48) for name in quantised_names(load_file(checkpoint / "model.safetensors"))}
    with engines(tmp_path, "engine", workers=2, needs=vllm_like, formats=formats) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2), precision="bf16")
            with megascend.WeightSync(backend, served) as sync:
                pushed = sync.push(1)
                backend.export_hf(tmp_path / "after")
            with megascend.WeightSync(backend, served, sharded=True) as sync, pytest.raises(WeightSyncError) as caught:
                sync.push(2)
            return pushed, str(caught.value)

        results = run_distributed(on_rank, 2, init=False, timeout_s=150)
        weights = load_file(tmp_path / "after" / "model.safetensors")
        stored = in_blocks(weights, 48, 48)
        for worker in served[0].weights()[0]:
            received = comparable(worker)
            assert received.keys() == comparable(stored).keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in comparable(stored).items())
    for pushed, message in results:
        assert "that cuts its fp8 blocks of 48 x 48" in pushed.why_not_sharded
        assert pushed.why_not_sharded in message
        assert pushed.nbytes < sum(tensor.nbytes for tensor in weights.values())
