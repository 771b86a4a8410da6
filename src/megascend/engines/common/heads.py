"""The last layer of transformers models: a plain output projection, or a scalar head with a value per label and token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megascend.errors import CheckpointError, ConfigError
from megascend.models import architecture_named
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.checkpoint_files.scalar_head import BIAS, WEIGHT, ScalarHead
from megascend.models.families.qwen3_vl import undeclared
from megascend.models.selfcheck.trial_inputs import plain_options
from megascend.training.kernels.linear_divergence import TeacherDivergence, linear_divergence
from megascend.training.kernels.linear_logprobs import (
    LowRank,
    VocabShard,
    gather_logits,
    linear_cross_entropy,
    linear_logprobs,
)


@dataclass(frozen=True)
class PlainOutput:
    """Output of an output layer for one micro batch; see :class:`megascend.engines.base.Output`.

    Attributes:
        hidden: [n, h].
        weight: [rows, h]; if it is trained, its ``main_grad``, if any, accumulates its gradient in fp32.
        targets: int64 [n].
        vocab_size: rows of the weight, of all ranks together, that stand for tokens; the others are padding.
        down, lora_delta: ``A x`` [n, r] of this layer's adapters, and their contribution to the logits; or both None.
        temperature: divides the logits of log-probabilities.
        cap: of the logits, as in :class:`megascend.training.kernels.softmax.VocabShard`.
        prediction: output of the head for multi-token prediction, which shares the projection; or None.
        local: this rank's rows of the vocabulary, with the cap; None: it has all of them.
        direct: False returns the weight's gradient to autograd, for hooks that wait for it.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    vocab_size: int
    down: Tensor | None = None
    lora_delta: LowRank | None = None
    temperature: float = 1.0
    cap: float | None = None
    prediction: PlainOutput | None = None
    local: VocabShard | None = None
    direct: bool = True

    @property
    def shard(self) -> VocabShard:
        """Return this rank's rows of the vocabulary."""
        return self.local or VocabShard(0, self.vocab_size, cap=self.cap)

    @property
    def fuses_loss(self) -> bool:
        """False for fp16: gradients computed before the loss scale is applied would underflow."""
        return self.weight.dtype != torch.float16

    def select(self, rows: Tensor, targets: Tensor) -> PlainOutput:
        down = None if self.down is None else self.down[rows]
        lora_delta = None if self.lora_delta is None else self.lora_delta.select(rows)
        return replace(self, hidden=self.hidden[rows], targets=targets, down=down, lora_delta=lora_delta)

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(
            self.hidden,
            self.weight,
            self.targets,
            coefficients,
            self.shard,
            loss_grad,
            self.direct,
            self.down,
            self.lora_delta,
            self.temperature,
        )

    def logprobs(self, entropy: bool, candidates: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return linear_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            self.shard,
            entropy,
            self.direct,
            self.down,
            self.lora_delta,
            candidates,
            self.temperature,
        )

    def logits(self, rows: Tensor | None = None) -> Tensor:
        logits = gather_logits(self.hidden, self.weight, self.shard, self.down, self.lora_delta, rows)
        return logits[:, : self.vocab_size]

    def logit_factors(self) -> tuple[Tensor, Tensor, float | None]:
        return self.hidden.detach(), self.weight.detach()[: self.shard.rows], self.shard.cap

    def divergence(self, divergence: TeacherDivergence, states: Tensor) -> tuple[Tensor, Tensor]:
        return linear_divergence(
            self.hidden,
            self.weight,
            self.targets,
            self.shard,
            states,
            divergence,
            self.direct,
            self.down,
            self.lora_delta,
        )


def fresh_weights(info: ModelInfo, seed: int) -> dict[str, Tensor]:
    """Initialise a scalar head's weights as transformers does: normal with ``initializer_range``, bias 0. Equal on all ranks.

    Returns:
        float32 on the CPU, by name in a checkpoint; empty if the checkpoint has them, or without a scalar head.
    """
    head = info.scalar_head
    if head is None or head.std is None:
        return {}
    # A separate CPU generator: all ranks draw the same numbers, and no other random stream advances.
    generator = torch.Generator().manual_seed(seed)
    weight = head.std * torch.randn(head.outputs, info.shape.hidden_size, generator=generator)
    weights = {WEIGHT: weight, BIAS: torch.zeros(head.outputs)}
    return {name: weights[name] for name in head.names}


def model_class(config: Any, head: ScalarHead | None, outputs: int | None = None) -> Any:
    """Return transformers' auto class of a model with this head, and change the configuration accordingly.

    Args:
        outputs: values per token of a scalar head; default: its labels.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForTokenClassification,
    )

    if head is None:
        takes_images = architecture_named(config.model_type).images is not None and hasattr(config, "vision_config")
        if hasattr(config, "vision_config") and not takes_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(undeclared(config.model_type))
        return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    # A sequence classifier is the token classifier without a bias, with the same names, whose forward pass keeps one token
    # of a sequence: all scalar heads use the token classifier.
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        _register_token_classifier(type(config))
    config.num_labels = head.outputs if outputs is None else outputs
    config.classifier_dropout = head.dropout
    config.token_classification_bias = head.bias  # transformers 5.23; for older ones see without_bias()
    config.tie_word_embeddings = False
    return AutoModelForTokenClassification


def _register_token_classifier(config_class: Any) -> None:
    """Register a token classifier of an architecture of which transformers has the sequence classifier only, in this process."""
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        AutoModelForTokenClassification,
        PreTrainedModel,
    )
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

    classifier: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[config_class]
    if not issubclass(classifier, GenericForSequenceClassification):
        raise ConfigError(
            f"engines single and fsdp: transformers has no token classifier of {config_class.model_type}, and "
            f"{classifier.__name__} is not generic; use engine megatron"
        )
    # The first base is the generic classifier; the next is that of all models of the architecture.
    base = next(entry for entry in classifier.__mro__[1:] if issubclass(entry, PreTrainedModel))
    name = classifier.__name__.replace("ForSequenceClassification", "ForTokenClassification")
    token_classifier = type(name, (GenericForTokenClassification, base), {"config_class": config_class})
    # exist_ok: else transformers 5 ignores classes for its own configurations silently.
    AutoModelForTokenClassification.register(config_class, token_classifier, exist_ok=True)


def plain_slice(config: Any, head: ScalarHead | None) -> Any:
    """Build transformers' own model of a small configuration, fp32, as the reference of a self-check.

    A scalar head gets as many outputs as the vocabulary has tokens: one value would show little of the model below it.

    Args:
        config: changed to have the head.
    """
    model = model_class(config, head, config.get_text_config().vocab_size).from_config(config, **plain_options())
    without_bias(model, head)
    return model


def tie_embeddings(config: Any, tied: bool) -> None:
    """Set ``tie_word_embeddings`` in transformers' ``config``; the checkpoint's files decide it."""
    # A multimodal configuration has the setting in its text part too.
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = tied


def check_tied(model: Any, tied: bool) -> None:
    """Raise CheckpointError if transformers' causal language model is not tied as the checkpoint's files are."""
    output = model.get_output_embeddings()
    if output is None or (output.weight is model.get_input_embeddings().weight) == tied:
        return
    loaded, stored = ("not tied", "tied") if tied else ("tied", "not tied")
    raise CheckpointError(
        f"model: the output layer of transformers' {type(model).__name__} is {loaded} to its embedding, and {stored} in the "
        "checkpoint: correct tie_word_embeddings in config.json"
    )


def without_bias(model: Any, head: ScalarHead | None) -> None:
    """Remove the bias that transformers adds to a scalar head which has none."""
    if head is not None and not head.bias:
        model.score.bias = None


def output_layer(model: Any) -> nn.Linear:
    """Return the last layer of a transformers model: the scalar head or the output projection; None if it has neither."""
    score = getattr(model, "score", None)
    return model.get_output_embeddings() if score is None else score


def not_plain(layer: nn.Module | None, head: ScalarHead | None) -> str | None:
    """Return the reason why an output layer is more than a product with its weight, all that engines compute, or None."""
    if layer is None:
        return "no output layer"
    if head is None and getattr(layer, "bias", None) is not None:
        return "no output layer without a bias"
    extra = [name for name, _ in layer.named_parameters() if name not in ("weight", "bias")]
    if type(layer).forward is not nn.Linear.forward or extra:
        return f"an output layer ({type(layer).__name__}) that is more than the product with its weight"
    return None


def values_of(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Return a scalar head's values, fp32, from ``hidden`` [batch, sequence, h]; see :func:`token_values`."""
    bias = None if layer.bias is None else layer.bias.float()
    return token_values(nn.functional.linear(hidden.float(), layer.weight.float(), bias))


def token_values(values: Tensor) -> Tensor:
    """Flatten a head's values [batch, sequence, labels]: to [n] of one label, else to [n, labels]."""
    return values.flatten() if values.shape[-1] == 1 else values.flatten(0, -2)
