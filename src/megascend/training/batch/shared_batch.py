"""Micro batches in which common prefixes of samples are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megascend.training.batch.micro_batch import MicroBatch, SequenceLayout, SharedRows, routed_columns
from megascend.training.batch.packing import round_up
from megascend.training.batch.sample import Sample
from megascend.training.kernels.host_copy import to_device
from megascend.training.kernels.prefix_attention import PrefixLayout


def share(
    batch: MicroBatch,
    samples: Sequence[Sample],
    common: Sequence[int],
    layout: SequenceLayout,
    device: torch.device,
) -> MicroBatch:
    """Build the micro batch that computes what each of ``batch``'s samples does not have in common with the one before it.

    Args:
        batch: of ``samples[i] for i in batch.members``, without padding; sorted so that samples follow those they share with.
        common: first tokens of each of its samples that the one before it has too.
        layout: of the rows; its padding follows the last one.
    """
    selected = [samples[member] for member in batch.members]
    own = [len(sample) - tokens for sample, tokens in zip(selected, common, strict=True)]
    count = round_up(sum(own), layout.token_multiple)
    padding = count - sum(own)
    sequence_rows: list[Tensor] = []
    for tokens, start, owned in zip(common, accumulate(own, initial=0), own, strict=False):
        prefix = sequence_rows[-1][:tokens] if tokens else torch.arange(0)
        sequence_rows.append(torch.cat([prefix, torch.arange(start, start + owned)]))
    row_of_token = torch.cat(sequence_rows)
    # Padding belongs to the last sample with tokens of its own.
    last = max(number for number, owned in enumerate(own) if owned)
    padded_rows, padded_own = list(sequence_rows), list(own)
    padded_rows[last] = torch.cat([sequence_rows[last], torch.arange(sum(own), count)])
    padded_own[last] += padding

    def columns(values: Sequence[Tensor], fill: int = 0) -> Tensor:
        """Return the samples' own rows of per-token values, and ``fill`` for padding; [rows, ...]."""
        rows = torch.cat([value[tokens:] for value, tokens in zip(values, common, strict=True)])
        return to_device(torch.cat([rows, rows.new_full((padding, *rows.shape[1:]), fill)]), device)

    positions = [torch.arange(tokens, len(sample)) for sample, tokens in zip(selected, common, strict=True)]
    owns = torch.cat([torch.arange(len(sample)) >= tokens for sample, tokens in zip(selected, common, strict=True)])
    token_positions = batch.position_ids.flatten(-2)  # [tokens], or [3, tokens] of a model that takes images
    own_positions = token_positions[..., to_device(owns.nonzero()[:, 0], device)]
    padding_positions = to_device(torch.arange(len(selected[last]), len(selected[last]) + padding), device)
    padding_positions = padding_positions.expand(*own_positions.shape[:-1], padding)
    input_ids = columns([sample.input_ids for sample in selected])
    counts = torch.bincount(row_of_token, minlength=count)
    routed = routed_columns(selected)
    numbers = [torch.full((len(sample),), number) for number, sample in enumerate(selected)]
    return MicroBatch(
        members=batch.members,
        lengths=batch.lengths,
        padded_lengths=padded_own,
        input_ids=input_ids[None],
        position_ids=torch.cat([own_positions, padding_positions], dim=-1).unsqueeze(-2),
        packed=PrefixLayout.of(padded_rows, padded_own, device),
        targets=input_ids,
        weights=torch.zeros(count, device=device),
        fields={},
        sample=columns(numbers, last),
        token_index=torch.arange(count, device=device),
        pairs=batch.pairs,
        adapter_index=batch.adapter_index,
        positions=positions,
        padding=to_device(counts == 0, device),
        routed_experts=None if routed is None else columns(routed, -1).long(),
        temperature=batch.temperature,
        counts=to_device(counts.float(), device),
        images=batch.images,
        shared=_head_rows(batch, selected, owns, row_of_token, device),
    )


def _head_rows(
    batch: MicroBatch, samples: Sequence[Sample], owns: Tensor, row_of_token: Tensor, device: torch.device
) -> SharedRows:
    """Map tokens to rows of the head: one for all samples that compute a token, unless what the head reads for it differs.

    Args:
        owns: bool [tokens], tokens that no sample before theirs has.
    """
    owner = torch.empty_like(row_of_token[owns]).index_copy_(0, row_of_token[owns], owns.nonzero()[:, 0])
    first = owner[row_of_token]  # the token that a row belongs to, of each token
    targets = torch.cat([sample.target_ids for sample in samples])
    plain = torch.cat([_without_columns(sample) for sample in samples])
    same = (targets == targets[first]) & plain & plain[first]
    tokens = (owns | ~same).nonzero()[:, 0]
    head_row = torch.empty_like(row_of_token).index_copy_(0, tokens, torch.arange(len(tokens)))
    index = torch.where(owns | ~same, head_row, head_row[first])
    return SharedRows(batch, *(to_device(values, device) for values in (index, row_of_token[tokens], tokens)))


def _without_columns(sample: Sample) -> Tensor:
    """Return which of a sample's tokens, bool [length], have nothing but a target that the head reads."""
    plain = torch.full((len(sample),), sample.candidates is None and sample.teacher_states is None)
    return plain if sample.allowed is None else plain & (sample.allowed < 0).all(1)
