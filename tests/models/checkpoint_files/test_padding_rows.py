"""Padding rows of embeddings have the files' values, also if transformers clears them while loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megascend.apps.rl.rollout.engines.local_model import load
from megascend.engines.fsdp.transformers_api import converted_tensors
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.checkpoint_files.padding_rows import restore_padding_rows

PAD = 5


@pytest.fixture
def youtu(tmp_path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 40}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    settings |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "pad_token_id": PAD}
    config = AutoConfig.for_model("youtu", **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
    model.save_pretrained(tmp_path)
    return tmp_path


def stored(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def test_tensors_converted_by_transformers_have_the_padding_row_of_the_files(youtu: Path) -> None:
    tensors = converted_tensors(youtu, inspect_checkpoint(youtu), {})
    assert torch.equal(tensors["model.embed_tokens.weight"].detach(), stored(youtu))


def test_local_engine_samples_with_the_padding_row_of_the_files(youtu: Path) -> None:
    model = load(youtu, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(model.model.embed_tokens.weight, stored(youtu).bfloat16())


def test_local_engine_refuses_rope_that_depends_on_the_longest_row(youtu: Path) -> None:
    settings = json.loads((youtu / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    (youtu / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="RoPE of kind longrope or dynamic"):
        load(youtu, torch.float32, torch.device("cpu"))


def test_zero_row_of_unknown_origin_raises_checkpoint_error(youtu: Path) -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(40, 32, padding_idx=PAD)})
    header = TensorHeader("F32", (40, 32), youtu / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"row 5 \(pad_token_id\) of embed_tokens is zero once loaded"):
        restore_padding_rows(model, {"words.weight": header})
    restore_padding_rows(model, {"model.embed_tokens.weight": header})
    assert torch.equal(model["embed_tokens"].weight.detach()[PAD], stored(youtu)[PAD])
