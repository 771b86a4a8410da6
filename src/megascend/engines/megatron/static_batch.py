"""A micro batch whose memory stays where it is: captured kernels read it by address, and every call writes its own contents."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megascend.batch.micro_batch import MicroBatch
from megascend.batch.step_shapes import StepShape, adapter_ends, boundaries
from megascend.kernels.host_copy import to_device
from megascend.lora.grouped import Segments
from megascend.lora.segments import TokenSegments, tokens_per_adapter


class StaticBatch:
    """The inputs of one shape.

    Attributes:
        batch: what the model is given: token ids, positions, segments of attention and of adapters.
        coefficients, entropy_coefficients: float32 [tokens]: of each token's log-probability (or its negative, for cross
            entropy) and entropy in what is differentiated; 0 at padding.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.coefficients = torch.zeros(shape.tokens, device=device)
        self.entropy_coefficients = torch.zeros(shape.tokens, device=device)
        self._boundaries = torch.zeros(shape.samples + 1, dtype=torch.int32, device=device)
        self._ends = torch.zeros(shape.adapters, dtype=torch.int32, device=device)
        self._tokens = torch.arange(shape.tokens, dtype=torch.int32, device=device)

        def indices(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int64, device=device)

        nothing = indices(0)  # what only the loss needs, which is computed on the micro batch itself
        self.batch = MicroBatch(
            members=[],
            lengths=[],
            padded_lengths=[],
            input_ids=indices(shape.rows, shape.tokens // shape.rows),
            position_ids=indices(shape.rows, shape.tokens // shape.rows),
            packed=self._packed(),
            targets=indices(shape.tokens),
            weights=self.coefficients,
            fields={},
            sample=nothing,
            place=nothing,
            pairs=indices(0, 2),
            adapter_index=[],
            positions=[],
            padding=nothing,
            segments=self._segments(indices(shape.tokens)),
        )

    def _packed(self) -> PackedSeqParams | None:
        if not self._shape.samples:
            return None
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self._boundaries,
            cu_seqlens_kv=self._boundaries,
            max_seqlen_q=self._shape.longest,
            max_seqlen_kv=self._shape.longest,
        )

    def _segments(self, adapter_index: Tensor) -> TokenSegments | None:
        """With several adapters the ends of their tokens are known to the device alone."""
        if not self._shape.adapters:
            return None
        whole = Segments(self._ends) if self._shape.adapters > 1 else None
        return TokenSegments(None if whole else 0, whole, whole, adapter_index)

    def load(self, batch: MicroBatch) -> None:
        """Take the tokens of ``batch``. Padding is token 0 at position 0."""
        for static, values in (
            (self.batch.input_ids, batch.input_ids),
            (self.batch.position_ids, batch.position_ids),
            (self.batch.targets, batch.targets),
        ):
            write(static, values)
        if self._shape.samples:
            starts = boundaries(batch.padded_lengths, self._shape)
            self._boundaries.copy_(to_device(torch.tensor(starts, dtype=torch.int32), self._device))
        if self._shape.adapters > 1:
            counts = tokens_per_adapter(batch.adapter_index, batch.padded_lengths, self._shape.adapters)
            ends = adapter_ends(counts, self._shape)
            self._ends.copy_(to_device(torch.tensor(ends, dtype=torch.int32), self._device))
            self.batch.segments.adapter_index.copy_(torch.searchsorted(self._ends, self._tokens, right=True))


def write(static: Tensor, values: Tensor) -> None:
    """``values`` to the beginning of ``static``, 0 behind them; shapes are flattened."""
    flat, count = static.view(-1), values.numel()
    flat[:count].copy_(values.reshape(-1), non_blocking=True)
    flat[count:].zero_()
