"""transformers' load-balancing loss of its mixture-of-experts models, by its own function."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from megascend.batch.micro_batch import MicroBatch
from megascend.config import Moe
from megascend.errors import ConfigError

FUNCTION = "load_balancing_loss_func"


def check(model: Any, moe: Moe, *, frozen: bool, recomputed: bool) -> None:
    """Raise ConfigError for settings that this engine does not have."""
    if moe.bias_update_rate:
        raise ConfigError(
            f"engine single: moe.bias_update_rate={moe.bias_update_rate:g} is a setting of engine megatron; set 0"
        )
    if moe.experts == "grouped":
        raise ConfigError(f"engine single: moe.experts={moe.experts!r} is a setting of engine megatron; leave it out")
    if moe.aux_loss == "none":
        return
    if moe.aux_loss != "transformers":
        raise ConfigError(f"engine single: moe.aux_loss={moe.aux_loss!r} is not known here; set transformers or none")
    if not hasattr(sys.modules[type(model).__module__], FUNCTION):
        raise ConfigError(
            f"engine single: moe.aux_loss is set, but transformers has no such loss for {type(model).__name__}; set none"
        )
    if frozen or recomputed:
        what = "the model is frozen (adapters)" if frozen else "recompute.granularity is full"
        raise ConfigError(f"engine single: moe.aux_loss={moe.aux_loss!r} does not work where {what}; set none")


def router_loss(model: Any, output: Any, batch: MicroBatch) -> Tensor:
    """The loss of one micro batch, over the tokens that samples have, not multiplied by any coefficient.

    Args:
        output: of the base model, with ``router_logits``.
    """
    function = getattr(sys.modules[type(model).__module__], FUNCTION)
    config, logits = model.config, output.router_logits
    mask = (~batch.padding).view(batch.input_ids.shape).long()
    return function(logits, logits[0].shape[-1], config.num_experts_per_tok, mask)
