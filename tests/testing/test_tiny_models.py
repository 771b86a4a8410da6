"""Tiny checkpoints load in transformers, are reproducible, and have no constant tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from megascend.errors import ConfigError
from megascend.models.registry import BUILT_IN
from megascend.testing import ARCHITECTURES, tiny_config, write_tiny_checkpoint
from megascend.testing.reference import run_reference

# Run in a separate process, because an earlier test may have built an mcore-bridge model in this one.
LOADS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    with torch.no_grad():
        logits = model(torch.arange(16)[None] * 7 % 320).logits
    keys = sorted(list(info["missing_keys"]) + list(info["unexpected_keys"]))
    print(json.dumps([list(logits.shape), logits.std().item(), logits.dtype == torch.float32, keys]))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_transformers_loads_tiny_models_with_varying_logits(tmp_path: Path) -> None:
    # Others take images, or need the code beside their weights, as Kimi-K2, or megascend's registration.
    names = [arch for arch in ARCHITECTURES if BUILT_IN[arch].transformers is None and BUILT_IN[arch].images is None]
    paths = [str(write_tiny_checkpoint(tmp_path / arch, arch)) for arch in names]
    completed = run_reference(LOADS, *paths)
    assert completed.returncode == 0, completed.stderr
    for line, arch in zip(completed.stdout.splitlines()[-len(paths) :], names, strict=True):
        shape, spread, is_float32, keys = json.loads(line)
        assert shape == [1, 16, 320]
        assert 0.8 < spread < 4.0
        assert is_float32
        assert keys == []

        weights = load_file(tmp_path / arch / "model.safetensors")
        for name, value in weights.items():
            assert value.std() > 0.01, f"{name} is constant"
        assert "lm_head.weight" in weights
        if arch in ("llama", "qwen2", "qwen3", "qwen3_moe"):
            assert weights["model.layers.3.self_attn.q_proj.weight"].shape == (64, 64)
            assert weights["model.layers.3.self_attn.k_proj.weight"].shape == (32, 64)
            assert ("model.layers.0.self_attn.q_proj.bias" in weights) == (arch == "qwen2")
            assert ("model.layers.0.mlp.experts.3.down_proj.weight" in weights) == (arch == "qwen3_moe")


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("content")
    with pytest.raises(ConfigError, match="no tiny checkpoint"):
        write_tiny_checkpoint(tmp_path, "llama")
    assert (tmp_path / "precious.txt").read_text() == "content"


def test_unknown_architecture_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="'gpt9'; known: llama, qwen2"):
        tiny_config("gpt9")
