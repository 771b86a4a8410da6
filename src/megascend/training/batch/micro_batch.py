"""Build the tensors of a micro batch from samples: packing or padding, and this rank's context parallel share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascend.errors import DataError
from megascend.models import ImageLayout
from megascend.training.batch import images
from megascend.training.batch.candidates import same_width
from megascend.training.batch.images import ImageBatch, SampleImages
from megascend.training.batch.loss import Loss
from megascend.training.batch.packing import round_up
from megascend.training.batch.sample import Sample
from megascend.training.kernels.host_copy import to_device


@dataclass(frozen=True)
class SequenceLayout:
    """Layout of sequences on the ranks.

    Attributes:
        packing: True to concatenate samples (THD), False to pad them to one length (SBHD).
        context_size, context_rank: context parallel position; a sequence is cut into 2 * size chunks and rank r takes
            chunks r and 2 * size - 1 - r, which balances causal attention (Megatron-Core's zigzag).
        contiguous: cut it into ``size`` chunks instead, and rank r takes chunk r: for attention that is split by heads, which
            needs no balancing.
        token_multiple: the tokens that a rank holds must be a multiple of this (tensor parallel size under sequence
            parallelism, else 1).
        lengths_on_host: describe packed samples by their ends, on the CPU, for attention kernels that take host lengths.
        for_megatron: describe packed samples as Megatron-Core does; else by :class:`PackedLengths`.
    """

    packing: bool = True
    context_size: int = 1
    context_rank: int = 0
    token_multiple: int = 1
    lengths_on_host: bool = False
    for_megatron: bool = True
    contiguous: bool = False

    @property
    def sample_multiple(self) -> int:
        """Multiple that packed samples are padded to."""
        if self.contiguous:
            return self.context_size
        return 2 * self.context_size if self.context_size > 1 else 1

    def padded_length(self, length: int) -> int:
        """Return the tokens that a sample of ``length`` takes in a plan."""
        multiple = self.sample_multiple
        # Sequence parallel ranks divide each row of a padded batch, but only the total of a packed one.
        return round_up(length, multiple if self.packing else multiple * self.token_multiple)

    def local_chunks(self, length: int) -> list[slice]:
        """Return this rank's slices of a padded sequence of ``length``, in the rank's order."""
        if self.context_size == 1:
            return [slice(0, length)]
        if self.contiguous:
            size = length // self.context_size
            return [slice(self.context_rank * size, (self.context_rank + 1) * size)]
        # Two chunks a rank, one from each end: with causal attention a token's cost grows with its position, and so every rank
        # has the same work. It is the division that Megatron's and Transformer Engine's ring attention expect.
        chunk = length // (2 * self.context_size)
        first, second = self.context_rank, 2 * self.context_size - 1 - self.context_rank
        return [slice(first * chunk, (first + 1) * chunk), slice(second * chunk, (second + 1) * chunk)]


@dataclass(frozen=True)
class PackedLengths:
    """Lengths of the samples in a packed micro batch.

    Attributes:
        lengths: tokens of each, padding included, on the host.
    """

    lengths: tuple[int, ...]


@dataclass(frozen=True)
class MtpTargets:
    """Inputs and targets of a head for multi-token prediction: each sample's own, one token ahead.

    They are shifted within each sample before it is cut into the shares of context parallel ranks, so that no value comes from
    another sample or needs communication. A sample's last token has no such target: its row is token 0, with weight 0.

    Attributes:
        input_ids: int64, of the shape of the micro batch's.
        targets, weights: [n].
        padding: bool [n], rows without a next token.
    """

    input_ids: Tensor
    targets: Tensor
    weights: Tensor
    padding: Tensor


@dataclass(frozen=True)
class SharedRows:
    """Tokens of samples, and the rows that the model computes for them.

    Attributes:
        batch: the samples' micro batch, with a row for each of their tokens.
        index: int64 [tokens], which of the head's rows is a token's.
        rows: int64 [head rows], row of the model that each is computed from. A token before a fork has one with each target.
        tokens: int64 [head rows], a token of each.
    """

    batch: MicroBatch
    index: Tensor
    rows: Tensor
    tokens: Tensor


@dataclass
class MicroBatch:
    """Tensors of one micro batch on the device. n is the number of tokens that this rank holds, padding included.

    Attributes:
        members: index of every sample in the caller's list.
        lengths: unpadded length of every sample.
        input_ids, position_ids: int64 [1, n] packed, [batch, n / batch] padded. Of a model that takes images, position_ids has
            three such rows before these dimensions: time, height and width.
        packed: Megatron's PackedSeqParams or :class:`PackedLengths`, as the layout asks; None for a padded batch.
        targets, weights: [n], one sample after the other.
        fields: the samples' other per-token fields, float32 [n].
        sample: int64 [n], position in ``members`` of each token's sample.
        token_index: int64 [n], index of each token in the concatenation of all padded samples; disjoint between context ranks.
        padded_lengths: padded length of every sample in that concatenation.
        pairs: int64 [pairs, 2], positions in ``members``.
        adapter_index: for every sample, the index of its adapter in the call's list of adapters, ascending; 0 without adapters.
        positions: int64, on the host, for every sample: positions of this rank's tokens in it.
        padding: bool [n], True for padding tokens.
        dummy: exists only to match the collectives of ranks with more micro batches; all weights are 0.
        segments: per-token adapter segments for the layers (``megascend.training.lora``'s ``TokenSegments``), or None.
        routed_experts: int64 [n, layers, k], experts to replay, -1 where the router chooses; None: everywhere.
        cached: use of the KV cache by its attention layers (``megascend.engines.common.key_values``), or None.
        mtp: inputs and targets of a head for multi-token prediction; None: the head does not run.
        images: images of the samples, or None.
        candidate_ids: int64 [n, K], a teacher's candidates, -1 at unused slots; None unless all samples have them.
        teacher_logprobs: float32 [n, K], its log-probabilities of them.
        temperature: divides the logits.
        allowed: int64 [n, A], tokens that each target was drawn from, -1 at unused slots; None: the whole vocabulary everywhere.
        teacher_states: [n, h], a teacher's last hidden states, on the CPU: those of all micro batches would fill a device. None
            unless the loss requires them.
        labels: the samples' labels, as of :class:`megascend.LossInputs`; None unless the loss requires them.
        shared: the samples' own micro batch, if this one computes their common prefixes once; then n is the number of rows to
            compute, ``padded_lengths`` are those that no sample before has, ``sample`` is the first one of each, and ``packed`` a
            :class:`megascend.training.kernels.prefix_attention.PrefixLayout`.
        counts: float32 [n], samples that each row stands for; None: one.
    """

    members: list[int]
    lengths: list[int]
    padded_lengths: list[int]
    input_ids: Tensor
    position_ids: Tensor
    packed: Any
    targets: Tensor
    weights: Tensor
    fields: dict[str, Tensor]
    sample: Tensor
    token_index: Tensor
    pairs: Tensor
    adapter_index: list[int]
    positions: list[Tensor]
    padding: Tensor
    dummy: bool = False
    segments: Any = None
    cached: Any = None
    routed_experts: Tensor | None = None
    mtp: MtpTargets | None = None
    images: ImageBatch | None = None
    candidate_ids: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    temperature: float = 1.0
    allowed: Tensor | None = None
    teacher_states: Tensor | None = None
    labels: Tensor | None = None
    shared: SharedRows | None = None
    counts: Tensor | None = None

    @property
    def of_samples(self) -> MicroBatch:
        """Micro batch with a row for every token of the samples: this one, unless it shares rows."""
        return self if self.shared is None else self.shared.batch

    @property
    def real(self) -> Tensor:
        """Number of samples' tokens that each row stands for, [n]: 0 for padding and in a dummy batch."""
        if self.dummy:
            return torch.zeros_like(self.padding)
        return ~self.padding if self.counts is None else self.counts

    @property
    def token_adapter_index(self) -> Tensor:
        """Index of each token's adapter, int64 [n]."""
        # With one adapter, the usual case, nothing has to be copied from the host.
        if len(set(self.adapter_index)) == 1:
            return torch.full_like(self.sample, self.adapter_index[0])
        return to_device(torch.tensor(self.adapter_index), self.sample.device)[self.sample]


def build(
    samples: Sequence[Sample],
    members: Sequence[int],
    layout: SequenceLayout,
    loss: Loss | None,
    device: torch.device,
    dummy: bool = False,
    adapter_index: Sequence[int] | None = None,
    mtp: bool = False,
    image_layout: ImageLayout | None = None,
) -> MicroBatch:
    """Build a micro batch of ``samples[i] for i in members``.

    Args:
        samples: the caller's list.
        members: indices in ``samples``.
        layout: padding, packing and division of sequences over the ranks.
        loss: names the fields that are needed; None for a forward pass without a loss.
        device: device of the tensors; copies are asynchronous.
        dummy: give every token weight 0, for a micro batch that only matches other ranks' collectives.
        adapter_index: adapter index of every sample; ``members`` are in ascending order of it.
        mtp: for a model that trains a head for multi-token prediction.
        image_layout: for a model that takes images: its sizes.
    """
    selected = [samples[index] for index in members]
    lengths = [len(sample) for sample in selected]
    indices = [adapter_index[index] for index in members] if adapter_index is not None else [0] * len(members)
    if len(set(indices)) == 1:  # layers need tokens sorted by adapter, but a plain batch interleaves samples
        layout = layout_for_lengths(layout, lengths)
    padded = _padded_lengths(lengths, layout)
    shares = [_Share(total, layout.local_chunks(total)) for total in padded]
    columns = _Columns(selected, shares, layout.packing, device, dummy=dummy)
    positions = [share.take(torch.arange(share.padded_length)) for share in shares]
    position_ids = columns.in_shape_of_ids(positions)
    if image_layout is not None:
        position_ids = to_device(_image_positions(selected, shares, layout.packing, image_layout), device)
    starts = accumulate(padded, initial=0)
    fields = [name for name in _field_names(selected, loss) if name not in OWN_COLUMNS]
    routed = None if dummy else routed_columns(selected)
    candidate_ids, teacher_logprobs = (None, None) if dummy else _candidate_columns(selected, loss, columns)

    def padding(offset: int = 0) -> Tensor:
        # By position: under context parallelism a rank's padding is not at its end.
        return columns.flat([part >= length + offset for part, length in zip(positions, lengths, strict=True)])

    return MicroBatch(
        members=list(members),
        lengths=lengths,
        padded_lengths=padded,
        input_ids=columns.in_shape_of_ids(columns.shares_of("input_ids")),
        position_ids=position_ids,
        packed=_packed(padded, layout, device) if layout.packing else None,
        targets=columns.flat(columns.shares_of("target_ids")),
        weights=columns.weights(),
        fields={name: columns.flat(columns.shares_of(name)) for name in fields},
        sample=columns.flat([torch.full_like(part, number) for number, part in enumerate(positions)]),
        token_index=columns.flat([part + start for part, start in zip(positions, starts, strict=False)]),
        pairs=to_device(torch.tensor(pair_positions(selected, loss), dtype=torch.int64).reshape(-1, 2), device),
        adapter_index=indices,
        positions=positions,
        padding=padding(),
        dummy=dummy,
        # -1 lets the router choose: padding has no recorded experts.
        routed_experts=None if routed is None else columns.padded(routed, -1).long(),
        mtp=_mtp_targets(columns, padding(-1)) if mtp else None,
        candidate_ids=candidate_ids,
        teacher_logprobs=teacher_logprobs,
        temperature=selected[0].temperature,
        allowed=None if dummy else _allowed_column(selected, columns),
        teacher_states=None if dummy else _teacher_states(selected, loss, columns),
        labels=to_device(label_tensor(selected), device) if loss is not None and "label" in loss.requires else None,
        images=None if image_layout is None else images.joined([sample.images for sample in selected], device),
    )


OWN_COLUMNS = ("input_ids", "target_ids", "weights")
"""Fields of samples that are attributes of a micro batch; the others are only for the loss."""


@dataclass(frozen=True)
class _Share:
    """Part of a padded sample that this rank holds.

    Attributes:
        padded_length: tokens of the padded sample.
        chunks: this rank's slices of it.
    """

    padded_length: int
    chunks: list[slice]

    def take(self, values: Tensor, padding: int = 0) -> Tensor:
        """Return this rank's rows of per-token values [length, ...] after padding them at the end."""
        # Padding is token 0, which every vocabulary has, with weight 0.
        widths = [0, 0] * (values.dim() - 1) + [0, self.padded_length - len(values)]
        padded = F.pad(values, widths, value=padding)
        return torch.cat([padded[chunk] for chunk in self.chunks])


class _Columns:
    """Device tensors of a micro batch: per-token values of its samples, each cut to this rank's share, one after the other.

    Args:
        samples: the samples of the micro batch.
        shares: this rank's part of each.
        packing: samples share a row; else there is a row for each.
        dummy: no token has a weight.
    """

    def __init__(
        self, samples: Sequence[Sample], shares: Sequence[_Share], packing: bool, device: torch.device, *, dummy: bool
    ) -> None:
        self._fields = [sample.token_fields() for sample in samples]
        self._shares, self._packing, self._device, self._dummy = shares, packing, device, dummy

    def shares_of(self, name: str, first: int = 0) -> list[Tensor]:
        """Return this rank's share of a field of each sample, from the sample's token ``first`` on."""
        # Shifted before it is cut into chunks: under context parallelism the next token may be on another rank.
        return [share.take(fields[name][first:]) for share, fields in zip(self._shares, self._fields, strict=True)]

    def flat(self, parts: list[Tensor]) -> Tensor:
        """Concatenate shares of the samples to [n, ...]."""
        return to_device(torch.cat(parts), self._device)

    def in_shape_of_ids(self, parts: list[Tensor]) -> Tensor:
        """Arrange shares of the samples as the model takes token ids: [1, n] packed, [batch, n / batch] padded."""
        return to_device(torch.cat(parts)[None] if self._packing else torch.stack(parts), self._device)

    def padded(self, values: list[Tensor], padding: int) -> Tensor:
        """Cut each sample's values [length, ...] to this rank's share and concatenate them; padding tokens get ``padding``."""
        return to_device(self.on_host(values, padding), self._device)

    def on_host(self, values: list[Tensor], padding: int) -> Tensor:
        """Return the result of :meth:`padded` on the CPU."""
        return torch.cat([share.take(part, padding) for share, part in zip(self._shares, values, strict=True)])

    def weights(self, first: int = 0) -> Tensor:
        """Return the tokens' weights [n], all 0 for a dummy batch."""
        parts = self.shares_of("weights", first)
        return self.flat([torch.zeros_like(part) for part in parts] if self._dummy else parts)


def _mtp_targets(columns: _Columns, padding: Tensor) -> MtpTargets:
    return MtpTargets(
        input_ids=columns.in_shape_of_ids(columns.shares_of("input_ids", 1)),
        targets=columns.flat(columns.shares_of("target_ids", 1)),
        weights=columns.weights(1),
        padding=padding,
    )


def _candidate_columns(
    samples: Sequence[Sample], loss: Loss | None, columns: _Columns
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the candidates' ids and log-probabilities; None unless all samples have candidates and the loss reads them."""
    candidates = [sample.candidates for sample in samples if sample.candidates is not None]
    # Candidates are K times as large as any other field, too large to copy for nothing.
    if len(candidates) < len(samples) or (loss is not None and "candidates" not in loss.requires):
        return None, None
    ids = columns.padded(same_width([entry.ids for entry in candidates], -1), -1).long()
    return ids, columns.padded(same_width([entry.logprobs for entry in candidates], 0), 0)


def _teacher_states(samples: Sequence[Sample], loss: Loss | None, columns: _Columns) -> Tensor | None:
    """Return the teacher's hidden states; None unless the loss reads them: they are as large as the model's own."""
    if loss is None or "teacher_states" not in loss.requires:
        return None
    return columns.on_host([sample.teacher_states for sample in samples if sample.teacher_states is not None], 0)


def _allowed_column(samples: Sequence[Sample], columns: _Columns) -> Tensor | None:
    """Return the tokens that each target was drawn from, -1 at unused slots; None if no sample limits them."""
    if all(sample.allowed is None for sample in samples):
        return None
    # A row with only unused slots means the whole vocabulary.
    allowed = [
        torch.full((len(sample), 1), -1, dtype=torch.int32) if sample.allowed is None else sample.allowed
        for sample in samples
    ]
    return columns.padded(same_width(allowed, -1), -1).long()


def _image_positions(
    samples: Sequence[Sample], shares: Sequence[_Share], packing: bool, image_layout: ImageLayout
) -> Tensor:
    """Return positions by time, height and width, int64 [3, 1, n] packed or [3, batch, n / batch] padded.

    A sample of text has three rows too, equal ones: one tensor holds the positions of all samples.
    """
    parts = []
    for sample, share in zip(samples, shares, strict=True):
        ids = F.pad(sample.input_ids, (0, share.padded_length - len(sample)))
        grids = sample.images.grids if isinstance(sample.images, SampleImages) else None
        parts.append(share.take(images.positions(ids, grids, image_layout).T).T)
    return torch.cat(parts, dim=1)[:, None] if packing else torch.stack(parts, dim=1)


def routed_columns(samples: Sequence[Sample]) -> list[Tensor] | None:
    """Return every sample's ``routed_experts``, -1 for those without; None if no sample has any."""
    first = next((sample.routed_experts for sample in samples if sample.routed_experts is not None), None)
    if first is None:
        return None
    return [
        first.new_full((len(sample), *first.shape[1:]), -1) if sample.routed_experts is None else sample.routed_experts
        for sample in samples
    ]


def layout_for_lengths(layout: SequenceLayout, lengths: Sequence[int]) -> SequenceLayout:
    """Return the layout for a micro batch: samples of equal length are not packed, since attention is faster unpacked."""
    plain = replace(layout, packing=False)
    if layout.packing and len(set(lengths)) == 1 and plain.padded_length(lengths[0]) == lengths[0]:
        return plain
    return layout


def _padded_lengths(lengths: list[int], layout: SequenceLayout) -> list[int]:
    padded = [layout.padded_length(length) for length in lengths]
    if not layout.packing:
        return [max(padded)] * len(padded)
    # Sequence parallelism divides the rank's tokens, not each sample's: the last sample takes the padding.
    local = sum(padded) // layout.context_size
    missing = (round_up(local, layout.token_multiple) - local) * layout.context_size
    padded[-1] += round_up(missing, layout.sample_multiple)
    # Rounding up to the sample multiple may break the token multiple again.
    while (sum(padded) // layout.context_size) % layout.token_multiple:
        padded[-1] += layout.sample_multiple
    return padded


def _field_names(samples: Sequence[Sample], loss: Loss | None) -> list[str]:
    """Return the fields that all samples have; DataError if one is missing that the loss requires."""
    common = set.intersection(*(sample.loss_fields for sample in samples))
    if loss is not None:
        missing = [name for name in loss.requires if name not in common]
        if missing:
            raise DataError(
                f"loss {loss.name!r} needs {', '.join(missing)} on every sample; set them in megascend.Sample"
            )
    return sorted(common - {"candidates", "teacher_states", "label"})  # columns of their own


def label_tensor(samples: Sequence[Sample]) -> Tensor:
    """Return the labels of samples: int64 [samples], or float32 [samples, labels]; 0 for a dummy without one."""
    if samples and isinstance(samples[0].label, Tensor):
        return torch.stack([sample.label for sample in samples])
    return torch.tensor([int(sample.label or 0) for sample in samples])


def pair_positions(samples: Sequence[Sample], loss: Loss | None) -> list[tuple[int, int]]:
    """Return (chosen, rejected) positions of every pair; for a loss per pair, DataError for a sample without a complete pair."""
    if loss is None or loss.per != "pair":
        return []
    members: dict[Any, dict[bool | None, list[int]]] = {}
    for position, sample in enumerate(samples):
        if sample.pair is None or sample.chosen is None:
            raise DataError(
                f"loss {loss.name!r} works on preference pairs: set pair=... and chosen=... on every sample"
            )
        members.setdefault(sample.pair, {}).setdefault(sample.chosen, []).append(position)
    for pair, sides in members.items():
        if len(sides.get(True, [])) != 1 or len(sides.get(False, [])) != 1:
            raise DataError(f"pair {pair!r} must have exactly one chosen and one rejected sample in this rank's list")
    return [(sides[True][0], sides[False][0]) for sides in members.values()]


def _packed(padded: list[int], layout: SequenceLayout, device: torch.device) -> Any:
    """Describe the samples of a packed batch.

    Padding belongs to the sample before it: causal attention hides it from that sample's tokens.
    """
    if not layout.for_megatron:
        return PackedLengths(tuple(padded))
    # Imported here: engines without Megatron take PackedLengths.
    from megatron.core.packed_seq_params import PackedSeqParams

    # int32, as the attention kernels require.
    ends = torch.tensor(padded, dtype=torch.int32).cumsum(0)
    if layout.lengths_on_host:
        # The NPU kernel takes ends only, without a leading 0, and on the CPU, where reading them does not synchronise.
        boundaries = ends.int()
    else:
        boundaries = to_device(torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()]), device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )


def unpack(values: Tensor, batch: MicroBatch) -> list[Tensor]:
    """Split ``values`` [sum of padded lengths, ...], ordered by ``token_index``, into one unpadded tensor per sample."""
    parts = values.split(batch.padded_lengths)
    return [part[:length] for part, length in zip(parts, batch.lengths, strict=True)]


def last_tokens(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the last tokens of samples among this rank's n, ascending, and their positions in ``members``; on the host."""
    # By positions and not by row: under context parallelism this rank may hold the last token of some samples only.
    last = torch.cat([part == length - 1 for part, length in zip(batch.positions, batch.lengths, strict=True)])
    owners = torch.cat([torch.full_like(part, number) for number, part in enumerate(batch.positions)])
    rows = last.nonzero()[:, 0]
    return rows, owners[rows]


def next_tokens(
    tokens: Sequence[int],
    positions: Sequence[int],
    adapter_index: Sequence[int],
    device: torch.device,
    *,
    multiple: int = 1,
    cached: Any = None,
    spatial: bool = False,
) -> MicroBatch:
    """Build one row [1, n] of tokens that attend to ``cached`` and not to each other.

    Args:
        tokens: token ids.
        positions: position of each token in its sequence.
        adapter_index: adapter index of each token, ascending.
        multiple: n is rounded up to a multiple of this, with copies of the last token.
        cached: see :attr:`MicroBatch.cached`; None for a batch that only matches other ranks' collectives.
        spatial: for a model that takes images, whose text has the same position in time, height and width.
    """
    count = len(tokens)
    total = round_up(count, multiple)
    # Padding repeats the last token, so that adapter indices stay ascending.
    members = [min(number, count - 1) for number in range(total)]
    ids, position_ids = (
        to_device(torch.tensor([values[member] for member in members]), device) for values in (tokens, positions)
    )
    numbers = to_device(torch.arange(total), device)
    return MicroBatch(
        members=members,
        lengths=[1] * total,
        padded_lengths=[1] * total,
        input_ids=ids[None],
        position_ids=position_ids.expand(3, 1, -1) if spatial else position_ids[None],
        packed=None,
        targets=ids,
        weights=torch.zeros(total, device=device),
        fields={},
        sample=numbers,
        token_index=numbers,
        pairs=torch.empty(0, 2, dtype=torch.int64, device=device),
        adapter_index=[adapter_index[member] for member in members],
        positions=[torch.zeros(1, dtype=torch.int64)] * total,
        padding=numbers >= count,
        dummy=cached is None,
        cached=cached,
    )
