"""A model with experts on the CPU: vLLM's reload gets its weights wrong, so an update is refused and nothing changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from driving import TOKENS, Server, changed, push, vllm_python
from safetensors.torch import load_file

from megascend.testing.tiny_models import write_tiny_checkpoint
from weightwire.errors import UpdateError
from weightwire.group import Listener

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]


def test_an_update_is_refused(tmp_path: Path) -> None:
    vllm_python()
    checkpoint = write_tiny_checkpoint(tmp_path / "moe", "qwen3_moe", head_dim=32)
    weights, listener = load_file(checkpoint / "model.safetensors"), Listener()
    server = Server(checkpoint, tmp_path / "vllm")

    async def act() -> None:
        engine = server.engine()
        before = await engine.logprobs(TOKENS)
        with pytest.raises(UpdateError, match="is a layer of experts on the CPU"):
            await push(engine, listener, changed(weights, 1), 1)
        assert await engine.logprobs(TOKENS) == before
        info = await engine.info()
        assert (info["paused"], info["not_serving"], info["versions"]["model"]) == (False, None, 0)
        await engine.close()

    try:
        asyncio.run(asyncio.wait_for(act(), 300))
    finally:
        server.process.close()
