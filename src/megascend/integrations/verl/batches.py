"""verl's batches as megascend's samples, and verl's loss functions on megascend's micro batches.

verl's value at place t of a sequence is that of token t + 1. Its losses take whole sequences of a micro batch and give one
number, divided by the global batch's tokens and multiplied by the data parallel size. Megascend's take the tokens of a rank and
give a value for each. So verl's loss is differentiated here, with respect to each log-probability and entropy, and the products
of these gradients with what they belong to are the values: their sum has the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.py_functional import append_to_dict

from megascend.batch.losses import Loss, LossInputs
from megascend.batch.sample import Sample
from megascend.errors import DataError

VerlLoss = Callable[..., tuple[Tensor, dict[str, Any]]]

ROW, PLACE = "verl_row", "verl_place"
"""Fields of every token: which sequence of the batch it is of, and where in it. Exact in float32 below 2**24."""

REFUSED = {
    "calculate_sum_pi_squared": "the sum of squared probabilities is not computed",
    "distillation_use_topk": "distillation by the teacher's likeliest tokens is not supported",
    "distillation_only": "distillation by the teacher's likeliest tokens is not supported",
    "enable_routing_replay": "router replay is not supported",
}


def check(data: TensorDict) -> None:
    """Raise DataError for what a batch asks of the engine and megascend does not have."""
    for name, why in REFUSED.items():
        if tensordict_utils.get(data, name, default=False):
            raise DataError(f"verl's batch has {name}=True: {why}")
    if not data["input_ids"].is_nested:
        raise DataError(
            "verl's batch is padded; the engine takes data.pad_mode=no_padding, as verl's Megatron engine does"
        )
    if "multi_modal_inputs" in data and any(data["multi_modal_inputs"]):
        raise DataError("verl's batch has images or other multi_modal_inputs: only text is supported")
    temperature = torch.as_tensor(tensordict_utils.get(data, "temperature", default=1.0), dtype=torch.float32)
    if bool((temperature != 1.0).any()):
        raise DataError(
            f"verl's batch has temperature={temperature.flatten()[0]:g}: log-probabilities are those of temperature 1; set the "
            "rollout's temperature to 1"
        )


def samples(data: TensorDict, adapter: str | None) -> list[Sample]:
    """One for each sequence. All tokens have weight 1: verl's loss has masks of its own."""
    found = []
    for row, ids in enumerate(data["input_ids"].unbind()):
        tokens = ids.cpu()
        found.append(
            Sample(
                input_ids=tokens,
                target_ids=tokens.roll(-1),
                weights=torch.ones(len(tokens)),
                extra={ROW: torch.full((len(tokens),), float(row)), PLACE: torch.arange(len(tokens)).float()},
                adapter=adapter,
            )
        )
    return found


def token_budget(data: TensorDict, context_parallel: int) -> int:
    """Tokens of one micro batch, from what verl has written into the batch.

    Without dynamic batch sizes it is their number of sequences times the longest one's length: as many short ones fit in.
    """
    longest = max(_lengths(data))
    if tensordict_utils.get(data, "use_dynamic_bsz", default=True):
        each = tensordict_utils.get(data, "max_token_len_per_gpu")
        if each is None:
            raise DataError("verl's batch has use_dynamic_bsz=True and no max_token_len_per_gpu")
        return int(each) * context_parallel
    rows = tensordict_utils.get(data, "micro_batch_size_per_gpu")
    if rows is None:
        raise DataError("verl's batch has use_dynamic_bsz=False and no micro_batch_size_per_gpu")
    return int(rows) * longest


def _lengths(data: TensorDict) -> list[int]:
    ids: Any = data["input_ids"]  # jagged
    return ids.offsets().diff().tolist()


@dataclass
class Collected:
    """What a batch's micro batches gave on a rank that sees outputs, in the order in which they ran.

    Attributes:
        outputs: by name, each sequence's tensor by its row in the batch.
        losses: verl's loss of each micro batch.
        metrics: by name, each micro batch's.
    """

    outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, rows: Sequence[int], outputs: Mapping[str, Sequence[Tensor]]) -> None:
        for name, tensors in outputs.items():
            self.outputs.setdefault(name, {}).update(zip(rows, tensors, strict=True))

    def as_verl(self) -> dict[str, Any]:
        """``forward_backward_batch``'s answer: sequences in the order of the batch."""
        outputs = {
            name: torch.nested.as_nested_tensor([of[row] for row in sorted(of)], layout=torch.jagged)
            for name, of in self.outputs.items()
        }
        return {"model_output": outputs, "loss": self.losses, "metrics": self.metrics}


class BatchLoss:
    """verl's loss function on the micro batches of one batch.

    Args:
        data: the whole batch of this data parallel rank.
        function: verl's.
        group: its data parallel group, which verl hands to losses.
        device: of the tensors that losses see.
        context_parallel, data_parallel: sizes.
    """

    def __init__(
        self, data: TensorDict, function: VerlLoss, group: Any, device: torch.device, context_parallel: int,
        data_parallel: int,
    ) -> None:  # fmt: skip
        self._data, self._function, self._group, self._device = data, function, group, device
        self._context, self._parallel = context_parallel, data_parallel
        self._lengths = _lengths(data)
        self._outputs: tuple[str, ...] = ("log_probs", "entropy")
        self.collected = Collected()

    def as_loss(self, entropy: bool, of: Literal["logprobs", "values"] = "logprobs") -> Loss:
        """For ``forward_backward``, of log-probabilities (and entropies) or of a critic's values."""
        self._outputs = ("values",) if of == "values" else ("log_probs", "entropy")
        return Loss("verl", self._values, entropy=entropy, reduction="sum", of=of)

    def of_whole(self, outputs: Mapping[str, Sequence[Tensor]]) -> None:
        """verl's loss of the whole batch at once, without gradients, from each sequence's outputs."""
        rows = range(len(self._lengths))
        found = {name: torch.nested.as_nested_tensor(list(of), layout=torch.jagged) for name, of in outputs.items()}
        self._call(list(rows), found)

    def _values(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        assert inputs.extra is not None
        row, place = inputs.extra[ROW].long(), inputs.extra[PLACE].long()
        own = inputs.weights != 0
        given = [of for of in (logprobs, inputs.entropy) if of is not None]
        rows = self._rows(row, own, inputs)
        starts = torch.zeros(len(self._lengths), dtype=torch.long)
        lengths = torch.tensor([self._lengths[each] for each in rows])
        starts[rows] = lengths.cumsum(0) - lengths
        at = starts.to(row.device)[row] + place
        whole = [self._whole(of, at, own, int(lengths.sum()), inputs) for of in given]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(self._device)
        nested = [torch.nested.nested_tensor_from_jagged(of, offsets) for of in whole]
        total = self._call(rows, dict(zip(self._outputs, nested, strict=False)))
        gradients = torch.autograd.grad(total, whole, allow_unused=True) if total.requires_grad else [None] * len(whole)
        values = logprobs * 0.0
        for of, gradient in zip(given, gradients, strict=True):
            if gradient is not None:
                values = values + torch.where(own, gradient[torch.where(own, at, 0)], 0.0) * of / self._parallel
        return values

    def _rows(self, row: Tensor, own: Tensor, inputs: LossInputs) -> list[int]:
        """Rows of the batch that are in this micro batch, on whichever context parallel rank their tokens are."""
        present = row.new_zeros(len(self._lengths), dtype=torch.float32)
        present[row[own]] = 1.0
        if self._context > 1:
            present = inputs.reduce_context(present)
        return present.nonzero().flatten().tolist()

    def _whole(self, values: Tensor, at: Tensor, own: Tensor, length: int, inputs: LossInputs) -> Tensor:
        """[length], all tokens of the micro batch's sequences in verl's order, to be differentiated by."""
        whole = values.new_zeros(length).index_copy(0, at[own], values.detach()[own])
        if self._context > 1:
            whole = inputs.reduce_context(whole)
        return whole.detach().requires_grad_()

    def _call(self, rows: list[int], outputs: dict[str, Tensor]) -> Tensor:
        data = tensordict_utils.index_select_tensor_dict(self._data, rows).to(self._device)
        total, metrics = self._function(model_output=outputs, data=data, dp_group=self._group)
        self.collected.losses.append(float(total.detach()))
        append_to_dict(self.collected.metrics, metrics)
        self.collected.add(rows, {name: [each.detach() for each in of.unbind()] for name, of in outputs.items()})
        return total
