"""A transformers model without its last step, and whether that is a plain product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascend.engines.scalar_head import not_plain
from megascend.errors import ConfigError

HEAD_BOUND = 1e-2
"""How far logits of the head alone may be from the model's, relative to their largest: the rounding of bf16."""


def check_plain_head(model: Any, vocab_size: int) -> None:
    """Hold the output layer's plain product against the model's own logits, for a few tokens.

    Raises:
        ConfigError: the model does more than that (a bias, a cap or a scale of the logits), which this engine would leave out.
    """
    head = model.get_output_embeddings()
    if (problem := not_plain(head, None)) is not None:
        raise ConfigError(f"engine single: {type(model).__name__} has {problem}; use another engine")
    products: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: products.append(output))
    try:
        with torch.no_grad():
            tokens = torch.arange(min(4, vocab_size), device=head.weight.device)[None]
            hidden = hidden_states(model, tokens, None)[0]
            theirs = model(input_ids=tokens, use_cache=False).logits.float()
            mine = torch.nn.functional.linear(hidden, head.weight).float()
    finally:
        hook.remove()
    found = float((theirs - mine).abs().max() / theirs.abs().max().clamp_min(1e-6))
    if len(products) != 1 or not torch.equal(products[0].float(), theirs):
        raise ConfigError(
            f"engine single: {type(model).__name__} does more with its logits than to return them (a cap or a scale in its "
            "configuration?); use another engine"
        )
    if not found <= HEAD_BOUND:
        raise ConfigError(
            f"engine single: the logits of {type(model).__name__} are not the product of its last hidden states and its output "
            f"layer (relative difference {found:.3g}, at most {HEAD_BOUND} expected); use another engine"
        )


def hidden_states(model: Any, input_ids: Tensor, position_ids: Tensor | None, **options: Any) -> tuple[Tensor, Any]:
    """[batch, sequence, h] after the last norm, and the base model's whole output. Causal; padding comes last."""
    output = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options)
    return output.last_hidden_state, output
