"""Updates of a MoE model in vLLM on the CPU, with one worker and with two: they are applied or leave the old weights."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascend import Adam, Parallel, Sample
from megascend.testing import run_distributed
from megascend.testing.parity import causal_samples, token_lists
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.trainers import make_trainer
from support.vllm_server import BOUND, ROOT, TOKENS, Server, assert_active, changed, far, push, vllm_python
from weightwire.engine import Sampling
from weightwire.errors import CommitError

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]

SERVERS = {"one worker": [], "two workers": ["--tensor-parallel-size", "2"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose experts are 48 wide: vLLM's kernel pads them to 64, or half of them to 32."""
    vllm_python()
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("model") / "moe", "qwen3_moe", head_dim=32, moe_intermediate_size=48
    )


@pytest.fixture(scope="module", params=SERVERS)
def server(request, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(checkpoint, tmp_path_factory.mktemp("vllm"), *SERVERS[request.param]) as instance:
        yield instance


def test_updates_are_active_and_a_failed_one_is_undone(server, weights, reference, listener) -> None:
    async def act(engine) -> None:
        workers = await engine.receivers()

        async def assert_weights_active(expected: dict, version: int) -> None:
            await assert_active(engine, reference.logprobs(expected, TOKENS), version)

        await assert_weights_active(weights, 0)
        await push(engine, listener, weights, 1)
        await assert_weights_active(weights, 1)
        for version in (2, 3):
            new = changed(weights, version)
            await push(engine, listener, new, version)
            await assert_weights_active(new, version)
        completion = (await engine.generate(TOKENS[:12], Sampling(max_tokens=16, stop_token_ids=(299,), seed=3)))[0]
        sequence = [*TOKENS[:12], *completion.tokens]
        assert far(completion.logprobs, reference.logprobs(new, sequence, begin=12)) < BOUND

        # Fail in all workers, and with two workers only in the second: the first must revert its commit.
        for fault in ["load", *(["load:1"] if workers == 2 else [])]:
            server.fault.write_text(fault)
            try:
                with pytest.raises(CommitError, match="no sixth tensor"):
                    await push(engine, listener, changed(weights, 4), 4)
            finally:
                server.fault.unlink()
            await assert_weights_active(new, 3)
        await push(engine, listener, weights, 5)
        await assert_weights_active(weights, 5)

    server.run(act)


LAYOUTS = {"EP2": (2, Parallel(expert=2)), "TP2, EP2": (4, Parallel(tensor=2, expert=2))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("megatron_imported")
def test_engine_logprobs_match_the_trainer(server: Server, checkpoint: Path, layout: str) -> None:
    """Compare after each of two pushes from trainers with expert parallelism, with an optimizer step before each."""
    world_size, parallel = LAYOUTS[layout]
    sample = Sample(TOKENS[:-1], TOKENS[1:], [1.0] * (len(TOKENS) - 1))

    def on_rank():
        from megascend import WeightSync

        backend = make_trainer(checkpoint, parallel, optimizer=Adam(lr=5e-3), timeout_s=120)
        engine = server.engine() if backend.rank == 0 else None
        sync = WeightSync(backend, [engine] if engine else [], bucket_bytes=50_000)

        async def ask(engine, close):
            logprobs = await engine.logprobs(TOKENS)
            if close:
                await engine.close()
            return logprobs

        pairs = []
        for version in (1, 2):
            backend.forward_backward(backend.shard(causal_samples(token_lists())))
            backend.optimizer_step()
            # Every data parallel rank computes its own sample; rank 0's is compared.
            values = backend.forward([sample]).logprobs[0].tolist()
            sync.push(version)
            if engine:
                pairs.append((values, asyncio.run(ask(engine, version == 2))))
        sync.close()
        return pairs

    pairs, *_ = run_distributed(on_rank, world_size, init=False, timeout_s=300)
    (first, _), (second, _) = pairs
    assert far(first, second) > 0.01
    for values, actual in pairs:
        assert far(values, actual) < BOUND


REFUSED = """
from types import SimpleNamespace
import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from weightwire.errors import UpdateError
from weightwire.vllm.model import check_reloadable

class Quantized(FusedMoEMethodBase):
    moe_kernel = None
    def __init__(self): pass
    def create_weights(self): pass
    def get_fused_moe_quant_config(self, layer): pass

class Experts(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 4, device=device))
        self.quant_method = Quantized()

class Adapted(Quantized):
    def __init__(self, backend):
        self.old_quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))

adapted = [("meta", False, Adapted(backend)) for backend in ("TRITON", "FLASHINFER_TRTLLM")]
for device, eplb, method in (("meta", False, None), ("cpu", False, None), ("meta", True, None), *adapted):
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=eplb))
    experts = Experts(device)
    experts.quant_method = method or experts.quant_method
    try:
        check_reloadable(torch.nn.Sequential(experts), config)
        print(device, "taken")
    except UpdateError as error:
        print(device, error)
"""


def test_unsupported_experts_raise_update_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    completed = subprocess.run(
        [vllm_python(), "-c", REFUSED], capture_output=True, text=True, env=environment, timeout=300
    )
    lines = completed.stdout.strip().splitlines()[-5:]
    assert lines[0] == "meta taken", completed.stderr
    assert lines[1].startswith(
        "cpu 0 is an expert layer whose weights vLLM may reload wrongly (Quantized, backend None)"
    )
    assert lines[2].startswith("meta this engine balances experts between its workers (enable_eplb)")
    assert lines[3] == "meta taken"
    assert lines[4].startswith("meta 0: --enable-lora leaves experts as stored")
