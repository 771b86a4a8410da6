"""The last step of transformers' models: the plain product with the output layer, or a scalar head, one number a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megascend.errors import CheckpointError
from megascend.huggingface.scalar_head import BIAS, WEIGHT, ScalarHead
from megascend.kernels.linear_logprobs import (
    LowRank,
    VocabShard,
    gather_logits,
    linear_cross_entropy,
    linear_logprobs,
)


@dataclass(frozen=True)
class PlainOutput:
    """The output of a model whose vocabulary one rank has whole, for one micro batch; see :class:`megascend.engines.base.Output`.

    Attributes:
        hidden: [n, h].
        weight: [vocabulary, h]; its ``main_grad``, where it is trained, takes its gradient in fp32.
        targets: int64 [n].
        vocab_size: rows of the weight that stand for tokens.
        down, lora_delta: ``A x`` [n, r] of adapters of this layer, and what it adds to the logits; or both None.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    vocab_size: int
    down: Tensor | None = None
    lora_delta: LowRank | None = None

    @property
    def shard(self) -> VocabShard:
        """The whole vocabulary."""
        return VocabShard(0, self.vocab_size)

    @property
    def fuses_loss(self) -> bool:
        """False for fp16, where gradients formed before the loss scale is applied would underflow."""
        return self.weight.dtype != torch.float16

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(
            self.hidden,
            self.weight,
            self.targets,
            coefficients,
            self.shard,
            loss_grad,
            direct_weight_gradient=True,
            down=self.down,
            lora_delta=self.lora_delta,
        )

    def logprobs(self, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return linear_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            self.shard,
            entropy,
            direct_weight_gradient=True,
            down=self.down,
            lora_delta=self.lora_delta,
        )

    def logits(self, rows: Tensor | None = None) -> Tensor:
        whole = gather_logits(self.hidden, self.weight, self.shard, self.down, self.lora_delta, rows)
        return whole[:, : self.vocab_size]


def fresh_weights(head: ScalarHead | None, hidden: int, seed: int) -> dict[str, Tensor]:
    """Draw a scalar head's weights as transformers does: normal with ``initializer_range``, a bias of 0. The same on every rank.

    Returns:
        float32 on the CPU, by their names in a checkpoint; nothing where a checkpoint has them, or without a scalar head.
    """
    if head is None or head.std is None:
        return {}
    generator = torch.Generator().manual_seed(seed)
    drawn = {WEIGHT: head.std * torch.randn(1, hidden, generator=generator), BIAS: torch.zeros(1)}
    return {name: drawn[name] for name in head.names}


def model_class(config: Any, head: ScalarHead | None, outputs: int = 1) -> Any:
    """Return transformers' automatic class of a model with this head, and change the configuration to one that has it.

    A sequence classifier is the token classifier without a bias, with the same names, whose forward pass keeps one token of a
    sequence; so all scalar heads are of one class.

    Args:
        outputs: numbers that the head makes of a token, if it is no language model's.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    if head is None:
        return AutoModelForCausalLM
    config.num_labels = outputs
    config.classifier_dropout = head.dropout
    config.token_classification_bias = head.bias  # transformers 5.23; for older ones see without_bias()
    config.tie_word_embeddings = False
    return AutoModelForTokenClassification


def plain_slice(config: Any, head: ScalarHead | None) -> Any:
    """Return transformers' own model of a small configuration, fp32, with which a self-check compares an engine's.

    A scalar head has as many outputs as the vocabulary has tokens: one number would show little of the model below it.

    Args:
        config: changed to one that has the head.
    """
    model = model_class(config, head, config.vocab_size).from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    without_bias(model, head)
    return model


def tie_embeddings(config: Any, tied: bool) -> None:
    """Set in transformers' ``config`` whether the output layer is the embedding; the checkpoint's files decide it."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.tie_word_embeddings = tied


def check_tied(model: Any, tied: bool) -> None:
    """Raise CheckpointError if transformers' causal language model is not tied as the checkpoint's files are."""
    output = model.get_output_embeddings()
    if output is None or (output.weight is model.get_input_embeddings().weight) == tied:
        return
    is_tied, are_tied = ("", "not ") if not tied else ("not ", "")
    raise CheckpointError(
        f"model: the output layer of transformers' {type(model).__name__} is {is_tied}its embedding, and by the files of the "
        f"checkpoint it is {are_tied}: correct tie_word_embeddings in config.json"
    )


def without_bias(model: Any, head: ScalarHead | None) -> None:
    """Remove the bias that transformers has given the head and this one has not."""
    if head is not None and not head.bias:
        model.score.bias = None


def output_layer(model: Any) -> nn.Linear:
    """Return the last layer of a transformers model: the scalar head, or what makes logits; None if it has neither."""
    score = getattr(model, "score", None)
    return model.get_output_embeddings() if score is None else score


def not_plain(layer: nn.Module | None, head: ScalarHead | None) -> str | None:
    """Return what keeps an output layer from being the product with its weight, all that engines compute; None: nothing."""
    if layer is None:
        return "no output layer"
    if head is None and getattr(layer, "bias", None) is not None:
        return "no output layer without a bias"
    others = [name for name, _ in layer.named_parameters() if name not in ("weight", "bias")]
    if type(layer).forward is not nn.Linear.forward or others:
        return f"an output layer ({type(layer).__name__}) that is more than the product with its weight"
    return None


def values_of(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Return a scalar head's values, fp32 [n], from ``hidden`` [batch, sequence, h]."""
    bias = None if layer.bias is None else layer.bias.float()
    return nn.functional.linear(hidden.float(), layer.weight.float(), bias).flatten()
