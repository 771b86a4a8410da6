"""Shapes of the models that are measured, and random checkpoints of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
QWEN3 |= {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "1.7b": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
    "30b-a3b": QWEN3
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "small": QWEN3
    | {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10, "head_dim": 64}
    | {"num_attention_heads": 12, "num_key_value_heads": 6},
    "tiny": QWEN3
    | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Qwen3's models by size, the largest with experts."""
SHAPES["tiny-moe"] = SHAPES["tiny"] | {"model_type": "qwen3_moe", "tie_word_embeddings": False, "norm_topk_prob": True}
SHAPES["tiny-moe"] |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`shape_of`."""
    parser.add_argument("--model", help=f"of {', '.join(SHAPES)}, or a config.json (tests/models/published has many)")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--shape", action="append", default=[], metavar="KEY=JSON", help="of its config.json; repeated")


def shape_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration that the options ask for, with ``model_type``."""
    shape = dict(SHAPES[options.model] if options.model in SHAPES else json.loads(Path(options.model).read_text()))
    text = shape.setdefault("text_config", {}) if "text_config" in shape else shape
    for change in options.shape:
        key, _, value = change.partition("=")
        text[key] = json.loads(value)
    if options.layers is not None:
        text["num_hidden_layers"] = options.layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][: options.layers]
    return shape


def write_checkpoint(shape: dict[str, Any], directory: Path, *, precision: str, seed: int = 1234) -> Path:
    """Write a random checkpoint, in one file as transformers initialises it, built on the GPU if there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # transformers zeroes the row of a padding token and drops its gradient; the samples here use every token.
    fields = {key: value for key, value in shape.items() if key != "dtype"} | {"pad_token_id": None}
    if "text_config" in fields:
        # Gemma 4 writes a padding token in place of images: the last one, which no sample has.
        text = fields["text_config"]
        fields["text_config"] = {**text, "pad_token_id": text["vocab_size"] - 1}
    config = AutoConfig.for_model(**fields, dtype=dtype)
    auto: Any = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto.from_config(config, dtype=dtype)
    model.save_pretrained(directory, max_shard_size="1TB")
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return directory


def random_tokens(count: int, length: int, vocabulary: int, seed: int) -> Any:
    """Return random token ids [count, length], small ids more frequent, so that there is something to learn."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, length, generator=generator, dtype=torch.float64)
    return (vocabulary * uniform**3).long()


def samples(count: int, length: int, vocabulary: int, seed: int) -> list[Any]:
    """Return causal samples of random tokens."""
    import megascend

    return [megascend.Sample.causal(row) for row in random_tokens(count, length + 1, vocabulary, seed)]
