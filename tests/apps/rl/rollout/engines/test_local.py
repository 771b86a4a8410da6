"""The local engine in a separate process: equal answers, and its death is reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from megascend.apps.rl.rollout.engines.local import LocalEngine
from megascend.apps.rl.rollout.engines.local_model import LocalModel, load
from megascend.errors import CheckpointError, EngineError, EngineLostError, EngineTimeoutError
from megascend.testing import write_tiny_checkpoint
from weightwire.engine import Sampling
from weightwire.errors import ManifestError
from weightwire.manifest import Manifest
from weightwire.sender import spec_of

SAMPLING = Sampling(max_tokens=6, seed=4)


def test_separate_process_gives_equal_answers_and_its_death_raises(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "qwen3", "qwen3")

    async def compare() -> None:
        near = LocalEngine(checkpoint, own_process=False)
        far = LocalEngine(checkpoint, name="far engine")
        try:
            prompts = [[5, 6, 7], [9]]
            local = await asyncio.gather(*(near.generate(prompt, SAMPLING, 3) for prompt in prompts))
            remote = await asyncio.gather(*(far.generate(prompt, SAMPLING, 3) for prompt in prompts))
            for local_answers, remote_answers in zip(local, remote, strict=True):
                assert [answer.tokens for answer in local_answers] == [answer.tokens for answer in remote_answers]
                for answer, other in zip(local_answers, remote_answers, strict=True):
                    assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-5)  # other batches, other rounding
            assert await far.version() == 0
            with pytest.raises(EngineError, match="generate: prompt has 0 token ids, not 1 to"):
                await far.generate([], SAMPLING)
            with pytest.raises(EngineError, match="does not load adapters"):
                await far.load_adapter("a", "somewhere")
            process = far._host.process  # type: ignore[union-attr]
            waiting = asyncio.ensure_future(far.generate([1] * 20, Sampling(max_tokens=100)))
            await asyncio.sleep(0)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(
                EngineLostError, match=f"far engine: its process {process.pid} has ended with exit code -9"
            ):
                await waiting
            with pytest.raises(EngineLostError, match="far engine"):
                await far.version()
        finally:
            await near.close()
            await far.close()

    asyncio.run(compare())


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"])
def test_update_from_a_checkpoints_tensors_gives_transformers_model(arch: str, tmp_path: Path) -> None:
    """Send what transformers saves, where experts are separate tensors, to a model in which they are joined."""
    checkpoint = write_tiny_checkpoint(tmp_path / "model", arch)
    model = load(checkpoint, torch.float32, torch.device("cpu"))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    model.save_pretrained(tmp_path / "next")
    weights = load_file(tmp_path / "next" / "model.safetensors")
    assert weights.keys() == load_file(checkpoint / "model.safetensors").keys()
    manifest = Manifest(1, tuple(spec_of(name, tensor) for name, tensor in weights.items()))
    tokens = torch.arange(3, 15)[None]
    engine = LocalModel(checkpoint)
    try:
        engine._check(manifest)
        engine._load(weights.items())
        with torch.no_grad():
            assert torch.equal(engine._model(tokens).logits, model(tokens).logits)
        with pytest.raises(ManifestError, match="not the model's tensors"):
            engine._check(replace(manifest, tensors=manifest.tensors[1:]))
        with pytest.raises(ManifestError, match="is bfloat16, not float32"):
            engine._check(
                replace(manifest, tensors=tuple(replace(spec, dtype="bfloat16") for spec in manifest.tensors))
            )
    finally:
        asyncio.run(engine.close())


def test_model_computes_with_its_device_as_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling and scoring run on threads, which start on device 0."""
    current, devices = [torch.device("cuda", 0)], []

    @contextlib.contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    async def ask() -> None:
        model = LocalModel(write_tiny_checkpoint(tmp_path / "qwen3", "qwen3"))
        model._model.register_forward_hook(lambda *_: devices.append(current[-1]))
        monkeypatch.setattr(torch.cuda, "device", on_device)
        model._device = torch.device("cuda", 1)
        await model.generate([5, 6, 7], SAMPLING)
        await model.logprobs([5, 6, 7])
        await model.close()

    asyncio.run(ask())
    assert devices == [torch.device("cuda", 1)] * 7


def test_unloadable_model_raises_checkpoint_error(tmp_path: Path) -> None:
    async def ask() -> None:
        engine = LocalEngine(tmp_path)
        try:
            with pytest.raises(CheckpointError, match=r"config.json is missing"):
                await engine.version()
        finally:
            await engine.close()

    asyncio.run(ask())


def test_a_pause_holds_tokens_back_until_its_lease_lapses(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "qwen3", "qwen3")

    async def pause() -> None:
        engine = LocalEngine(checkpoint, own_process=False)
        try:
            await engine.pause(lease_s=3600)
            waiting = asyncio.ensure_future(engine.generate([5], SAMPLING))
            assert not (await asyncio.wait({waiting}, timeout=0.3))[0]
            await engine.resume()
            assert len((await waiting)[0].tokens) == 6
            await engine.pause(lease_s=0.05)  # never resumed
            assert len((await engine.generate([5], SAMPLING))[0].tokens) == 6
        finally:
            await engine.close()

    asyncio.run(pause())


def test_first_answer_has_a_requests_deadline_and_later_ones_their_own(monkeypatch) -> None:
    class SlowStart:
        delays: ClassVar = [0.3, 30.0]

        async def call(self, call: str, arguments: Any) -> dict[str, int]:
            await asyncio.sleep(self.delays.pop(0))
            return {"version": 0}

    monkeypatch.setattr("megascend.apps.rl.rollout.engines.local.ModelInProcess", lambda *_: SlowStart())
    engine = LocalEngine("model", own_process=False, timeout_s=600.0, control_timeout_s=0.1)

    async def ask() -> None:
        assert await engine.version() == 0
        with pytest.raises(EngineTimeoutError, match=r"no answer to version within 0\.1 s"):
            await engine.version()

    asyncio.run(ask())
