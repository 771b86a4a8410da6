"""One step through Megatron's schedules: samples in, gradients (or log-probabilities) out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megascend.errors import DataError
from megascend.model.output_head import OutputHead, reduce_context
from megascend.parallel.objects import broadcast_object, gather_objects
from megascend.strategy.megatron import MegatronStrategy
from megascend.train import agreement
from megascend.train.losses import Loss, LossInputs, cross_entropy, split_output
from megascend.train.micro_batch import MicroBatch, SequenceLayout, build, pair_positions, unpack
from megascend.train.packing import plan_micro_batches, split_to
from megascend.train.results import ForwardBackwardResult, ForwardResult
from megascend.train.sample import Sample


class Step:
    """Runs micro batches through the model of a strategy."""

    def __init__(self, strategy: MegatronStrategy) -> None:
        self._strategy = strategy
        topology, batching = strategy.topology, strategy.batching
        place = topology.coordinates(strategy.groups.rank)
        self._layout = SequenceLayout(
            packing=batching.packing,
            context_size=topology.context,
            context_rank=place.context,
            token_multiple=topology.tensor if topology.sequence_parallel else 1,
            lengths_on_host=strategy.runtime.platform.packed_lengths_on_host,
        )

    # --- the two verbs ---

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> ForwardBackwardResult:
        """Accumulate gradients of the loss over the global batch; see ``MegatronBackend.forward_backward``."""
        plan, agreed = self._plan(samples, loss)
        normaliser = agreed.weight if loss.per == "token" else float(agreed.pairs)
        if normaliser <= 0:
            what = "all targets have weight 0" if loss.per == "token" else "there is no preference pair"
            raise DataError(f"{what} in the whole global batch: the loss {loss.name!r} is undefined")
        batches = self._build(samples, plan, loss)
        # Megatron divides by the micro batches and multiplies by CP; its DDP then divides by DP x CP.
        topology = self._strategy.topology
        scale = agreed.micro_batches * topology.data / normaliser
        upstream = topology.context / agreed.micro_batches
        stored = self._run(batches, lambda batch, hidden: self._loss(batch, hidden, loss, scale, upstream), False)
        names, values = self._reduce_metrics(stored, loss, normaliser)
        return ForwardBackwardResult(agreed.trained, agreed.tokens, agreed.micro_batches, names, values)

    @torch.no_grad()
    def forward(self, samples: Sequence[Sample], entropy: bool, logits: bool) -> ForwardResult:
        """Log-probabilities of the targets; see ``MegatronBackend.forward``."""
        plan, _ = self._plan(samples, None)
        batches = self._build(samples, plan, None)
        with self._strategy.evaluating():
            stored = self._run(batches, lambda batch, hidden: self._scores(hidden, batch, entropy, logits), True)
        found: dict[str, list[Tensor | None]] = {}
        for name in ("logprobs", *(["entropy"] if entropy else []), *(["logits"] if logits else [])):
            values = (
                [self._collect(batch, item[name]) for batch, item in zip(batches, stored, strict=True)]
                if stored
                else []
            )
            found[name] = self._in_order(values, plan, len(samples))
        if self._strategy.topology.pipeline > 1:
            found = broadcast_object(found, "pp", self._strategy.groups, source=self._strategy.topology.pipeline - 1)
        return ForwardResult(**found)  # type: ignore[arg-type]

    # --- planning ---

    def _plan(self, samples: Sequence[Sample], loss: Loss | None) -> tuple[list[list[int]], agreement.Agreement]:
        """This rank's micro batches, as many as every other rank has (trailing ones may be empty)."""
        plan: list[list[int]] = []
        lengths = [self._layout.padded_length(len(sample)) for sample in samples]
        pairs = [sample.pair if loss is not None and loss.per == "pair" else None for sample in samples]
        try:
            self._strategy.check_samples(samples)
            pair_count = len(pair_positions(samples, loss))
            if loss is not None:
                check_fields(samples, loss)
            plan = plan_micro_batches(lengths, pairs, self._strategy.batching.micro_batch_tokens, self._layout.packing)
            mine = agreement.report(samples, len(plan), pair_count)
        except DataError as error:
            mine = agreement.Report(problem=str(error))
        agreed = agreement.exchange(mine, self._strategy.topology, self._strategy.groups)
        return split_to(plan, agreed.micro_batches, lengths, pairs), agreed

    def _build(self, samples: Sequence[Sample], plan: list[list[int]], loss: Loss | None) -> list[MicroBatch]:
        device = self._strategy.device
        batches = []
        for members in plan:
            if members:
                batches.append(build(samples, members, self._layout, loss, device))
            else:
                # Keeps other ranks company in collectives: a real sample where there is one, with weight 0.
                company = samples if samples else [Sample(input_ids=[0], target_ids=[0], weights=[0.0])]
                shortest = min(range(len(company)), key=lambda index: len(company[index]))
                batches.append(build(company, [shortest], self._layout, None, device, filler=True))
        return batches

    # --- running ---

    def _run(self, batches: list[MicroBatch], finish: Any, forward_only: bool) -> list[Any]:
        """Drive Megatron's schedule; returns what ``finish`` stored, on the last pipeline stage (else an empty list)."""
        strategy = self._strategy

        def forward_step(iterator: Iterator[MicroBatch], model: Any):
            batch = next(iterator)
            output = strategy.forward_chunk(model, batch)
            return output, lambda hidden: finish(batch, hidden)

        iterators = [iter(batches) for _ in strategy.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=strategy.chunks,  # type: ignore[reportArgumentType]
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],
            micro_batch_size=batches[0].input_ids.shape[0],
            forward_only=forward_only,
        )

    def _loss(
        self, batch: MicroBatch, hidden: Tensor, loss: Loss, scale: float, upstream: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        head = self._head()
        if loss.function is cross_entropy and head.can_fuse:
            total, _ = head.cross_entropy(hidden, batch.targets, batch.weights * scale, upstream)
            return total, {"loss": total.detach() / scale}
        logprobs, entropy = head.logprobs(hidden, batch.targets, loss.entropy)
        filler = loss.per == "pair" and len(batch.pairs) == 0
        if filler:
            return logprobs.sum() * 0.0, {"loss": logprobs.new_zeros(())}
        inputs = LossInputs(
            targets=batch.targets,
            weights=batch.weights,
            sample=batch.sample,
            sample_count=len(batch.members),
            pairs=batch.pairs,
            reduce_context=reduce_context,
            entropy=entropy,
            advantages=batch.fields.get("advantages"),
            old_logprobs=batch.fields.get("old_logprobs"),
            ref_logprobs=batch.fields.get("ref_logprobs"),
            extra=batch.fields,
        )
        for name in loss.requires:
            if name not in batch.fields:  # a filler made from nothing
                return logprobs.sum() * 0.0, {"loss": logprobs.new_zeros(())}
        count = len(batch.targets) if loss.per == "token" else len(batch.pairs)
        values, metrics = split_output(loss, loss.function(logprobs, inputs), count)
        if loss.per == "token":
            # where, not a product: a value that is not finite at a padding token must not spread.
            weights = batch.weights

            def weighted(of: Tensor) -> Tensor:
                return torch.where(weights > 0, of * weights, 0.0).sum()

            return weighted(values) * scale, {
                "loss": weighted(values.detach()),
                **{name: weighted(metric.detach().float()) for name, metric in metrics.items()},
            }
        # Every context parallel rank has every pair: it reports its part of the sum, but takes the whole gradient.
        parts = self._strategy.topology.context
        return values.sum() * scale, {
            "loss": values.detach().sum() / parts,
            **{name: metric.detach().float().sum() / parts for name, metric in metrics.items()},
        }

    def _scores(self, hidden: Tensor, batch: MicroBatch, entropy: bool, logits: bool) -> tuple[Tensor, dict[str, Any]]:
        head = self._head()
        logprobs, entropies = head.logprobs(hidden, batch.targets, entropy)
        return logprobs.sum(), {
            "logprobs": logprobs,
            "entropy": entropies,
            "logits": head.logits(hidden) if logits else None,
        }

    def _head(self) -> OutputHead:
        head = self._strategy.head
        assert head is not None, "the loss is computed on the last pipeline stage"
        return head

    # --- bringing results together ---

    def _reduce_metrics(self, stored: list[dict[str, Tensor]], loss: Loss, normaliser: float):
        """Sum over micro batches and ranks on the device, without waiting for it."""
        groups, topology = self._strategy.groups, self._strategy.topology
        mine = tuple(dict.fromkeys(name for item in stored for name in item))
        names = ("loss",)
        if loss.function is not cross_entropy:  # only the last stage knows what else a loss reported
            names = tuple(dict.fromkeys(name for rank in gather_objects(mine, "world", groups) for name in rank))
        values = torch.zeros(len(names), dtype=torch.float32, device=self._strategy.device)
        counts = parallel_state.get_tensor_model_parallel_rank() == 0
        for item in stored if counts else []:
            for position, name in enumerate(names):
                if name in item:
                    values[position] += item[name]
        if topology.world_size > 1:
            dist.all_reduce(values)
        return names, values / normaliser

    def _collect(self, batch: MicroBatch, values: Tensor) -> list[Tensor]:
        """One unpadded CPU tensor a sample from this rank's tokens, context parallel parts brought together."""
        whole = values.new_zeros((sum(batch.padded_lengths), *values.shape[1:]))
        whole.index_copy_(0, batch.place.to(values.device), values)
        if self._strategy.topology.context > 1:
            on_device = whole.to(self._strategy.device)
            dist.all_reduce(on_device, group=parallel_state.get_context_parallel_group())
            whole = on_device
        return [part.clone() for part in unpack(whole.cpu(), batch)]

    @staticmethod
    def _in_order(values: list[list[Tensor]], plan: list[list[int]], count: int) -> list[Tensor | None]:
        ordered: list[Tensor | None] = [None] * count
        for members, tensors in zip(plan, values, strict=False):
            for index, tensor in zip(members, tensors, strict=False):
                ordered[index] = tensor
        return ordered


def check_fields(samples: Sequence[Sample], loss: Loss) -> None:
    """Raise DataError if a sample lacks a field that the loss requires."""
    for index, sample in enumerate(samples):
        missing = [name for name in loss.requires if name not in sample.token_fields()]
        if missing:
            raise DataError(f"loss {loss.name!r} needs {', '.join(missing)}, which sample {index} does not have")
