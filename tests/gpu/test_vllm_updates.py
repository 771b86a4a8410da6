"""Updates of a real vLLM on a GPU, with CUDA graphs, while it generates: whole or not at all, whatever happens to the trainer.

MEGASCEND_VLLM_PYTHON=PYTHON python -m pytest -rs tests/gpu/test_vllm_updates.py
PYTHON is an interpreter with a vLLM for CUDA and the receiver. With two GPUs the trainer's weights are on the first one and vLLM
is on the second one (NCCL); with one they share it (CUDA IPC).
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from vllm_weights import changed_weights

from megascend.apps.rl.rollout.engines.placement import place_engines, visible_gpus
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.apps.rl.rollout.engines.vllm_process import engine_environment, vllm_device
from megascend.errors import WeightSyncError
from megascend.runtime.distributed.launch import child_environment
from megascend.sync.delivery import Delivery
from megascend.sync.push import PushResult, push_tensors
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.vllm_server import FAULTS, ROOT, TOKENS, Reference, Server
from weightwire.engine import Sampling

GPUS = torch.cuda.device_count()
BOUND = 0.15
"""Largest mean difference of log-probabilities between vLLM in bfloat16 and the same weights in float32, or twice that of
transformers in bfloat16 if this is larger: with some weights, rounding sends many tokens to other experts."""
DEVICE = torch.device("cuda", 0)
SMALL_GROUPS = {"WEIGHTWIRE_SCRATCH_BYTES": "300000"}
"""So that an exchange has more than the two groups after which a fault stops it."""
MODELS = {
    "dense": ("qwen3", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}),
    "experts": ("qwen3_moe", {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}),
}


def interpreter() -> Path:
    """Return the interpreter of a vLLM for CUDA; skip the tests without one."""
    if not GPUS:
        pytest.skip("no GPU")
    path = os.environ.get("MEGASCEND_VLLM_PYTHON")
    if not path:
        pytest.skip("no vLLM: MEGASCEND_VLLM_PYTHON names no interpreter that has one")
    if (device := vllm_device(path)) != "cuda":
        pytest.skip(f"the vLLM of {path} is for {device}, not for CUDA")
    return Path(path)


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    interpreter()
    arch, shape = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = write_tiny_checkpoint(folder / "model", arch, **shape)
    (placement,) = place_engines(visible_gpus(os.environ, GPUS), 1, 1)
    variables = placement.environment() | SMALL_GROUPS
    # Tiny models leave room for other tests, whether vLLM has a GPU to itself or not.
    with Server(checkpoint, folder, "--gpu-memory-utilization=0.3", variables=variables, device="cuda") as instance:
        yield instance


@pytest.fixture(scope="module")
def reference(server: Server) -> Reference:
    return Reference(server.checkpoint)


@pytest.fixture(scope="module")
def faults() -> None:
    """Skip the test unless vLLM's interpreter loads the plug-in of faults."""
    python = interpreter()
    environment = engine_environment(python) | {"PYTHONPATH": os.pathsep.join(map(str, (FAULTS, ROOT / "src")))}
    command = [str(python), "-c", "import weightwire_faults"]
    if subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60).returncode:
        pytest.skip(f"{python} ignores PYTHONPATH, and so the plug-in of faults")


@pytest.fixture(scope="module")
def delivery() -> Iterator[Delivery]:
    with contextlib.closing(Delivery(device=DEVICE, bucket_bytes=200_000, timeout_s=60.0)) as opened:
        yield opened


def weights_of(server: Server, seed: int) -> dict[str, torch.Tensor]:
    return changed_weights(server.checkpoint, seed, DEVICE)


def expected(
    server: Server,
    reference: Reference,
    seed: int,
    tokens: list[int] = TOKENS,
    begin: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    weights = {name: tensor.float() for name, tensor in changed_weights(server.checkpoint, seed).items()}
    return reference.logprobs(weights, tokens, begin, dtype)


def assert_close(values: Sequence[float], server: Server, reference: Reference, seed: int, *span: Any) -> None:
    """Compare log-probabilities of vLLM with those of a seed's weights."""
    exact = expected(server, reference, seed, *span)
    rounded = expected(server, reference, seed, *span, dtype=torch.bfloat16)
    assert off(values, exact) < max(BOUND, 2 * off(rounded, exact))


def off(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the mean absolute difference."""
    return statistics.fmean(abs(a - b) for a, b in zip(left, right, strict=True))


def versions(server: Server) -> dict[str, Any]:
    return server.run(lambda engine: engine.info())


def assert_active(server: Server, reference: Reference, seed: int, version: int) -> None:
    """Check prompts and sampled tokens, whose log-probabilities come from CUDA graphs."""

    async def ask(engine: VllmEngine) -> tuple[Any, list[float], Any]:
        sampled = (await engine.generate(TOKENS[:16], Sampling(max_tokens=24, seed=5)))[0]
        return await engine.info(), await engine.logprobs(TOKENS), sampled

    info, prompt, sampled = server.run(ask)
    assert (info["paused"], info["not_serving"], info["versions"]["model"]) == (False, None, version), info
    assert_close(prompt, server, reference, seed)
    assert_close(sampled.logprobs, server, reference, seed, [*TOKENS[:16], *sampled.tokens], 16)


def push(
    delivery: Delivery, server: Server, seed: int, version: int, owner: str = "test", **options: Any
) -> PushResult:
    engine = server.engine(owner, **options)
    return push_tensors(delivery, [engine], version, weights_of(server, seed))


def take_over(delivery: Delivery, server: Server, seed: int) -> None:
    """Become the owner, with which versions restart, and push the weights of a seed as versions 1 and 2."""
    push(delivery, server, seed, 1, owner=f"owner {time.monotonic()}", take_over=True)
    push(delivery, server, seed, 2, take_over=True)


def test_engine_has_the_trainers_weights_after_every_push(server, reference, delivery) -> None:
    assert off(expected(server, reference, 1), expected(server, reference, 2)) > 10 * BOUND
    ways = []
    engine = server.engine(take_over=True)
    for version in range(1, 6):
        update = push_tensors(delivery, [engine], version, weights_of(server, version))
        assert update.transport == ("nccl" if GPUS > 1 else "cuda_ipc")
        assert_active(server, reference, seed=version, version=version)
        ways += [name.removeprefix("commit.") for name in update.parts if name in ("commit.reload", "commit.exchange")]
    info = versions(server)
    assert (ways, info["reload_reason"]) == (["reload", *["exchange"] * 4], "")


@pytest.mark.usefixtures("faults")
def test_exchange_that_stops_leaves_the_old_weights(server, reference, delivery) -> None:
    take_over(delivery, server, 1)
    server.fault.write_text("exchange")
    try:
        with pytest.raises(WeightSyncError, match=r"no third group.*The weights from before it are active"):
            push(delivery, server, 2, 3, take_over=True)
    finally:
        server.fault.unlink()
    assert_active(server, reference, seed=1, version=2)
    push(delivery, server, 4, 4, take_over=True)
    assert_active(server, reference, seed=4, version=4)


@pytest.mark.parametrize("moment", ["transfer", "verified", "commit"])
def test_trainer_killed_leaves_one_version_and_a_working_engine(request, server, reference, delivery, moment) -> None:
    take_over(delivery, server, 1)
    if moment == "commit":
        request.getfixturevalue("faults")
        server.fault.write_text("slow")
    program = Path(__file__).with_name("vllm_trainer.py")
    path = [str(ROOT / "src"), str(program.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    arguments = [server.process.address, server.key_file, server.checkpoint, "2", "3", moment, str(DEVICE)]
    completed = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        env=child_environment() | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    server.fault.unlink(missing_ok=True)
    assert completed.returncode == -signal.SIGKILL, completed.stderr[-3000:]
    deadline = time.monotonic() + 60
    while (info := versions(server))["paused"] or (moment == "commit" and info["versions"]["model"] != 3):
        assert time.monotonic() < deadline, info
        time.sleep(0.1)
    # A commit that has begun is completed by the engine.
    seed, version = (2, 3) if moment == "commit" else (1, info["versions"]["model"])
    assert_active(server, reference, seed=seed, version=version)
    push(delivery, server, 4, 4, owner="another", take_over=True)
    assert_active(server, reference, seed=4, version=4)
