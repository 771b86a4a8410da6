"""verl's loss functions on megascend's micro batches.

verl's value at place t of a sequence is that of token t + 1. Its losses take whole sequences of a micro batch and give one
number, divided by the global batch's tokens and multiplied by the data parallel size. Megascend's take the tokens of a rank and
give a value for each. So verl's loss is differentiated here, with respect to each log-probability and entropy, and the products
of these gradients with what they belong to are the values: their sum has the same gradient.

verl's loss for supervised fine-tuning is a weighted cross entropy, whose gradient is known before the log-probabilities are: it
is formed with the logits at hand, and they are computed once instead of twice (:func:`cross_entropy_weights`). verl's function is
called all the same, for its number, and its gradient must be that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.py_functional import append_to_dict
from verl.workers.utils.losses import sft_loss

from megascend.batch.losses import Loss, LossInputs
from megascend.errors import LossFunctionError
from megascend.integrations.verl.batches import POSITION, Batch, nested
from megascend.kernels.host_copy import HostCopy, to_device

VerlLoss = Callable[..., tuple[Tensor, dict[str, Any]]]

LARGEST_DIFFERENCE = 1e-3
"""Of a gradient of verl's loss from that of the cross entropy, whose largest is about 1."""


def cross_entropy_weights(batch: Batch, function: VerlLoss | None) -> list[Tensor] | None:
    """The weight of each target, by sequence, if ``function`` is verl's ``sft_loss`` and a cross entropy on this batch.

    It shifts the mask of all sequences of a micro batch at once. So a sequence whose first token has a mask would train the last
    place of the one before it, whichever that is; such batches are left to verl's function itself.
    """
    settings = function.keywords if isinstance(function, partial) and not function.args else {}
    inner = function.func if isinstance(function, partial) and settings.keys() <= {"config"} else function
    mask = batch.data["loss_mask"]
    pad_mode = tensordict_utils.get(batch.data, "pad_mode", default=DatasetPadMode.NO_PADDING)
    if inner is not sft_loss or pad_mode != DatasetPadMode.NO_PADDING or not mask.is_nested:
        return None
    masks = mask.values().float()
    if bool(masks[mask.offsets()[:-1]].any()) or not bool(((masks >= 0) & masks.isfinite()).all()):
        return None
    return [row_mask.roll(-1) for row_mask in masks.split(batch.lengths)]


@dataclass(frozen=True)
class Evaluated:
    """What verl's function made of sequences.

    Attributes:
        rows: which of the batch's.
        outputs: by name, each of these sequences' values, on the device.
        loss: verl's number.
        metrics: verl's.
    """

    rows: Sequence[int]
    outputs: Mapping[str, Sequence[Tensor]]
    loss: Tensor
    metrics: Mapping[str, Any]


class Collected:
    """What a batch's micro batches gave on a rank that sees outputs, in the order in which they ran.

    Attributes:
        metrics: by name, each micro batch's.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, list[Any]] = {}
        self._outputs: dict[str, dict[int, Tensor]] = {}
        self._losses: list[Tensor] = []
        self._differences: list[Tensor] = []
        self._copy: HostCopy | None = None

    def add(self, evaluated: Evaluated, difference: Tensor | None = None) -> None:
        """Of one micro batch.

        Args:
            difference: of verl's gradient from the one that the model was given.
        """
        for name, tensors in evaluated.outputs.items():
            self._outputs.setdefault(name, {}).update(zip(evaluated.rows, tensors, strict=True))
        self._losses.append(evaluated.loss.detach().float().reshape(()))
        append_to_dict(self.metrics, dict(evaluated.metrics))
        if difference is not None:
            self._differences.append(difference)

    def send(self) -> None:
        """Start copying to the host what :meth:`as_verl` reads there."""
        if self._losses:
            self._copy = HostCopy(torch.stack([*self._losses, *self._differences]))

    def as_verl(self) -> dict[str, Any]:
        """``forward_backward_batch``'s answer: sequences in the order of the batch.

        Raises:
            LossFunctionError: verl's sft_loss has another gradient than the cross entropy that was trained.
        """
        if self._copy is None:
            self.send()
        numbers = [] if self._copy is None else self._copy.read().tolist()
        losses, differences = numbers[: len(self._losses)], numbers[len(self._losses) :]
        if not all(difference <= LARGEST_DIFFERENCE for difference in differences):
            raise LossFunctionError(
                f"verl's sft_loss has another gradient than the mean of -log_prob over loss_mask (by {max(differences):g} times "
                "a token's): megascend's integration is for verl 0.9.1. The step was taken with that mean"
            )
        outputs = {}
        for name, rows in self._outputs.items():
            ordered = [rows[row] for row in sorted(rows)]
            outputs[name] = nested(torch.cat(ordered), [len(tensor) for tensor in ordered])
        return {"model_output": outputs, "loss": losses, "metrics": self.metrics}


class BatchLoss:
    """verl's loss function on the micro batches of one batch.

    Args:
        batch: of this data parallel rank.
        function: verl's.
        group: its data parallel group, which verl hands to losses.
        device: of the tensors that losses see.
        context_parallel, data_parallel: sizes.
        tokens: the sum of all data parallel ranks' loss masks.
    """

    def __init__(
        self, batch: Batch, function: VerlLoss, group: Any, device: torch.device, context_parallel: int,
        data_parallel: int, tokens: float,
    ) -> None:  # fmt: skip
        self._batch, self._function, self._group, self._device = batch, function, group, device
        self._context, self._parallel, self._tokens = context_parallel, data_parallel, tokens
        self._outputs: tuple[str, ...] = ("log_probs", "entropy")
        self.collected = Collected()

    def as_loss(self, entropy: bool, quantity: Literal["logprobs", "values"] = "logprobs") -> Loss:
        """For ``forward_backward``, of log-probabilities (and entropies) or of a critic's values."""
        self._outputs = ("values",) if quantity == "values" else ("log_probs", "entropy")
        return Loss("verl", self._values, entropy=entropy, reduction="sum", of=quantity)

    def as_cross_entropy(self) -> Loss:
        """The same for a function that is a cross entropy, of samples with :func:`cross_entropy_weights`."""
        return Loss("verl's sft_loss", self._cross_entropy, is_cross_entropy=True)

    def evaluate_batch(self, outputs: Mapping[str, Tensor]) -> None:
        """verl's loss of the whole batch at once, without gradients, from all sequences' outputs, one after the other."""
        rows = list(range(len(self._batch.lengths)))
        evaluated = self._call(rows, outputs)
        self.collected.add(evaluated)

    def _values(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        tensors = [tensor for tensor in (logprobs, inputs.entropy) if tensor is not None]
        evaluated, gradients = self._evaluate(tensors, inputs)
        self.collected.add(evaluated)
        values = logprobs * 0.0
        for tensor, gradient in zip(tensors, gradients, strict=True):
            values = values + gradient * tensor / self._parallel
        return values

    def _cross_entropy(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        evaluated, (gradient,) = self._evaluate([logprobs], inputs)
        verl_gradient = gradient * (self._tokens / self._parallel)
        self.collected.add(evaluated, (verl_gradient + inputs.weights).abs().max())
        return -logprobs

    def _evaluate(self, tensors: Sequence[Tensor], inputs: LossInputs) -> tuple[Evaluated, list[Tensor]]:
        """verl's function on a micro batch, and its gradient for each token of ``given``, 0 for padding."""
        rows = sorted(inputs.members)
        length = sum(self._batch.lengths[row] for row in rows)
        indices = self._token_indices(rows, length, inputs)
        full = [self._full_sequences(tensor, indices, length, inputs) for tensor in tensors]
        evaluated = self._call(rows, dict(zip(self._outputs, full, strict=False)))
        depends = evaluated.loss.requires_grad
        parts = torch.autograd.grad(evaluated.loss, full, allow_unused=True) if depends else [None] * len(full)
        gradients = [
            torch.zeros_like(tensor) if part is None else part for tensor, part in zip(full, parts, strict=True)
        ]
        return evaluated, [torch.cat([tensor, tensor.new_zeros(1)])[indices] for tensor in gradients]

    def _token_indices(self, rows: Sequence[int], length: int, inputs: LossInputs) -> Tensor:
        """int64 [n], where each token is among the ``length`` of the micro batch's sequences in verl's order; padding: behind."""
        starts, end = {}, 0
        for row in rows:
            starts[row], end = end, end + self._batch.lengths[row]
        assert inputs.extra is not None
        position = inputs.extra[POSITION].long() - 1
        start = to_device(torch.tensor([starts[member] for member in inputs.members]), position.device)
        return torch.where(position < 0, length, start[inputs.sample] + position)

    def _full_sequences(self, values: Tensor, indices: Tensor, length: int, inputs: LossInputs) -> Tensor:
        """[length], all tokens of the micro batch's sequences in verl's order, to be differentiated by."""
        full = values.new_zeros(length + 1).index_copy_(0, indices, values.detach())[:length]
        if self._context > 1:
            full = inputs.reduce_context(full)
        return full.detach().requires_grad_()

    def _call(self, rows: list[int], outputs: Mapping[str, Tensor]) -> Evaluated:
        """verl's function on the sequences ``rows``, of whose outputs ``outputs`` has all tokens, one after the other."""
        lengths = [self._batch.lengths[row] for row in rows]
        data = self._batch.rows(rows, self._device)
        offsets = data["input_ids"].offsets()
        nested_outputs = {name: nested(tensor, lengths, offsets) for name, tensor in outputs.items()}
        loss, metrics = self._function(model_output=nested_outputs, data=data, dp_group=self._group)
        return Evaluated(
            rows, {name: tensor.detach().split(lengths) for name, tensor in outputs.items()}, loss, metrics
        )
