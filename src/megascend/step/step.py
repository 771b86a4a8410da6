"""One step through Megatron's schedules: samples in, gradients (or log-probabilities) out."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megascend.batch import agreement
from megascend.batch.loss_call import raise_together, weighted
from megascend.batch.losses import Loss, LossInputs, cross_entropy
from megascend.batch.micro_batch import MicroBatch, SequenceLayout, build, pair_positions, unpack
from megascend.batch.normalizer import LossNormalizer
from megascend.batch.packing import plan_micro_batches, split_to
from megascend.batch.results import ForwardBackwardResult, ForwardResult
from megascend.batch.sample import Sample
from megascend.distributed.objects import broadcast_object, gather_objects
from megascend.engines.megatron.engine import MegatronStrategy
from megascend.engines.megatron.output_head import OutputHead, reduce_context
from megascend.errors import DataError
from megascend.kernels.low_rank import LowRank
from megascend.lora.optimizer import loss_scales


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

    def forward_backward(
        self, samples: Sequence[Sample], loss: Loss, adapter: str | None = None
    ) -> ForwardBackwardResult:
        """Accumulate gradients of the loss over the global batch; see ``MegatronBackend.forward_backward``."""
        with self._strategy.groups.monitor.phase("forward and backward"):
            verb = f"forward_backward(loss={loss.name!r}){self.adapters_here()}"
            plan, names, agreed = self._plan(verb, samples, loss, adapter)
            loss_grad = self._strategy.topology.context / agreed.micro_batches
            scales = self._scales(agreed, loss)
            gather = self._gather_context if self._strategy.topology.context > 1 else None
            normalizer = LossNormalizer(loss, list(agreed.counts), scales, loss_grad, self._strategy.device, gather)
            batches = self._build(samples, plan, names, normalizer.names, loss)
            real = sum(not batch.dummy for batch in batches)
            with self._adapters(normalizer.names), self._strategy.routers.training(real):
                stored = self._run(batches, lambda batch, hidden: self._loss(batch, hidden, normalizer), False)
                metrics, values = self._reduce_metrics(stored, normalizer)
                if self._strategy.adapters is not None:
                    self._strategy.adapters.collect()
        return ForwardBackwardResult(agreed.micro_batches, agreed.counts, loss.per == "pair", metrics, values)

    def _gather_context(self, obj: Any) -> list[Any]:
        return gather_objects(obj, "cp", self._strategy.groups, "the loss function")

    def _scales(self, agreed: agreement.Agreement, loss: Loss) -> list[float]:
        """What one unit of each adapter's (or the model's) loss counts, before Megatron's own factors.

        Megatron divides by the micro batches and multiplies by CP; its DDP then divides by DP x CP, as adapters do.

        Raises:
            DataError: there is nothing to normalise by.
        """
        scales = []
        for name, counts in agreed.counts.items():
            normaliser = counts.weight if loss.per == "token" else float(counts.pairs)
            if normaliser <= 0:
                what = "all targets have weight 0" if loss.per == "token" else "there is no preference pair"
                of = f" of adapter {name!r}" if name else ""
                raise DataError(f"{what} in the whole global batch{of}: the loss {loss.name!r} is undefined")
            scales.append(agreed.micro_batches * self._strategy.topology.data / normaliser)
        if self._strategy.adapters is not None:
            own = loss_scales(list(agreed.counts), self._strategy.adapters.registry)
            scales = [scale * factor for scale, factor in zip(scales, own, strict=True)]
        return scales

    @torch.no_grad()
    def forward(
        self,
        samples: Sequence[Sample],
        entropy: bool,
        logits: bool,
        adapter: str | None = None,
        reference: bool = False,
    ) -> ForwardResult:
        """Log-probabilities of the targets; see ``MegatronBackend.forward``."""
        with self._strategy.groups.monitor.phase("forward only"):
            verb = f"forward({entropy=}, {logits=}, {reference=}){self.adapters_here()}"
            plan, names, agreed = self._plan(verb, samples, None, adapter, reference)
            order = list(agreed.counts)
            batches = self._build(samples, plan, names, order, None)
            with self._strategy.evaluating(), self._adapters(order):
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
                found = broadcast_object(
                    found, "pp", self._strategy.groups, self._strategy.topology.pipeline - 1, "log-probabilities"
                )
        return ForwardResult(**found)  # type: ignore[arg-type]

    # --- planning ---

    def _plan(
        self, verb: str, samples: Sequence[Sample], loss: Loss | None, adapter: str | None, reference: bool = False
    ) -> tuple[list[list[int]], list[str], agreement.Agreement]:
        """This rank's micro batches, as many as every other rank has (trailing ones may be empty), and samples' adapters."""
        plan: list[list[int]] = []
        names: list[str] = []
        lengths = [self._layout.padded_length(len(sample)) for sample in samples]
        pairs = [sample.pair if loss is not None and loss.per == "pair" else None for sample in samples]
        try:
            self._strategy.check_samples(samples)
            names = [""] * len(samples) if reference else self._names(samples, adapter, training=loss is not None)
            check_pairs(pairs, names)
            pair_positions(samples, loss)
            if loss is not None:
                check_fields(samples, loss)
            budget = self._strategy.batching.micro_batch_tokens
            plan = plan_micro_batches(lengths, pairs, budget, self._layout.packing, kinds=names)
            mine = agreement.report(samples, len(plan), names, loss is not None and loss.per == "pair")
        except DataError as error:
            mine = agreement.Report(problem=str(error))
        agreed = agreement.exchange(mine, self._strategy.topology, self._strategy.groups, verb)
        return split_to(plan, agreed.micro_batches, lengths, pairs), names, agreed

    def adapters_here(self) -> str:
        """What must be equal on all ranks for their steps to be: the adapters, and which have gradients."""
        host = self._strategy.adapters
        if host is None:
            return ""
        known = sorted(f"{name} with gradients" if of.accumulated else name for name, of in host.registry.items())
        return f" with adapters {', '.join(known) or 'none'}"

    def _names(self, samples: Sequence[Sample], adapter: str | None, *, training: bool) -> list[str]:
        """Every sample's adapter, "" for the model itself."""
        host = self._strategy.adapters
        names = [sample.adapter or adapter or "" for sample in samples]
        for index, name in enumerate(names):
            if name and host is None:
                raise DataError(
                    f"sample {index} is for adapter {name!r}, but this backend trains the model itself; construct "
                    "MegatronBackend(adapters=megascend.Adapters())"
                )
            if name and host is not None and name not in host.registry:
                known = ", ".join(sorted(host.registry)) or "none"
                raise DataError(f"sample {index} is for adapter {name!r}; there are: {known}")
            if training and host is not None and not name:
                raise DataError(
                    f"sample {index} names no adapter, and the model is frozen: pass adapter=... or set Sample.adapter"
                )
        return names

    def _build(
        self, samples: Sequence[Sample], plan: list[list[int]], names: list[str], order: list[str], loss: Loss | None
    ) -> list[MicroBatch]:
        """The micro batches of ``plan``; ``order`` are the adapters of all ranks' samples."""
        device = self._strategy.device
        adapter_index = [order.index(name) for name in names]
        batches = []
        for members in plan:
            if members:
                members.sort(
                    key=lambda index: adapter_index[index]
                )  # in the plan itself: forward() finds its results by it
                batches.append(build(samples, members, self._layout, loss, device, adapter_index=adapter_index))
            else:
                # Keeps other ranks stand_in in collectives: a real sample where there is one, with weight 0.
                stand_in = samples if samples else [Sample(input_ids=[0], target_ids=[0], weights=[0.0])]
                shortest = min(range(len(stand_in)), key=lambda index: len(stand_in[index]))
                own = adapter_index if samples else [0]
                batches.append(build(stand_in, [shortest], self._layout, None, device, dummy=True, adapter_index=own))
            if self._strategy.adapters is not None:
                self._strategy.adapters.segment(batches[-1], samples if samples else stand_in, order)
        return batches

    def _adapters(self, order: list[str]) -> contextlib.AbstractContextManager[None]:
        host = self._strategy.adapters
        return contextlib.nullcontext() if host is None else host.applying(order)

    # --- running ---

    def _run(self, batches: list[MicroBatch], finish: Any, forward_only: bool) -> list[Any]:
        """Drive Megatron's schedule; returns what ``finish`` stored, on the last pipeline stage (else an empty list)."""
        strategy = self._strategy

        def forward_step(iterator: Iterator[MicroBatch], model: Any):
            batch = next(iterator)
            with strategy.groups.monitor.phase("forward"):
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

    def _loss(self, batch: MicroBatch, hidden: Tensor, normalizer: LossNormalizer) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro batch's loss for Megatron, and for every figure its sum for each adapter [names]."""
        head, loss, lora_delta = self._head(), normalizer.loss, self._addition(batch)
        scale = normalizer.of_tokens(batch)
        if loss.function is cross_entropy and head.can_fuse:
            coefficients = batch.weights * scale
            total, logprobs = head.cross_entropy(hidden, batch.targets, coefficients, normalizer.loss_grad, lora_delta)
            return total, {"loss": normalizer.sums(weighted(-logprobs.detach(), batch.weights), batch)}
        logprobs, entropy = head.logprobs(hidden, batch.targets, loss.entropy, lora_delta)
        found = None
        if not batch.dummy:
            inputs = self._loss_inputs(batch)
            factors = scale if loss.per == "token" else normalizer.of_pairs(batch)
            found = normalizer.function.evaluate(logprobs, entropy, inputs, factors, batch.padding)
        if found is None:  # the model's backward pass runs all the same: other ranks meet this one there
            return torch.zeros_like(logprobs).mul(logprobs).sum(), {"loss": logprobs.new_zeros(len(normalizer.names))}
        total = (found.logprobs * logprobs).sum()
        if entropy is not None and found.entropy is not None:
            total = total + (found.entropy * entropy).sum()
        if loss.per == "token":
            return total, {
                name: normalizer.sums(weighted(of, batch.weights), batch) for name, of in found.figures.items()
            }
        # Every context parallel rank has every pair: it reports its part of the sum, but takes the whole gradient.
        parts = self._strategy.topology.context
        return total, {name: normalizer.pair_sums(of, batch) / parts for name, of in found.figures.items()}

    @staticmethod
    def _loss_inputs(batch: MicroBatch) -> LossInputs:
        return LossInputs(
            targets=batch.targets,
            weights=batch.weights,
            sample=batch.sample,
            sample_count=len(batch.members),
            pairs=batch.pairs,
            reduce_context=reduce_context,
            advantages=batch.fields.get("advantages"),
            old_logprobs=batch.fields.get("old_logprobs"),
            ref_logprobs=batch.fields.get("ref_logprobs"),
            extra=batch.fields,
        )

    def _scores(self, hidden: Tensor, batch: MicroBatch, entropy: bool, logits: bool) -> tuple[Tensor, dict[str, Any]]:
        head, lora_delta = self._head(), self._addition(batch)
        logprobs, entropies = head.logprobs(hidden, batch.targets, entropy, lora_delta)
        return logprobs.sum(), {
            "logprobs": logprobs,
            "entropy": entropies,
            "logits": head.logits(hidden, lora_delta) if logits else None,
        }

    def _addition(self, batch: MicroBatch) -> LowRank | None:
        """What adapters of the output layer add to the logits of ``batch``."""
        host = self._strategy.adapters
        return None if host is None else host.layers.lora_delta(batch.segments)

    def _head(self) -> OutputHead:
        head = self._strategy.head
        assert head is not None, "the loss is computed on the last pipeline stage"
        return head

    # --- bringing results together ---

    def _reduce_metrics(
        self, stored: list[dict[str, Tensor]], normalizer: LossNormalizer
    ) -> tuple[tuple[str, ...], Tensor]:
        """Sums [adapters, figures] over micro batches and ranks, on the device, without waiting for it."""
        groups, topology = self._strategy.groups, self._strategy.topology
        mine = tuple(dict.fromkeys(name for item in stored for name in item))
        names = ("loss",)
        if normalizer.loss.function is not cross_entropy:  # only the last stage knows what else a loss reported
            told = gather_objects((mine, normalizer.function.problem), "world", groups, "metrics of the loss")
            raise_together([problem for _, problem in told], normalizer.function)
            names = tuple(dict.fromkeys(name for reported, _ in told for name in reported))
        values = torch.zeros(len(normalizer.names), len(names), dtype=torch.float32, device=self._strategy.device)
        counts = parallel_state.get_tensor_model_parallel_rank() == 0
        for item in stored if counts else []:
            for position, name in enumerate(names):
                if name in item:
                    values[:, position] += item[name]
        if topology.world_size > 1:
            dist.all_reduce(values)
        return names, values

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


def check_pairs(pairs: Sequence[Hashable | None], names: Sequence[str]) -> None:
    """Raise DataError if a preference pair has samples of two adapters: neither could be trained on it alone."""
    owners: dict[Hashable, str] = {}
    for pair, name in zip(pairs, names, strict=True):
        owner = owners.setdefault(pair, name)
        if pair is not None and owner != name:
            raise DataError(
                f"pair {pair!r} has samples of adapters {owner!r} and {name!r}; give every adapter's pairs values of their own"
            )


def check_fields(samples: Sequence[Sample], loss: Loss) -> None:
    """Raise DataError if a sample lacks a field that the loss requires."""
    for index, sample in enumerate(samples):
        missing = [name for name in loss.requires if name not in sample.token_fields()]
        if missing:
            raise DataError(f"loss {loss.name!r} needs {', '.join(missing)}, which sample {index} does not have")
