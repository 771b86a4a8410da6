"""What a dry run says of a layout that ``megascend plan`` would have chosen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascend.apps.cli.dry_run_text import suggestion_lines
from megascend.apps.plan.hardware import load
from megascend.apps.train.dry_run import suggested
from megascend.apps.train.layout_plan import GAIN, Suggestion, suggestion
from megascend.config import RunConfig
from megascend.config.data import Data
from megascend.config.training import Batching, Parallel
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.checkpoint_files.sparse_checkpoint import write_sparse_checkpoint
from megascend.runtime.topology.topology import plan

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", CONFIG)


def run(checkpoint: Path, parallel: Parallel, tokens: int, engine: str = "megatron") -> RunConfig:
    return RunConfig(
        model=checkpoint,
        output=Path("run"),
        engine=engine,
        parallel=parallel,
        batching=Batching(micro_batch_tokens=tokens),
        data=Data(path=Path("data.jsonl"), global_batch_size=64),
    )


def test_slow_layout_has_a_suggestion(checkpoint: Path) -> None:
    config = run(checkpoint, Parallel(tensor=8), 4096)
    info = inspect_checkpoint(checkpoint)
    result = suggestion(config, info, plan(config.parallel, 8, info.shape), 4096, load("h100"))
    assert result is not None
    assert result.current.topology.tensor == 8
    assert result.better.topology.tensor < 8
    assert result.current.time.seconds > GAIN * result.better.time.seconds
    [line] = suggestion_lines(result)
    assert f"megascend plan predicts {result.gain:.0%} shorter steps" in line
    assert "NVIDIA H100" in line


def test_fast_layout_has_none(checkpoint: Path) -> None:
    info, hardware = inspect_checkpoint(checkpoint), load("h100")
    config = run(checkpoint, Parallel(), 16384)
    assert suggestion(config, info, plan(config.parallel, 8, info.shape), 4096, hardware) is None
    # Other engines have one layout, and so has one device.
    slow = run(checkpoint, Parallel(tensor=8), 4096, engine="fsdp")
    assert suggestion(slow, info, plan(slow.parallel, 8, info.shape), 4096, hardware) is None
    one_device = run(checkpoint, Parallel(), 4096)
    assert suggestion(one_device, info, plan(one_device.parallel, 1, info.shape), 4096, hardware) is None


def test_dry_run_compares_on_the_devices_of_this_machine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, info = run(checkpoint, Parallel(tensor=8), 4096), inspect_checkpoint(checkpoint)
    run_plan: Any = SimpleNamespace(info=info, topology=plan(config.parallel, 8, info.shape))

    def result(kind: str, device: str) -> Suggestion | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: device)
        runtime: Any = SimpleNamespace(platform=SimpleNamespace(device_type=kind))
        return suggested(config, runtime, run_plan, 4096)

    assert result("cuda", "NVIDIA H100 80GB HBM3") == suggestion(config, info, run_plan.topology, 4096, load("h100"))
    assert result("cuda", "NVIDIA H200") == suggestion(config, info, run_plan.topology, 4096, load("h200"))
    assert result("cuda", "NVIDIA A100-SXM4-80GB") is None
    assert result("cpu", "") is None
