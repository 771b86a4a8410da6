"""Convert verl's batches to samples, and copy their micro batches to the device.

Nothing here synchronizes with the device: batches are on the host, where verl builds them, and the fields that losses read are
copied asynchronously while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils

from megascend.errors import DataError
from megascend.training.batch.sample import Sample
from megascend.training.kernels.host_copy import to_device

POSITION = "verl_position"
"""Extra field of every token: its position in its sequence, from 1; padding has 0. Exact in float32 below 2**24."""

# Flags that verl writes into a batch. Ignoring one would train something else without an error.
REFUSED = {
    "calculate_sum_pi_squared": "the sum of squared probabilities is not computed",
    "distillation_use_topk": "distillation by the teacher's likeliest tokens is not supported",
    "distillation_only": "distillation by the teacher's likeliest tokens is not supported",
}


def check(data: TensorDict) -> None:
    """Raise DataError if a batch requires something that the engine does not support."""
    for name, reason in REFUSED.items():
        if tensordict_utils.get(data, name, default=False):
            raise DataError(f"verl's batch has {name}=True: {reason}")
    if not data["input_ids"].is_nested:
        raise DataError(
            "verl's batch is padded; the engine takes data.pad_mode=no_padding, as verl's Megatron engine does"
        )
    if "multi_modal_inputs" in data and any(data["multi_modal_inputs"]):
        raise DataError("verl's batch has images or other multi_modal_inputs: only text is supported")
    # A number, or a tensor with one per sequence.
    temperature = torch.as_tensor(tensordict_utils.get(data, "temperature", default=1.0), dtype=torch.float32)
    if bool((temperature != 1.0).any()):
        raise DataError(
            f"verl's batch has temperature={temperature.flatten()[0]:g}: log-probabilities are those of temperature 1; set the "
            "rollout's temperature to 1"
        )


def known_experts(routed: Tensor) -> Tensor:
    """Return a sequence's ``routed_experts`` [tokens, layers, k], -1 for tokens that verl has zeros for: not known."""
    unknown = (routed == 0).flatten(1).all(1)
    return torch.where(unknown[:, None, None], -1, routed.to(torch.int16))


class Batch:
    """verl's batch of this data parallel rank, validated.

    Attributes:
        data: verl's TensorDict, on the host.
        lengths: tokens of each sequence.
    """

    def __init__(self, data: TensorDict) -> None:
        on_device = any(isinstance(value, Tensor) and value.device.type != "cpu" for _, value in data.items())
        # verl passes host batches; a caller that passes one on the device pays for one copy here, not one per micro batch.
        self.data: TensorDict = data.cpu() if on_device else data
        check(self.data)
        self._unbound: dict[str, Sequence[Tensor]] = {}
        self.lengths: list[int] = self.data["input_ids"].offsets().diff().tolist()

    def samples(self, adapter: str | None, weights: Sequence[Tensor] | None = None) -> list[Sample]:
        """Build one sample per sequence.

        Args:
            weights: target weights per sequence; default: 1, because verl's losses apply their masks themselves.
        """
        # One tensor each, which all sequences slice, instead of two small ones per sequence.
        longest = max(self.lengths)
        routed: Sequence[Any] = [None] * len(self.lengths)
        if tensordict_utils.get(self.data, "enable_routing_replay", default=False) and "routed_experts" in self.data:
            routed = [known_experts(part) for part in self.data["routed_experts"].values().split(self.lengths)]
        positions, unit_weights = torch.arange(1, longest + 1, dtype=torch.float32), torch.ones(longest)
        return [
            Sample(
                input_ids=ids,
                # The last position has no target: its log-probability is of the first token, and verl's masks exclude it.
                target_ids=ids.roll(-1),
                weights=unit_weights[: len(ids)] if weights is None else weights[row],
                extra={POSITION: positions[: len(ids)]},
                adapter=adapter,
                routed_experts=routed[row],
            )
            for row, ids in enumerate(self.data["input_ids"].values().split(self.lengths))
        ]

    def token_budget(self, context_parallel: int) -> int:
        """Return the tokens per micro batch, from verl's settings in the batch.

        Without dynamic batch sizes it is verl's number of sequences times the longest length, so more short sequences fit.
        """
        if tensordict_utils.get(self.data, "use_dynamic_bsz", default=True):
            max_tokens = tensordict_utils.get(self.data, "max_token_len_per_gpu")
            if max_tokens is None:
                raise DataError("verl's batch has use_dynamic_bsz=True and no max_token_len_per_gpu")
            # verl's limit is per device, and context parallelism splits a sequence over several.
            return int(max_tokens) * context_parallel
        rows = tensordict_utils.get(self.data, "micro_batch_size_per_gpu")
        if rows is None:
            raise DataError("verl's batch has use_dynamic_bsz=False and no micro_batch_size_per_gpu")
        return int(rows) * max(self.lengths)

    def trained_tokens(self) -> float:
        """Return the sum of verl's loss mask."""
        mask = self.data["loss_mask"]
        return (mask.values() if mask.is_nested else mask).sum().item()

    def set_engine_values(self, **values: float) -> None:
        """Write values into the batch that verl's losses expect from an engine."""
        tensordict_utils.assign_non_tensor(self.data, **values)

    def rows(self, rows: Sequence[int], device: torch.device) -> TensorDict:
        """Select sequences and copy them to the device asynchronously.

        Equivalent to verl's ``index_select_tensor_dict``, which unbinds every nested tensor again for each micro batch.
        """
        index = torch.tensor(rows)
        # Shared by fields of equal lengths: torch treats nested tensors with the same offsets object as of the same shape.
        offsets: dict[tuple[int, ...], Tensor] = {}  # most fields have the lengths of the tokens
        fields = {}
        for name, value in self.data.items():
            if not isinstance(value, Tensor):
                fields[name] = value[index] if value.shape else value  # type: ignore[index]
            elif not value.is_nested:
                fields[name] = to_device(value[index], device)
            else:
                chosen = [self._parts(name, value)[row] for row in rows]
                dim = _ragged_dim(value)
                lengths = tuple(part.shape[dim] for part in chosen)
                values = to_device(torch.cat(chosen, dim), device)
                fields[name] = nested(values, lengths, offsets.get(lengths), dim)
                offsets[lengths] = fields[name].offsets()
        return TensorDict(source=fields, batch_size=len(rows))

    def _parts(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        if name not in self._unbound:
            self._unbound[name] = tensor.unbind()
        return self._unbound[name]


def _ragged_dim(tensor: Tensor) -> int:
    """Return the ragged dimension of a jagged tensor's parts."""
    # Private, but torch has no public way to ask. unbind() removes the batch dimension, hence - 1.
    return getattr(tensor, "_ragged_idx", 1) - 1


def nested(values: Tensor, lengths: Sequence[int], offsets: Tensor | None = None, ragged_dim: int = 0) -> Tensor:
    """Build a jagged tensor with its lengths cached, which torch would otherwise read back from the device.

    Args:
        values: all parts, concatenated.
        offsets: start of each part, and the end, on the device of ``values``; default: computed from ``lengths``.
        ragged_dim: dimension of the concatenation.
    """
    if offsets is None:
        offsets = to_device(torch.tensor([0, *lengths]).cumsum(0), values.device)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, jagged_dim=ragged_dim + 1, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )
