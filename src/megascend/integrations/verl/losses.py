"""Run verl's loss functions on megascend's micro batches.

In verl, position t of a sequence has the value of token t + 1. Its losses take whole sequences of a micro batch and return one
number, divided by the global batch's tokens and multiplied by the data parallel size. megascend's losses take the tokens of a
rank and return one value per token. So verl's loss is differentiated here with respect to each log-probability and entropy, and
each token's value is the product of gradient and input: their sum has the same gradient.

verl's SFT loss is a weighted cross entropy, whose gradient is known before the log-probabilities. So logits and gradient are
computed together, and the logits once instead of twice (:func:`cross_entropy_weights`). verl's function is still called for its
value, and its gradient is compared with the one applied.
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

from megascend.errors import LossFunctionError
from megascend.integrations.verl.batches import POSITION, Batch, nested
from megascend.training.batch.loss import Loss, LossInputs
from megascend.training.kernels.host_copy import HostCopy, to_device

VerlLoss = Callable[..., tuple[Tensor, dict[str, Any]]]

LARGEST_DIFFERENCE = 1e-3
"""Tolerance between the gradients of verl's loss and of the cross entropy, which are about 1 at most."""


def cross_entropy_weights(batch: Batch, function: VerlLoss | None) -> list[Tensor] | None:
    """Return target weights by sequence if ``function`` is verl's ``sft_loss`` and a cross entropy on this batch, else None.

    verl shifts the concatenated mask of a micro batch, so an unmasked first token trains the last position of the preceding
    sequence, whichever that is. Such batches are left to verl's function.
    """
    # verl passes partial(sft_loss, config=...); any other argument could change the loss.
    settings = function.keywords if isinstance(function, partial) and not function.args else {}
    inner = function.func if isinstance(function, partial) and settings.keys() <= {"config"} else function
    mask = batch.data["loss_mask"]
    pad_mode = tensordict_utils.get(batch.data, "pad_mode", default=DatasetPadMode.NO_PADDING)
    if inner is not sft_loss or pad_mode != DatasetPadMode.NO_PADDING or not mask.is_nested:
        return None
    masks = mask.values().float()
    # A first token with a mask (see above), or weights that a cross entropy cannot have.
    if bool(masks[mask.offsets()[:-1]].any()) or not bool(((masks >= 0) & masks.isfinite()).all()):
        return None
    # verl masks tokens; weights here belong to the position that predicts the token.
    return [row_mask.roll(-1) for row_mask in masks.split(batch.lengths)]


@dataclass(frozen=True)
class VerlLossResult:
    """Result of verl's loss function on some sequences.

    Attributes:
        rows: indices of the sequences in the batch.
        outputs: by name, the values of each sequence, on the device.
        loss, metrics: results of the function.
    """

    rows: Sequence[int]
    outputs: Mapping[str, Sequence[Tensor]]
    loss: Tensor
    metrics: Mapping[str, Any]


class BatchResults:
    """Results of a batch's micro batches in execution order, on a rank of the last pipeline stage."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[Any]] = {}
        self._outputs: dict[str, dict[int, Tensor]] = {}
        self._losses: list[Tensor] = []
        self._differences: list[Tensor] = []
        self._copy: HostCopy | None = None

    def add(self, result: VerlLossResult, difference: Tensor | None = None) -> None:
        """Add the result of one micro batch.

        Args:
            difference: maximum difference between verl's gradient and the one applied.
        """
        for name, tensors in result.outputs.items():
            self._outputs.setdefault(name, {}).update(zip(result.rows, tensors, strict=True))
        self._losses.append(result.loss.detach().float().reshape(()))
        append_to_dict(self.metrics, dict(result.metrics))
        if difference is not None:
            self._differences.append(difference)

    def start_copy(self) -> None:
        """Start the copy to the host that :meth:`as_verl` reads."""
        if self._losses:
            self._copy = HostCopy(torch.stack([*self._losses, *self._differences]))

    def as_verl(self) -> dict[str, Any]:
        """Return the result of ``forward_backward_batch``, with sequences in the order of the batch."""
        if self._copy is None:
            self.start_copy()
        numbers = [] if self._copy is None else self._copy.read().tolist()
        losses, differences = numbers[: len(self._losses)], numbers[len(self._losses) :]
        # `not all(<=)`, so that a NaN counts as a difference.
        if not all(difference <= LARGEST_DIFFERENCE for difference in differences):
            raise LossFunctionError(
                "verl's sft_loss has another gradient than the mean of -log_prob over loss_mask, which the step took (by "
                f"{max(differences):g} of a token's); install verl 0.9.1"
            )
        outputs = {}
        for name, rows in self._outputs.items():
            # Micro batches need not hold the sequences in verl's order.
            ordered = [rows[row] for row in sorted(rows)]
            outputs[name] = nested(torch.cat(ordered), [len(tensor) for tensor in ordered])
        return {"model_output": outputs, "loss": losses, "metrics": self.metrics}


class BatchLoss:
    """verl's loss function on the micro batches of one batch.

    Args:
        batch: batch of this data parallel rank.
        group: data parallel group, an argument of verl's losses.
        tokens: sum of the loss masks of all data parallel ranks.
    """

    def __init__(
        self, batch: Batch, function: VerlLoss, group: Any, device: torch.device, context_parallel: int,
        data_parallel: int, tokens: float,
    ) -> None:  # fmt: skip
        self._batch, self._function, self._group, self._device = batch, function, group, device
        self._context, self._parallel, self._tokens = context_parallel, data_parallel, tokens
        self._outputs: tuple[str, ...] = ("log_probs", "entropy")
        self.results = BatchResults()

    def as_loss(self, entropy: bool, quantity: Literal["logprobs", "values"] = "logprobs") -> Loss:
        """Return the Loss for ``forward_backward``, of log-probabilities (and entropies) or of a critic's values."""
        self._outputs = ("values",) if quantity == "values" else ("log_probs", "entropy")
        return Loss("verl", self._values, entropy=entropy, reduction="sum", of=quantity)

    def as_cross_entropy(self) -> Loss:
        """Return the Loss for a function that is a cross entropy, of samples with :func:`cross_entropy_weights`."""
        return Loss("verl's sft_loss", self._cross_entropy, is_cross_entropy=True)

    def evaluate_batch(self, outputs: Mapping[str, Tensor]) -> None:
        """Evaluate verl's loss on the whole batch, without gradients, from the concatenated outputs of all sequences."""
        rows = list(range(len(self._batch.lengths)))
        result = self._call(rows, outputs)
        self.results.add(result)

    def _values(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        tensors = [tensor for tensor in (logprobs, inputs.entropy) if tensor is not None]
        result, gradients = self._evaluate(tensors, inputs)
        self.results.add(result)
        values = logprobs * 0.0  # in the graph even if verl's loss depends on no input
        for tensor, gradient in zip(tensors, gradients, strict=True):
            # verl scales its loss by the data parallel size, for gradients that are averaged; here they are summed
            values = values + gradient * tensor / self._parallel
        return values

    def _cross_entropy(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        result, (gradient,) = self._evaluate([logprobs], inputs)
        verl_gradient = gradient * (self._tokens / self._parallel)
        # verl's gradient of a token should be -weight: the sum is the difference. Compared on the device, read with the losses.
        self.results.add(result, (verl_gradient + inputs.weights).abs().max())
        return -logprobs

    def _evaluate(self, tensors: Sequence[Tensor], inputs: LossInputs) -> tuple[VerlLossResult, list[Tensor]]:
        """Evaluate verl's function on a micro batch; return also its gradients for each of ``tensors``, 0 for padding."""
        rows = sorted(inputs.members)
        length = sum(self._batch.lengths[row] for row in rows)
        indices = self._token_indices(rows, length, inputs)
        full = [self._full_sequences(tensor, indices, length, inputs) for tensor in tensors]
        result = self._call(rows, dict(zip(self._outputs, full, strict=False)))
        # A loss may be constant, for example when every token is masked.
        depends = result.loss.requires_grad
        parts = torch.autograd.grad(result.loss, full, allow_unused=True) if depends else [None] * len(full)
        gradients = [
            torch.zeros_like(tensor) if part is None else part for tensor, part in zip(full, parts, strict=True)
        ]
        # padding has the index of the appended 0
        return result, [torch.cat([tensor, tensor.new_zeros(1)])[indices] for tensor in gradients]

    def _token_indices(self, rows: Sequence[int], length: int, inputs: LossInputs) -> Tensor:
        """Return token indices, int64 [n], into the micro batch's ``length`` tokens in verl's order; ``length`` for padding."""
        starts, end = {}, 0
        for row in rows:
            starts[row], end = end, end + self._batch.lengths[row]
        assert inputs.extra is not None
        position = inputs.extra[POSITION].long() - 1
        start = to_device(torch.tensor([starts[member] for member in inputs.members]), position.device)
        return torch.where(position < 0, length, start[inputs.sample] + position)

    def _full_sequences(self, values: Tensor, indices: Tensor, length: int, inputs: LossInputs) -> Tensor:
        """Scatter values to all tokens of the micro batch in verl's order, [length], as a leaf that requires gradients."""
        # one more slot, which takes all padding
        full = values.new_zeros(length + 1).index_copy_(0, indices, values.detach())[:length]
        # Each context parallel rank has some tokens of each sequence, and verl's loss needs all of them.
        if self._context > 1:
            full = inputs.reduce_context(full)
        # A leaf: autograd stops here, and the gradient is carried over to the model's own tensors by _values().
        return full.detach().requires_grad_()

    def _call(self, rows: list[int], outputs: Mapping[str, Tensor]) -> VerlLossResult:
        """Call verl's function on the sequences ``rows``, whose concatenated outputs are ``outputs``."""
        lengths = [self._batch.lengths[row] for row in rows]
        data = self._batch.rows(rows, self._device)
        offsets = data["input_ids"].offsets()
        nested_outputs = {name: nested(tensor, lengths, offsets) for name, tensor in outputs.items()}
        # By keyword, as verl's engines call it: verl binds config with partial().
        loss, metrics = self._function(model_output=nested_outputs, data=data, dp_group=self._group)
        return VerlLossResult(
            rows, {name: tensor.detach().split(lengths) for name, tensor in outputs.items()}, loss, metrics
        )
