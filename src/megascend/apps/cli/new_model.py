"""``megascend new-model``: a small random Hugging Face checkpoint, so that a first run has nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new_model_command(
    out: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    arch: Annotated[str, typer.Option(help="model_type: qwen3, qwen3_moe, llama, qwen3_vl, gpt_oss ...")] = "qwen3",
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Transformer layers.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1, help="Key/value heads (query groups).")] = 2,
    ffn: Annotated[int | None, typer.Option(min=8, help="Feed-forward size, of one expert for MoE.")] = None,
    experts: Annotated[
        int | None, typer.Option(min=2, help="Experts of a layer; MoE only. Default: 4.", show_default=False)
    ] = None,
    experts_per_token: Annotated[
        int | None,
        typer.Option("--experts-per-token", min=1, help="MoE only. Default: 2.", show_default=False),
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Vocabulary size; default: the tokenizer's, padded.")] = None,
    context: Annotated[int, typer.Option(min=16, help="Longest sequence in tokens.")] = 2048,
    tie: Annotated[bool, typer.Option("--tie/--no-tie", help="One matrix for the embedding and the output.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 1234,
) -> None:
    """Write a random model (fp32 safetensors) with a byte-level tokenizer and a ChatML chat template.

    Plain transformers loads the result from disk with AutoModelForCausalLM and AutoTokenizer; one that takes images
    (qwen3_vl) with AutoModelForImageTextToText, AutoTokenizer and AutoImageProcessor.
    """
    from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint

    size = ModelSize(
        arch=arch,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        experts=experts,
        experts_per_token=experts_per_token,
        vocab=vocab,
        context=context,
        tie=tie,
    )
    parameters = write_checkpoint(out, size, seed)
    typer.echo(f"{out}: {arch}, {parameters:,} random parameters, byte-level tokenizer")
