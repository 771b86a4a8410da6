"""Pushes to engines that store weights in fp8 blocks: quantised on the trainer, by rank 0 or by every rank."""

from __future__ import annotations

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


def test_engines_with_and_without_blocks_are_refused_together(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    formats = {name: BlockFormat(8, 16) for name in quantised_names(load_file(checkpoint / "model.safetensors"))}
    old = {"old": torch.arange(5.0)}
    with (
        engines(tmp_path, "fp8", weights=old, version=1, formats=formats) as first,
        engines(tmp_path, "bf16", weights=old, version=1) as second,
    ):

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2))
            with megascend.WeightSync(backend, [*first, *second]) as sync:
                with pytest.raises(WeightSyncError, match=r"fp8 and bf16 store .* in different ways"):
                    sync.push(2)
                sync.engines = second
                return sync.push(2).version

        assert run_distributed(on_rank, 2, init=False, timeout_s=150) == [2, 2]
        assert first[0].state()["versions"] == {"model": 1}
        assert second[0].state()["versions"] == {"model": 2}
