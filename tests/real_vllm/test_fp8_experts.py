"""A real vLLM whose experts are in fp8 blocks takes updates that the trainer quantises.

vLLM's loaders, its reload and the layers' preparation are its own; the products with weights are stand-ins in plain torch
(``WEIGHTWIRE_PLAIN_FP8``), since vLLM's kernels for the CPU need AMX. The layout of the experts is that of its Triton kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend import Adam, Parallel, Sample, WeightSync
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.errors import WeightSyncError
from megascend.sync.delivery import Delivery
from megascend.sync.push import push_tensors
from megascend.testing import run_distributed
from megascend.testing.parity import causal_samples, token_lists
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.fp8_reference import dequantised, quantise_by_blocks
from support.trainers import make_trainer
from support.vllm_server import TOKENS, Reference, Server, Weights, changed, far, vllm_python
from weightwire.fp8 import BlockFormat
from weightwire.sender import spec_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]

BLOCK = 128
BOUND = 5e-5
"""Largest difference of log-probabilities: these models are wider than the others here, and sums round more."""
UNCONVERTED = "model.layers.2.mlp.experts"
"""Experts that checkpoints leave as they are, if a model has this layer."""
SHAPE = {
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mlp_only_layers": [0],
}
SERVERS = {
    # Neither the rows of a down projection nor the columns of gate and up are a multiple of a block. A dense layer, one
    # with experts in blocks, and one with plain ones.
    "one worker": ([], {"num_hidden_layers": 3, "hidden_size": 192, "moe_intermediate_size": 256, "head_dim": 64}),
    # Each worker's part of an expert ends within a block: vLLM spreads the scales over smaller ones.
    "two workers": (
        ["--tensor-parallel-size", "2"],
        {"hidden_size": 128, "moe_intermediate_size": 384, "head_dim": 128},
    ),
}


def in_blocks(weights: Weights) -> Weights:
    """Quantise what published checkpoints do: linear layers and experts, not the router, embeddings or the output layer."""
    result = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight") and not name.startswith(UNCONVERTED):
            result[name], result[f"{name}_scale_inv"] = quantise_by_blocks(weight, BLOCK, BLOCK)
        else:
            result[name] = weight
    return result


@pytest.fixture(scope="module", params=SERVERS)
def case(request) -> tuple[list[str], dict[str, int]]:
    return SERVERS[request.param]


@pytest.fixture(scope="module")
def plain(case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint that is not quantised. Blocks of fp8 hold its numbers, so that a trainer computes with the same."""
    vllm_python()
    folder = tmp_path_factory.mktemp("plain")
    source = write_tiny_checkpoint(folder / "tiny", "qwen3_moe", **SHAPE | case[1])
    shutil.copytree(source, folder / "model")
    weights = dequantised(in_blocks(load_file(source / "model.safetensors")), BLOCK, BLOCK)
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    return folder / "model"


@pytest.fixture(scope="module")
def server(case, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fp8")
    checkpoint = folder / "model"
    shutil.copytree(plain, checkpoint)
    stored = in_blocks(load_file(plain / "model.safetensors"))
    if case[0]:  # scales as those of Qwen3's published checkpoints
        stored = {name: tensor.bfloat16() if "_scale_inv" in name else tensor for name, tensor in stored.items()}
    save_file(stored, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", UNCONVERTED, *(f"model.layers.{layer}.mlp.gate" for layer in range(3))],
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    with Server(checkpoint, folder, *case[0], variables={"WEIGHTWIRE_PLAIN_FP8": "1"}) as instance:
        yield instance


def expected(reference: Reference, weights: Weights) -> list[float]:
    """Compute the log-probabilities of an engine that has quantised weights."""
    return reference.logprobs(dequantised(in_blocks(weights), BLOCK, BLOCK), TOKENS)


def test_updates_are_active_and_failed_ones_are_undone(server: Server, plain: Path) -> None:
    reference, source = Reference(plain), load_file(plain / "model.safetensors")
    first = reference.logprobs(dequantised(load_file(server.checkpoint / "model.safetensors"), BLOCK, BLOCK), TOKENS)

    def assert_weights_active(weights: Weights, version: int) -> None:
        async def ask(engine: VllmEngine) -> tuple[Any, list[float]]:
            return await engine.info(), await engine.logprobs(TOKENS)

        info, logprobs = server.run(ask)
        assert (info["paused"], info["not_serving"], info["versions"]["model"]) == (False, None, version), info
        assert far(logprobs, expected(reference, weights) if version else first) < BOUND

    assert_weights_active(source, 0)
    formats = server.run(lambda engine: engine.quantised())
    stored = in_blocks(source)
    assert formats == {name: BlockFormat(BLOCK, BLOCK) for name in source if f"{name}_scale_inv" in stored}
    assert any(".experts." in name for name in formats)
    with contextlib.closing(Delivery(device=torch.device("cpu"), bucket_bytes=50_000, timeout_s=60.0)) as delivery:
        engine = server.engine("trainer")
        for version in (1, 2):
            new = changed(source, version, scale=0.02)
            assert far(expected(reference, new), first) > 1e-2
            update = push_tensors(delivery, [engine], version, new)
            assert update.nbytes == sum(tensor.nbytes for tensor in in_blocks(new).values())
            assert_weights_active(new, version)
        # A load that stops, and a kernel that has computed a tensor of its own from the weights.
        for fault, message in (
            ("load", "no sixth tensor"),
            ("apart", "derived differs; start vLLM with another --moe-backend"),
        ):
            server.fault.write_text(fault)
            try:
                with pytest.raises(WeightSyncError, match=message):
                    push_tensors(delivery, [engine], 3, changed(source, 3, scale=0.02))
            finally:
                server.fault.unlink()
            assert_weights_active(new, 2)
        push_tensors(delivery, [engine], 4, source)
        assert_weights_active(source, 4)
        asyncio.run(engine.close())


@pytest.mark.usefixtures("megatron_imported")
def test_every_rank_of_a_trainer_quantises_its_experts(server: Server, case, plain: Path, tmp_path: Path) -> None:
    """EP2 to one worker and to two, complete and by differences: the trainer's log-probabilities, and transformers'."""
    sample = Sample(TOKENS[:-1], TOKENS[1:], [1.0] * (len(TOKENS) - 1))

    def on_rank() -> Any:
        backend = make_trainer(plain, Parallel(expert=2), optimizer=Adam(lr=1e-3), timeout_s=120)
        engine = server.engine("trainer") if backend.rank == 0 else None
        history = []

        async def ask(close: bool) -> list[float]:
            assert engine is not None
            logprobs = await engine.logprobs(TOKENS)
            if close:
                await engine.close()
            return logprobs

        with WeightSync(backend, [engine] if engine else [], bucket_bytes=50_000, sharded=True, mode="delta") as sync:
            for version in (11, 12):
                if version == 12:
                    backend.forward_backward(backend.shard(causal_samples(token_lists())))
                    backend.optimizer_step()
                    backend.export_hf(tmp_path / "after")
                values = backend.forward([sample]).logprobs[0].tolist()
                pushed = sync.push(version)
                history.append((pushed.sharded, pushed.base, values, asyncio.run(ask(version == 12)) if engine else []))
        return history

    history, *_ = run_distributed(on_rank, 2, init=False, timeout_s=300)
    (sharded, base, values, first), (sharded_again, base_again, _, second) = history
    assert (sharded, base, sharded_again, base_again) == (True, None, True, 11)
    assert far(values, first) < BOUND
    assert far(first, second) > 1e-2
    assert far(expected(Reference(plain), load_file(tmp_path / "after" / "model.safetensors")), second) < BOUND


def test_workers_need_parts_of_experts_and_scales_that_cover_them(server: Server, case, plain: Path) -> None:
    """Compare with the rules of tensor parallelism; a worker that cuts a block spreads the scales itself, and needs all."""
    specs = tuple(spec_of(name, tensor) for name, tensor in in_blocks(load_file(plain / "model.safetensors")).items())

    async def ask(engine: VllmEngine) -> Any:
        return await engine.needs(specs)

    needs = server.run(ask)
    width = case[1]["moe_intermediate_size"] // len(needs)
    for worker, pieces in enumerate(needs):
        boxes = {specs[piece.tensor].name: piece.box for piece in pieces}
        experts = [spec for spec in specs if ".experts." in spec.name]
        assert experts
        for spec in experts:
            offsets, sizes = [0, 0], list(spec.shape)
            if not spec.name.endswith("_scale_inv"):
                dim = 1 if ".down_proj" in spec.name else 0
                offsets[dim], sizes[dim] = worker * width, width
            assert boxes[spec.name] == (tuple(offsets), tuple(sizes)), spec.name
