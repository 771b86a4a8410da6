"""``python _build_tiny.py PATH < recipe``: the transformers side of ``write_tiny_checkpoint``."""

from __future__ import annotations

import json
import sys
from typing import Any


def build(path: str, config: dict[str, Any], seed: int) -> None:
    """Create the model that ``config`` describes, fill it with random weights, save it to ``path``."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    # Several test workers build models at once.
    torch.set_num_threads(1)
    loaders: dict[str, Any] = {
        "SequenceClassification": AutoModelForSequenceClassification,
        "TokenClassification": AutoModelForTokenClassification,
        "ConditionalGeneration": AutoModelForImageTextToText,
    }
    task = ((config.get("architectures") or [""])[0] or "").rpartition("For")[2]
    model = loaders.get(task, AutoModelForCausalLM).from_config(AutoConfig.for_model(**config))
    model = model.to(getattr(torch, config["torch_dtype"]))
    randomise(model, seed)
    model.save_pretrained(path, safe_serialization=True)


def randomise(model: Any, seed: int) -> None:
    """Draw every parameter: norm weights around 1, biases around 0, matrices so that activations keep their scale.

    Embeddings and the output layer get a standard deviation of 0.2 (at hidden size 64: logits of about 1.6), routers
    twice the usual scale so that the choice of experts is not a coin toss. Where nothing else scales attention's scores, the
    norms of queries and keys do: with scores of several units, layers amplify rounding tenfold.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                value = 0.1 * noise
            elif name.endswith("A_log"):
                value = 0.5 * noise - 2.0  # a token's decay is 0.9 then, so that states reach over many tokens
            elif parameter.ndim == 1:
                # Norms whose weight is an offset from 1 start at 0.
                value = 0.2 * noise + (1.0 if parameter.any() else 0.0)
                if name.endswith(("q_norm.weight", "k_norm.weight")) and attention_scale(model, name) == 1:
                    value *= len(parameter) ** -0.25
            elif any(part in name for part in ("embed_tokens", "embeddings", "lm_head")):
                value = 0.2 * noise
            else:
                gain = 2.0 if name.endswith(("mlp.gate.weight", "mixer.gate.weight", "router.proj.weight")) else 1.0
                value = gain * noise / parameter.shape[-1] ** 0.5
            parameter.copy_(value.to(parameter.dtype))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of routers; some transformers have it as a buffer
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("layer_scalar"):  # of a layer's output; not trained; values of a bf16 checkpoint
                buffer.copy_((1 + 0.2 * torch.randn(buffer.shape, generator=generator)).bfloat16())


def attention_scale(model: Any, name: str) -> float | None:
    """Return the factor of the scores in the attention whose norm has the weight ``name``."""
    return getattr(model.get_submodule(name.rsplit(".", 2)[0]), "scaling", None)


if __name__ == "__main__":
    recipe = json.load(sys.stdin)
    build(sys.argv[1], recipe["config"], recipe["seed"])
