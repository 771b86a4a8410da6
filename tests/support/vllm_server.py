"""A real vLLM for tests, on a CPU or a GPU: its environment, a server with its key, manual updates, and references."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend.apps.rl.rollout.engines.placement import device_options
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess
from weightwire.group import Listener
from weightwire.keys import Key, read_key, write_key
from weightwire.manifest import Manifest
from weightwire.offer import Offer, Seal
from weightwire.sender import Sender, spec_of

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "real_vllm" / "faults"
BUCKET_BYTES = 50_000
OPTIONS = ["--max-model-len=512", "--max-num-seqs=64", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
BOUND = 1e-5
"""Largest difference of log-probabilities between vLLM and a reference, both in float32."""
START_S = 600.0
"""Deadline for a server's start on a busy machine, in seconds."""
TOKENS = [(7 * index + index * index // 3) % 290 + 3 for index in range(48)]

Weights = dict[str, torch.Tensor]


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment; skip the test without one."""
    python = Path(os.environ.get("MEGASCEND_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.is_file():
        pytest.skip(f"no vLLM: {python} is missing (bash scripts/vllm_env.sh; MEGASCEND_VLLM_PYTHON names another one)")
    return python


class Server:
    """A real vLLM with the tests' fault plug-in, which accepts requests. A context manager."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        *options: str,
        fault: Path | None = None,
        variables: dict[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint, self.fault = checkpoint, fault or folder / "fault"
        self.key_file = folder / "key"
        self.key: Key = write_key(self.key_file)
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, (FAULTS, ROOT / "src"))),
            "WEIGHTWIRE_FAULT": str(self.fault),
            "VLLM_SERVER_DEV_MODE": "1",  # routes that must be guarded
            "VLLM_NO_USAGE_STATS": "1",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",  # the default caches 1024 matmul shapes, during which memory grows
            "HF_HUB_OFFLINE": "1",
            **(variables or {}),
        }
        self.process = VllmProcess(
            vllm_python(),
            checkpoint,
            key_file=self.key_file,
            log=folder / "vllm.log",
            options=[*OPTIONS, *device_options(device), *options],
            environment=environment,
        )
        try:
            self.process.wait_until_listening(START_S)
            asyncio.run(self.engine().wait_until_ready(START_S))
        except BaseException:
            self.process.close()
            raise

    def engine(self, owner: str = "test", **options: Any) -> VllmEngine:
        """Build a client of the server."""
        return VllmEngine(self.process.address, key=read_key(self.key_file), owner=owner, **options)

    def run(self, act: Callable[[VllmEngine], Awaitable[Any]], **options: Any) -> Any:
        """Run a coroutine with a client, which releases the engine afterwards."""

        async def with_client() -> Any:
            engine = self.engine(**options)
            try:
                return await act(engine)
            finally:
                await engine.close()

        return asyncio.run(asyncio.wait_for(with_client(), 300))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()


async def assert_active(engine: VllmEngine, expected: Sequence[float], version: int) -> None:
    """Check that the engine computes with these weights, reports their version, and is not paused."""
    info = await engine.info()
    assert (info["paused"], info["not_serving"], info["versions"]["model"]) == (False, None, version), info
    assert far(await engine.logprobs(TOKENS), expected) < BOUND


def offered(engine: VllmEngine, listener: Listener, manifest: Manifest, receivers: int, **changes: Any) -> Offer:
    """Build an offer with a new group."""
    name = listener.new_group(["trainer", *(f"{engine.name}, worker {worker}" for worker in range(receivers))])
    fields = {"transport": "gloo", "timeout_s": 20.0, "lease_s": 60.0} | changes
    return Offer(
        update=name,
        owner=engine.owner,
        host=listener.host,
        port=listener.port,
        first=1,
        workers=receivers,
        manifest=manifest,
        **fields,
    )


def manifest_of(weights: Weights, version: int) -> Manifest:
    """Build the manifest of a model's weights."""
    return Manifest(
        version, tuple(spec_of(name, tensor) for name, tensor in weights.items()), bucket_bytes=BUCKET_BYTES
    )


def send(offer: Offer, weights: Weights, wrap: Callable[[Any], Any] = lambda transport: transport) -> Seal:
    """Send weights as the trainer's side of an offer; ``wrap`` may wrap the transport."""
    with Sender(replace(offer, timeout_s=20.0)) as sender:
        sender._transport = wrap(sender._transport)
        return sender.send(weights.items())


def forked_trainer(act: Callable[[], Awaitable[Any]]) -> int | None:
    """Run a trainer in a fork of this process; return its exit code."""

    def run() -> None:
        # A store of this process that is garbage has a thread, which a fork lacks and its destructor would wait for.
        gc.disable()
        asyncio.run(act())  # type: ignore[arg-type]

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(120)
    return child.exitcode


async def push(
    engine: VllmEngine,
    listener: Listener,
    weights: Weights,
    version: int,
    wrap: Callable[[Any], Any] = lambda transport: transport,
    manifest: Manifest | None = None,
) -> dict[str, float]:
    """Run a complete update; return the seconds of its commit."""
    offer = offered(engine, listener, manifest or manifest_of(weights, version), await engine.receivers())
    await engine.begin_update(offer)
    try:
        seal = await asyncio.to_thread(send, offer, weights, wrap)
        await engine.verify(seal, 30.0)
        return dict(await engine.commit(offer.update) or {})
    except BaseException:
        await engine.drop(offer.update)
        raise


class Reference:
    """transformers' model of a checkpoint's architecture for any weights, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(checkpoint)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()

    def load(self, weights: Weights) -> Any:
        """Load weights with the names of a checkpoint, and return the model."""
        missing, extra = self._model.load_state_dict(_experts_stacked(weights), strict=False)
        assert not extra
        assert not [name for name in missing if name != "lm_head.weight"]
        return self._model

    def logprobs(
        self, weights: Weights, tokens: Sequence[int], begin: int = 1, dtype: torch.dtype = torch.float32
    ) -> list[float]:
        """Compute log p(token | preceding tokens) of the tokens from ``begin`` on."""
        model = self.load(weights)
        if dtype != torch.float32:
            model = copy.deepcopy(model)
            for parameter in model.parameters():  # not the buffers: frequencies of rotary embeddings stay in float32
                parameter.data = parameter.data.to(dtype)
        with torch.no_grad():
            logs = model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)
        return [logs[index - 1, tokens[index]].item() for index in range(begin, len(tokens))]


def _experts_stacked(weights: Weights) -> Weights:
    """Stack the experts of a layer: checkpoints have a tensor per expert, transformers' modules one for all."""
    stacked: dict[str, dict[int, torch.Tensor]] = {}
    result = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            result[name] = tensor
        else:
            stacked.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    for experts in {name.rpartition(".")[0] for name in stacked}:
        gate, up, down = (
            torch.stack([tensor for _, tensor in sorted(stacked[f"{experts}.{part}"].items())])
            for part in ("gate", "up", "down")
        )
        result |= {f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}.down_proj": down}
    return result


def changed(weights: Weights, seed: int, scale: float = 0.05) -> Weights:
    """Add noise to weights, like an optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}


def far(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest absolute difference."""
    assert len(left) == len(right)
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
