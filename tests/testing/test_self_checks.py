"""What is made beforehand is what a backend of a tiny checkpoint looks for."""

from __future__ import annotations

import json
from pathlib import Path

from megascend.selfcheck import check
from megascend.selfcheck.slicing import slice_model
from megascend.testing import write_tiny_checkpoint
from megascend.testing.self_checks import warm_tiny_models


def test_the_verdicts_on_tiny_checkpoints_are_found(tmp_path: Path) -> None:
    from transformers import AutoConfig

    warm_tiny_models()
    for arch, tied in (("qwen3", False), ("qwen3_moe", False), ("llama", True), ("qwen2", True)):
        checkpoint = write_tiny_checkpoint(tmp_path / arch, arch, tie_word_embeddings=tied)
        written = json.loads((checkpoint / "config.json").read_text())
        full = json.loads(AutoConfig.from_pretrained(checkpoint).to_json_string(use_diff=False))
        part = slice_model(written, full, full["max_position_embeddings"], window_in_force=False)
        assert check.place(part).exists(), arch
