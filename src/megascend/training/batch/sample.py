"""Training samples: tokens with aligned targets, one format for SFT, distillation and RL."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from megascend.errors import DataError
from megascend.training.batch.candidates import Candidates, as_tensor, id_rows
from megascend.training.batch.image_sources import ImageSources
from megascend.training.batch.images import SampleImages

IGNORED = -100
"""Target that torch's and transformers' losses ignore."""
TOKEN_FIELDS = ("advantages", "old_logprobs", "ref_logprobs", "returns", "old_values")


@dataclass(eq=False)
class Sample:
    """One sequence. Every per-token field has shape [length] and may be a list or a tensor.

    Floats must be finite at targets with a weight; elsewhere they are ignored, and NaN and infinity become 0.

    Attributes:
        input_ids: int64, what the model reads.
        target_ids: int64, what it should predict at each position (for causal models the next token). -100, which torch
            ignores, is allowed where the weight is 0, and becomes 0.
        weights: float32, each target's weight in the loss; a mask is 0 / 1. Negative ones are for losses with
            ``reduction="sum"``.
        advantages: float32, for policy losses.
        old_logprobs: float32, log-probabilities of the targets under the policy that sampled them.
        ref_logprobs: float32, log-probabilities of the targets under a reference model.
        extra: further float32 fields for loss functions of your own, reached as ``inputs.extra[name]``.
        pair: samples with the same value form one preference pair and stay in one micro batch.
        chosen: within a pair, True for the preferred sample.
        label: class of the sample, for losses that require it; kto: 1 for desirable, 0 for undesirable. Or floats, a number for
            each label of a head: multi_label_classification, regression.
        adapter: name of the LoRA adapter that this sample trains; default: the call's.
        returns: float32, targets of a critic's values.
        old_values: float32, values of the critic that ``returns`` were computed with.
        routed_experts: [length, layers, k] integers, the experts that the rollout chose for each token of ``input_ids``, as vLLM
            returns them: of all layers, or of those with experts. -1 in all k: not known, the router chooses.
        images: images, for models that take them; ``input_ids`` has a token for each of their features.
        candidates: a teacher's likeliest tokens at each position, with its log-probabilities.
        temperature: divides the logits: log-probabilities, entropies and losses are those of the policy at this temperature.
        allowed: integers [length, A], the tokens from which each target was drawn (top-k, top-p), -1 at unused slots: the
            policy is the distribution renormalised over them. A row of -1 only: the whole vocabulary.
        teacher_states: floats [length, h], a teacher's last hidden states, from which its output layer computes the logits of
            each target.
    """

    input_ids: Any
    target_ids: Any
    weights: Any
    advantages: Any = None
    old_logprobs: Any = None
    ref_logprobs: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    pair: Hashable | None = None
    chosen: bool | None = None
    adapter: str | None = None
    returns: Any = None
    old_values: Any = None
    routed_experts: Any = None
    images: SampleImages | ImageSources | None = None
    candidates: Candidates | None = None
    temperature: float = 1.0
    allowed: Any = None
    teacher_states: Any = None
    label: Any = None

    def __post_init__(self) -> None:
        self.input_ids = _vector(self.input_ids, "input_ids", torch.int64)
        self.target_ids = _vector(self.target_ids, "target_ids", torch.int64)
        self.weights = _vector(self.weights, "weights", torch.float32)
        if len(self.target_ids) == len(self.weights):
            self.target_ids = self.target_ids.masked_fill((self.target_ids == IGNORED) & (self.weights == 0), 0)
        for name in TOKEN_FIELDS:
            if getattr(self, name) is not None:
                setattr(self, name, self._field(getattr(self, name), name))
        self.extra = {name: self._field(value, f"extra[{name!r}]") for name, value in self.extra.items()}
        lengths = {name: len(value) for name, value in self.token_fields().items()}
        # Not among token_fields: their rows have further dimensions.
        if self.routed_experts is not None:
            self.routed_experts = _routing(self.routed_experts)
            lengths["routed_experts"] = len(self.routed_experts)
        if self.candidates is not None:
            if not isinstance(self.candidates, Candidates):
                raise DataError(f"candidates must be megascend.Candidates, got {type(self.candidates).__name__}")
            lengths["candidates"] = len(self.candidates)
        if self.allowed is not None:
            self.allowed = id_rows(self.allowed, "allowed")
            lengths["allowed"] = len(self.allowed)
        if self.teacher_states is not None:
            self.teacher_states = _states(self.teacher_states)
            lengths["teacher_states"] = len(self.teacher_states)
        if not 0 < self.temperature < math.inf:
            raise DataError(f"temperature is {self.temperature}; it must be above 0 and finite")
        if len(set(lengths.values())) != 1:
            raise DataError(f"all per-token fields of a sample must have one length, got {lengths}")
        if len(self) == 0:
            raise DataError("a sample must hold at least one token")
        if self.label is not None:
            self.label = _label(self.label)
        if self.images is not None and not isinstance(self.images, SampleImages | ImageSources):
            raise DataError(f"images must be a megascend.SampleImages, got {type(self.images).__name__}")

    def _field(self, values: Any, name: str) -> Tensor:
        return _vector(values, name, torch.float32, self.weights == 0)

    def __len__(self) -> int:
        return len(self.input_ids)

    def token_fields(self) -> dict[str, Tensor]:
        """Return all fields with a number for each token that are set, by name (``extra`` fields under their own names)."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        tensors = {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and name not in ("routed_experts", "allowed", "teacher_states", "label")
        }
        return tensors | self.extra

    @property
    def loss_fields(self) -> set[str]:
        """Names of the fields that a loss may require and that are set."""
        wide = {"candidates": self.candidates, "teacher_states": self.teacher_states, "label": self.label}
        return {*self.token_fields(), *(name for name, value in wide.items() if value is not None)}

    def image_fields(self) -> dict[str, Tensor]:
        """Return the tensors of decoded images by name; empty without images."""
        if not isinstance(self.images, SampleImages):
            return {}
        return {"images.pixel_values": self.images.pixel_values, "images.grids": self.images.grids}

    @classmethod
    def causal(
        cls,
        token_ids: Sequence[int] | Tensor,
        prompt_length: int = 0,
        weights: Sequence[float] | Tensor | None = None,
        *,
        pair: Hashable | None = None,
        chosen: bool | None = None,
        adapter: str | None = None,
        routed_experts: Any = None,
        images: SampleImages | ImageSources | None = None,
        candidates: Candidates | None = None,
    ) -> Sample:
        """Build a sample that predicts each next token of ``token_ids`` (length n + 1 gives a sample of length n).

        Args:
            token_ids: the sequence, prompt first.
            prompt_length: targets inside the first ``prompt_length`` tokens get weight 0.
            weights: [n + 1], the weight of predicting each token (the first is never predicted); default 1.
            pair: as in the sample.
            chosen: as in the sample.
            adapter: as in the sample.
            routed_experts: as in the sample, of n or n + 1 tokens: the last token is not an input.
            images: as in the sample; the last token is none of theirs.
            candidates: candidates for n + 1 tokens, in the row of the token that they could replace; the first row is not used.
        """
        tokens = _vector(token_ids, "token_ids", torch.int64)
        if len(tokens) < 2:
            raise DataError(f"a causal sample needs at least 2 tokens, got {len(tokens)}")
        if not 0 <= prompt_length < len(tokens):
            raise DataError(
                f"prompt_length must be in [0, {len(tokens)}), got {prompt_length}: no token would be trained"
            )
        # A clone: the caller's weights must not change.
        target_weights = (
            torch.ones(len(tokens)) if weights is None else _vector(weights, "weights", torch.float32).clone()
        )
        if len(target_weights) != len(tokens):
            raise DataError(f"weights must have one entry per token ({len(tokens)}), got {len(target_weights)}")
        target_weights[:prompt_length] = 0
        return cls(
            input_ids=tokens[:-1],
            target_ids=tokens[1:],
            weights=target_weights[1:],
            pair=pair,
            chosen=chosen,
            adapter=adapter,
            routed_experts=None if routed_experts is None else routed_experts[: len(tokens) - 1],
            images=images,
            candidates=None if candidates is None else candidates[1:],
        )

    @classmethod
    def response(
        cls,
        prompt: Sequence[int] | Tensor,
        tokens: Sequence[int] | Tensor,
        logprobs: Sequence[float] | Tensor,
        advantage: float | Sequence[float] | Tensor,
        **fields: Any,
    ) -> Sample:
        """Build a sample of a sampled response, for a policy's losses: only its tokens have weight 1.

        With a prompt of p and a response of r tokens, all fields of the sample have p + r - 1 entries.

        Args:
            prompt: [p] token ids, p >= 1.
            tokens: [r] token ids of the response, r >= 1.
            logprobs: [r] log-probabilities, in nats, of ``tokens`` under the policy that sampled them: ``old_logprobs``.
            advantage: of the whole response, or [r] of each token.
            fields: ``adapter``, ``temperature``, or other fields of the sample of p + r - 1 entries.

        Raises:
            DataError: prompt or response is empty, lengths differ, or a number is not finite.
        """
        prompt, tokens = _vector(prompt, "prompt", torch.int64), _vector(tokens, "tokens", torch.int64)
        count, before = len(tokens), len(prompt) - 1
        if before < 0 or not count:
            raise DataError(f"a response needs a prompt and tokens, got {len(prompt)} and {count} tokens")
        shared = isinstance(advantage, int | float) or getattr(advantage, "ndim", None) == 0
        numbers = {"logprobs": logprobs, "advantage": [float(advantage)] * count if shared else advantage}  # type: ignore[arg-type]
        columns = {"weights": torch.ones(count)} | {
            name: _vector(v, name, torch.float32) for name, v in numbers.items()
        }
        for name, column in columns.items():
            if len(column) != count:
                raise DataError(f"{name} must have one entry per token of the response ({count}), got {len(column)}")
            columns[name] = torch.cat([torch.zeros(before), column])
        ids = torch.cat([prompt, tokens])
        return cls(
            input_ids=ids[:-1],
            target_ids=ids[1:],
            weights=columns["weights"],
            old_logprobs=columns["logprobs"],
            advantages=columns["advantage"],
            **fields,
        )

    @classmethod
    def scored(
        cls, token_ids: Sequence[int] | Tensor, weights: Sequence[float] | Tensor | None = None, **fields: Any
    ) -> Sample:
        """Build a sample for a model with a scalar head, which has a value after each of ``token_ids``.

        Args:
            token_ids: the sequence, prompt first.
            weights: [n], of each value in the loss; default 1.
            fields: ``returns``, ``old_values``, ``extra``, ``pair``, ``chosen``, ``label`` or ``adapter``.
        """
        tokens = _vector(token_ids, "token_ids", torch.int64)
        # Targets are unused here, but every sample must have them.
        return cls(tokens, tokens, torch.ones(len(tokens)) if weights is None else weights, **fields)


def _label(value: Any) -> int | Tensor:
    """Convert ``label`` to an integer, also from a scalar of numpy or torch, or to a vector of float32 on the CPU."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(number, int):
        return int(number)
    if isinstance(number, float):
        raise DataError(
            f"label is {number}; it must be an integer, or a list of floats, one for each label of the head"
        )
    return _vector(value, "label", torch.float32)


def _states(values: Any) -> Tensor:
    """Check ``teacher_states``; their dtype, that of the teacher's output layer, is kept."""
    if not isinstance(values, Tensor) or values.dim() != 2 or not values.is_floating_point():
        shape = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise DataError(f"teacher_states must be a tensor of floats [length, hidden size], got {shape}")
    return values.detach().cpu()


def _routing(values: Any) -> Tensor:
    """Convert ``routed_experts`` to int16 [length, layers, k] on the CPU."""
    tensor = as_tensor(values, "routed_experts")
    if tensor.dim() != 3 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise DataError(
            f"routed_experts must be integers of shape [length, layers, k], got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.to(torch.int16)


def _vector(values: Any, name: str, dtype: torch.dtype, unused: Tensor | None = None) -> Tensor:
    """Convert ``values`` to a one-dimensional CPU tensor; floats must be finite, except where ``unused``: there they become 0."""
    tensor = as_tensor(values, name)
    if tensor.dim() != 1:
        raise DataError(f"{name} must be one-dimensional, got shape {tuple(tensor.shape)}")
    # An empty list becomes a tensor of floats.
    if dtype == torch.int64 and tensor.is_floating_point() and len(tensor):
        raise DataError(f"{name} must hold integers, got {tensor.dtype}")
    tensor = tensor.to(dtype)
    if unused is not None and len(unused) == len(tensor):
        tensor = torch.where(unused & ~tensor.isfinite(), 0.0, tensor)
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        index = int((~torch.isfinite(tensor)).nonzero()[0])
        raise DataError(f"{name}[{index}] is {float(tensor[index])}; all values must be finite")
    return tensor
