"""An engine with shards in two workers: both apply an update, or neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megascend.testing.tiny_models import write_tiny_checkpoint
from support.vllm_server import BOUND, TOKENS, Server, assert_active, changed, far, push, vllm_python
from weightwire.errors import CommitError

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", head_dim=32)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(checkpoint, tmp_path_factory.mktemp("vllm"), "--tensor-parallel-size", "2") as instance:
        yield instance


def test_failed_commit_is_undone_on_both_workers(server, weights, reference, listener):
    async def act(engine):
        assert await engine.receivers() == 2
        await push(engine, listener, weights, 1)
        baseline = await engine.logprobs(TOKENS)
        assert far(baseline, reference.logprobs(weights, TOKENS)) < BOUND
        server.fault.write_text("load:1")  # only in the second worker
        try:
            with pytest.raises(CommitError, match=r"worker 1.*no sixth tensor"):
                await push(engine, listener, changed(weights, 1), 2)
        finally:
            server.fault.unlink()
        assert await engine.logprobs(TOKENS) == baseline
        await assert_active(engine, baseline, 1)
        new = changed(weights, 2)
        await push(engine, listener, new, 2)
        assert far(await engine.logprobs(TOKENS), reference.logprobs(new, TOKENS)) < BOUND

    server.run(act)
