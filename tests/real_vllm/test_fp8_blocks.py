"""A real vLLM whose weights are in fp8 blocks takes updates that the trainer quantises.

vLLM's loaders, its reload and the layers' preparation are its own; the product with a weight is one in plain torch
(``WEIGHTWIRE_PLAIN_FP8``), since vLLM's kernels for the CPU need AMX.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend.apps.rl.rollout.engines.vllm_process import engine_environment
from megascend.errors import WeightSyncError
from megascend.sync.delivery import Delivery
from megascend.sync.push import push_tensors
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.fp8_reference import dequantised, quantise_by_blocks
from support.vllm_server import (
    BOUND,
    TOKENS,
    Reference,
    Server,
    Weights,
    assert_active,
    changed,
    far,
    push,
    vllm_python,
)
from weightwire.errors import ManifestError
from weightwire.fp8 import BlockFormat, quantise
from weightwire.group import Listener

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 128
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def in_blocks(weights: Weights) -> Weights:
    """Quantise the linear layers of the decoder, as published checkpoints do."""
    result = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            result[name], result[f"{name}_scale_inv"] = quantise_by_blocks(weight, BLOCK, BLOCK)
        else:
            result[name] = weight
    return result


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint that is not quantised."""
    vllm_python()
    return write_tiny_checkpoint(tmp_path_factory.mktemp("plain") / "model", "qwen3", **SHAPE)


@pytest.fixture(scope="module")
def server(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fp8")
    checkpoint = folder / "model"
    shutil.copytree(plain, checkpoint)
    save_file(in_blocks(load_file(plain / "model.safetensors")), checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    with Server(checkpoint, folder, variables={"WEIGHTWIRE_PLAIN_FP8": "1"}) as instance:
        yield instance


def test_updates_are_quantised_by_the_trainer(server: Server, plain: Path) -> None:
    reference, source = Reference(plain), load_file(plain / "model.safetensors")

    def expected(weights: Weights) -> list[float]:
        return reference.logprobs(dequantised(in_blocks(weights), BLOCK, BLOCK), TOKENS)

    server.run(lambda engine: assert_active(engine, expected(source), 0))
    formats = server.run(lambda engine: engine.quantised())
    assert formats == {name: BlockFormat(BLOCK, BLOCK) for name in source if name.endswith("_proj.weight")}
    with contextlib.closing(Delivery(device=torch.device("cpu"), bucket_bytes=50_000, timeout_s=60.0)) as delivery:
        engine = server.engine("trainer")
        for version in range(1, 4):
            weights = changed(source, version)
            update = push_tensors(delivery, [engine], version, weights)
            assert far(expected(weights), expected(source)) > 1e-2
            server.run(
                lambda engine, weights=weights, version=version: assert_active(engine, expected(weights), version)
            )
            assert update.nbytes < sum(tensor.nbytes for tensor in weights.values()) * 0.7
        # Weights that are not quantised: refused, and the last ones stay.
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(delivery, "quantised", lambda engines: {})
            with pytest.raises(WeightSyncError, match=r"_proj\.weight comes as float32"):
                push_tensors(delivery, [engine], 4, changed(source, 4))
        server.run(lambda engine: assert_active(engine, expected(changed(source, 3)), 3))
        push_tensors(delivery, [engine], 5, changed(source, 5))
        server.run(lambda engine: assert_active(engine, expected(changed(source, 5)), 5))
        asyncio.run(engine.close())


def test_quantisation_on_the_trainer_has_the_bits_of_vllm(tmp_path: Path) -> None:
    python, generator = vllm_python(), torch.Generator().manual_seed(0)
    tensors = {}
    for number, (rows, columns) in enumerate(((256, 384), (200, 130), (3, 7))):
        weight = torch.randn(rows, columns, generator=generator) * torch.exp(
            4 * torch.randn(rows, 1, generator=generator)
        )
        for dtype in (torch.bfloat16, torch.float32):
            tensors[f"{number} {dtype}"] = weight.to(dtype)
    save_file(tensors, tmp_path / "weights.safetensors")
    program = (
        "import sys; from safetensors.torch import load_file, save_file\n"
        "from vllm.utils.deep_gemm import per_block_cast_to_fp8\n"
        "pairs = {f'{name} {ue8m0}': per_block_cast_to_fp8(weight, use_ue8m0=bool(ue8m0))\n"
        "         for name, weight in load_file(sys.argv[1]).items() for ue8m0 in (0, 1)}\n"
        "parts = {f'{name} {part}': pair[part].contiguous() for name, pair in pairs.items() for part in (0, 1)}\n"
        "save_file(parts, sys.argv[2])"
    )
    files = [str(tmp_path / f"{name}.safetensors") for name in ("weights", "quantised")]
    # Eager: vLLM compiles the function, which takes minutes on a busy CPU.
    environment = engine_environment(python) | {"PATH": os.environ["PATH"], "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([str(python), "-c", program, *files], env=environment, check=True, timeout=300)
    for name, part in load_file(files[1]).items():
        label, power_of_two, index = name.rsplit(" ", 2)
        # As one of a stack of experts, too: each has blocks of its own.
        weight = torch.stack([tensors[label] * 3, tensors[label]])
        blocks = BlockFormat(BLOCK, BLOCK, power_of_two == "1")
        quantised = quantise(tensors[label], blocks)[int(index)]
        assert torch.equal(quantise(weight, blocks)[int(index)][1].view(torch.uint8), quantised.view(torch.uint8))
        assert quantised.dtype == part.dtype
        assert torch.equal(quantised.contiguous().view(torch.uint8), part.view(torch.uint8)), name


def test_values_without_scales_are_refused(server: Server, plain: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    with pytest.raises(ManifestError, match="_scale_inv is missing"):
        server.run(lambda engine: push(engine, Listener(), weights, 90))
    assert BOUND < 1e-4
