"""One step, on any engine: samples in, gradients (or log-probabilities) out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.batch import agreement
from megascend.batch.loss_call import LossNormalizer, raise_together, weighted
from megascend.batch.losses import Loss, LossInputs, cross_entropy
from megascend.batch.micro_batch import MicroBatch, build, last_tokens, pair_positions, unpack
from megascend.batch.packing import plan_micro_batches, split_to
from megascend.batch.results import ForwardBackwardResult, ForwardResult
from megascend.batch.sample import Sample
from megascend.distributed.memory import with_room_everywhere
from megascend.distributed.objects import broadcast_object, gather_objects
from megascend.engines.base import Engine, Output, ScalarOutput
from megascend.errors import DataError, LossFunctionError, MegascendError, OutOfDeviceMemoryError
from megascend.kernels.host_copy import to_device
from megascend.step.checks import check_fields, check_pairs, check_samples, require_head
from megascend.step.context_sum import context_sum
from megascend.step.progress import OnMicroBatch, progress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

ROWS = 512
"""Tokens whose whole logits are on the host at a time."""


class Step:
    """Takes samples through an engine's model."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._groups, self._topology = engine, engine.groups, engine.topology

    @property
    def _context_group(self) -> ProcessGroup | None:
        return self._groups.device_group("cp") if self._topology.context > 1 else None

    # --- the two methods ---

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss: Loss,
        adapter: str | None = None,
        on_micro_batch: OnMicroBatch | None = None,
        wanted: Literal["logprobs", "values"] | None = None,
        *,
        keep: bool = True,
    ) -> ForwardBackwardResult:
        """Accumulate gradients of the loss over the global batch; see ``Backend.forward_backward``.

        Args:
            wanted: what the result has for every token.
            keep: False drops them again, with those of earlier calls; for measurements before the first step.
        """
        engine, trainable = self._engine, self._engine.trainable
        with self._groups.monitor.phase("forward and backward"):
            call = f"forward_backward({loss.describe()}{f', {wanted}=True' if wanted else ''}){trainable.describe()}"
            plan, names, agreed = self._plan(call, samples, loss, adapter)
            normalizer = self._normalizer(agreed, loss)
            counted = progress(
                self._groups.monitor, on_micro_batch, agreed.micro_batches, self._topology.virtual_pipeline
            )
            kept: list[Tensor] = []  # each micro batch's, where the loss is computed

            def differentiated(batch: MicroBatch, output: Output | ScalarOutput) -> tuple[Tensor, dict[str, Tensor]]:
                total, figures, of_tokens = self._loss(batch, output, normalizer)
                if wanted:
                    kept.append(of_tokens.detach())
                return total, figures

            def run(during: ExitStack) -> tuple[list[MicroBatch], list[dict[str, Tensor]]]:
                batches = self._build(samples, plan, names, normalizer.names, loss)
                during.enter_context(trainable.applying(normalizer.names))
                during.enter_context(counted)
                return batches, engine.run(batches, differentiated, forward_only=False)

            try:
                with ExitStack() as during:
                    batches, stored = self._run(run, during, call)
                    metrics, values = self._reduce_metrics(stored, normalizer)
                    found = self._of_samples({wanted: kept}, batches, plan, len(samples)) if wanted else {}
                    self._add_up() if keep else trainable.abandon()  # last: what fails before it has added nothing
            except LossFunctionError:
                trainable.abandon()
                raise
        return ForwardBackwardResult(
            agreed.micro_batches,
            agreed.counts,
            loss,
            metrics,
            values,
            normalizer.figure_scale,
            self._groups.rank == 0,
            **found,
        )

    @torch.no_grad()
    def forward(
        self,
        samples: Sequence[Sample],
        entropy: bool,
        logits: bool,
        adapter: str | None = None,
        reference: bool = False,
    ) -> ForwardResult:
        """Log-probabilities of the targets; see ``Backend.forward``."""

        def scores(batch: MicroBatch, output: Output) -> dict[str, Tensor | None]:
            logprobs, entropies = output.logprobs(entropy)
            return {"logprobs": logprobs, "entropy": entropies, "logits": output.logits() if logits else None}

        names = ("logprobs", *(["entropy"] if entropy else []), *(["logits"] if logits else []))
        call = f"forward({entropy=}, {logits=}, {reference=})"
        return ForwardResult(**self.place_scores(call, samples, adapter, names, scores, reference=reference))

    @torch.no_grad()
    def values(self, samples: Sequence[Sample], adapter: str | None = None, reference: bool = False) -> list[Tensor]:
        """A scalar head's value at every token; see ``Backend.values``."""

        def scores(batch: MicroBatch, output: Any) -> dict[str, Tensor | None]:
            return {"values": output.values}

        return self.place_scores(
            f"values({reference=})", samples, adapter, ("values",), scores, reference=reference, of="values"
        )["values"]

    @torch.no_grad()
    def top_logprobs(
        self, samples: Sequence[Sample], count: int, adapter: str | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """The ``count`` likeliest tokens at every place of each sample: int64 ids and fp32 log-probabilities [length, count].

        On the CPU, likeliest first, with dropout off. Logits of no more than :data:`ROWS` tokens are there at a time.
        """

        def scores(batch: MicroBatch, output: Output) -> dict[str, Tensor | None]:
            places = torch.arange(len(batch.targets)).split(ROWS)
            parts = [output.logits(rows).log_softmax(-1).topk(count) for rows in places]
            return {
                "ids": torch.cat([part.indices for part in parts]),
                "values": torch.cat([part.values for part in parts]),
            }

        found = self.place_scores(f"top_logprobs({count})", samples, adapter, ("ids", "values"), scores)
        return list(zip(found["ids"], found["values"], strict=True))

    def place_scores(
        self,
        call: str,
        samples: Sequence[Sample],
        adapter: str | None,
        names: Sequence[str],
        scores: Callable[[MicroBatch, Output], dict[str, Tensor | None]],
        *,
        reference: bool = False,
        of: Literal["logprobs", "values"] = "logprobs",
    ) -> dict[str, Any]:
        """Under each of ``names`` a CPU tensor [length, ...] for every sample, with dropout off.

        Args:
            call: what it is, for messages; ranks must agree on it.
            scores: makes of a micro batch's output the tensors under ``names``, each with a row for every place; also called
                with what other ranks wait for, where it has no samples.
            of: what the model's output must have.
        """
        engine, trainable = self._engine, self._engine.trainable
        require_head(engine, of, call)

        def stored_scores(batch: MicroBatch, output: Output) -> tuple[Tensor, dict[str, Any]]:
            return batch.weights.sum(), scores(batch, output)

        with self._groups.monitor.phase("forward only"):
            plan, of_samples, agreed = self._plan(f"{call}{trainable.describe()}", samples, None, adapter, reference)
            order = list(agreed.counts)

            def run(during: ExitStack) -> tuple[list[MicroBatch], list[dict[str, Any]]]:
                batches = self._build(samples, plan, of_samples, order, None)
                during.enter_context(engine.evaluating())
                during.enter_context(trainable.applying(order))
                return batches, engine.run(batches, stored_scores, forward_only=True)

            with ExitStack() as during:
                batches, stored = self._run(run, during, call)
            values = {name: [item[name] for item in stored] for name in names}
            return self._of_samples(values, batches, plan, len(samples))

    @torch.no_grad()
    def next_token_logits(
        self,
        samples: Sequence[Sample],
        adapter: str | None = None,
        *,
        everywhere: bool = True,
        on_batch: Callable[[MicroBatch], None] = lambda batch: None,
    ) -> list[Tensor]:
        """Logits of what follows each sample; see ``Backend.next_token_logits``.

        Args:
            everywhere: on all pipeline stages; otherwise only the last one gets them, and the others nothing.
            on_batch: called with every micro batch of samples before it runs.
        """
        engine, trainable = self._engine, self._engine.trainable
        require_head(engine, "logprobs", "next_token_logits")

        def scores(batch: MicroBatch, output: Output) -> tuple[Tensor, Tensor]:
            rows, members = last_tokens(batch)
            found = output.logits(rows)
            whole = found.new_zeros(len(batch.members), found.shape[1]).index_copy_(0, members, found)
            return batch.weights.sum(), whole

        with self._groups.monitor.phase("forward only"):
            call = f"next_token_logits(){trainable.describe()}"
            plan, names, agreed = self._plan(call, samples, None, adapter)
            order = list(agreed.counts)
            batches = self._build(samples, plan, names, order, None)
            for batch in batches:
                if not batch.dummy:
                    on_batch(batch)
            with engine.evaluating(), trainable.applying(order):
                stored = engine.run(batches, scores, forward_only=True)
            values = [list(self._over_context(whole)) for whole in stored]
            ordered = self._in_order(values, plan, len(samples)) if stored else []
            if everywhere and self._topology.pipeline > 1:
                ordered = broadcast_object(ordered, "pp", self._groups, self._topology.pipeline - 1, "logits")
        return ordered  # type: ignore[return-value]  every sample is in one micro batch

    def _run(self, run: Callable[[ExitStack], T], during: ExitStack, call: str) -> T:
        """``run``, in which memory may run out; where ranks do not wait for one another in it, that is an error of them all.

        Args:
            during: keeps contexts that ``run`` enters.

        Raises:
            OutOfDeviceMemoryError: on every rank: it has run out on one.
        """
        if self._topology.world_size == 1 or not getattr(self._engine, "apart", False):
            return run(during)
        try:
            return with_room_everywhere(lambda: run(during), self._groups, call)
        except OutOfDeviceMemoryError:
            self._engine.trainable.abandon()
            raise

    def _add_up(self) -> None:
        """Have the gradients of the call count.

        Raises:
            MegascendError: memory has run out half way. OutOfMemoryError would mean that nothing has been added.
        """
        try:
            self._engine.trainable.collect()
        except torch.OutOfMemoryError as error:
            raise MegascendError(f"gradients are incomplete: memory ran out as they were added up ({error})") from error

    # --- planning ---

    def _plan(
        self, call: str, samples: Sequence[Sample], loss: Loss | None, adapter: str | None, reference: bool = False
    ) -> tuple[list[list[int]], list[str], agreement.Agreement]:
        """This rank's micro batches, as many as every other rank has (trailing ones may be empty), and samples' adapters."""
        engine, layout = self._engine, self._engine.layout
        plan: list[list[int]] = []
        names: list[str] = []
        lengths = [layout.padded_length(len(sample)) for sample in samples]
        pairs = [sample.pair if loss is not None and loss.per == "pair" else None for sample in samples]
        try:
            check_samples(samples, engine)
            training = loss is not None
            names = [""] * len(samples) if reference else engine.trainable.names(samples, adapter, training=training)
            check_pairs(pairs, names)
            pair_positions(samples, loss)
            if loss is not None:
                check_fields(samples, loss)
            budget = engine.batching.budget
            plan = plan_micro_batches(lengths, pairs, budget, layout.packing, kinds=names)
            mine = agreement.report(samples, len(plan), names, loss)
        except DataError as error:
            mine = agreement.RankReport(problem=str(error))
        agreed = agreement.exchange(mine, self._topology, self._groups, call)
        return split_to(plan, agreed.micro_batches, lengths, pairs), names, agreed

    def _normalizer(self, agreed: agreement.Agreement, loss: Loss) -> LossNormalizer:
        """What the loss of each adapter (or the model itself) is divided by.

        Raises:
            DataError: a mean has nothing to be divided by.
        """
        unit, loss_grad = self._engine.scales(agreed.micro_batches)
        scales = []
        own = self._engine.trainable.loss_scales(list(agreed.counts))
        for (name, counts), factor in zip(agreed.counts.items(), own, strict=True):
            total = counts.weight if loss.per == "token" else float(counts.pairs)
            if loss.reduction == "sum":
                total = 1.0
            if total <= 0:
                what = "all targets have weight 0" if loss.per == "token" else "there is no preference pair"
                of = f" of adapter {name!r}" if name else ""
                raise DataError(f"{what} in the whole global batch{of}: the loss {loss.name!r} is undefined")
            scales.append(unit / total * factor)
        gather = self._gather_context if self._topology.context > 1 else None
        device, counts = self._engine.device, agreed.counts.values()
        count = sum(of.weight if loss.per == "token" else of.pairs for of in counts)
        return LossNormalizer(loss, list(agreed.counts), scales, loss_grad, device, gather, count)

    def _gather_context(self, obj: Any) -> list[Any]:
        return gather_objects(obj, "cp", self._groups, "the loss function")

    def _build(
        self, samples: Sequence[Sample], plan: list[list[int]], names: list[str], order: list[str], loss: Loss | None
    ) -> list[MicroBatch]:
        """The micro batches of ``plan``; ``order`` are the adapters of all ranks' samples."""
        engine = self._engine
        adapter_index = [order.index(name) for name in names]
        batches = []
        for members in plan:
            chosen, index = samples, adapter_index
            if members:
                members.sort(key=lambda member: index[member])  # in the plan itself: forward() finds its results by it
                batch = build(samples, members, engine.layout, loss, engine.device, adapter_index=index)
            else:
                # Joins the other ranks in collectives: a real sample where there is one, with weight 0.
                if not samples:
                    chosen, index = [Sample(input_ids=[0], target_ids=[0], weights=[0.0])], [0]
                shortest = min(range(len(chosen)), key=lambda member: len(chosen[member]))
                batch = build(chosen, [shortest], engine.layout, None, engine.device, dummy=True, adapter_index=index)
            engine.trainable.prepare(batch, chosen, order)
            batches.append(batch)
        return batches

    # --- the loss of a micro batch ---

    def _loss(
        self, batch: MicroBatch, output: Output | ScalarOutput, normalizer: LossNormalizer
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """What is differentiated, for every figure its sum for each adapter [names], and log-probabilities or values [n]."""
        loss, scale = normalizer.loss, normalizer.of_tokens(batch)
        if isinstance(output, ScalarOutput):
            return self._differentiated(batch, output.values, None, normalizer)
        if (loss.is_cross_entropy or loss.function is cross_entropy) and output.fuses_loss:
            total, logprobs = output.cross_entropy(batch.weights * scale, normalizer.loss_grad)
            return total, self._of_cross_entropy(batch, logprobs.detach(), normalizer), logprobs
        return self._differentiated(batch, *output.logprobs(loss.entropy), normalizer)

    def _of_cross_entropy(self, batch: MicroBatch, logprobs: Tensor, normalizer: LossNormalizer) -> dict[str, Tensor]:
        """The figures of a loss whose gradient needs no call of its function."""
        figures: dict[str, Tensor] | None = {"loss": -logprobs}
        if normalizer.loss.function is not cross_entropy and not batch.dummy:
            figures = normalizer.function.observe(logprobs, self._loss_inputs(batch, normalizer.loss), batch.padding)
        return self._token_figures(batch, figures or {"loss": -logprobs}, normalizer)

    def _token_figures(
        self, batch: MicroBatch, figures: dict[str, Tensor], normalizer: LossNormalizer
    ) -> dict[str, Tensor]:
        """Sums of values [n] for each adapter, scaled: of the loss by weights, of metrics as they are averaged."""
        summed = normalizer.loss.reduction == "sum"
        of_loss = batch.weights * normalizer.figure_scale
        of_metrics = (batch.weights != 0) * normalizer.figure_scale if summed else of_loss
        return {
            name: normalizer.sums(weighted(of, of_loss if name == "loss" else of_metrics), batch)
            for name, of in figures.items()
        }

    def _differentiated(
        self, batch: MicroBatch, tokens: Tensor, entropy: Tensor | None, normalizer: LossNormalizer
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """As :meth:`_loss`, of log-probabilities or values of ``tokens`` [n] and, where the loss asks for them, entropies."""
        loss, scale, found = normalizer.loss, normalizer.of_tokens(batch), None
        if not batch.dummy:
            inputs = self._loss_inputs(batch, loss)
            factors = scale if loss.per == "token" else normalizer.of_pairs(batch)
            found = normalizer.function.evaluate(tokens, entropy, inputs, factors, batch.padding)
        if found is None:  # the model's backward pass runs all the same: other ranks meet this one there
            nothing = torch.zeros_like(tokens).mul(tokens).sum()
            return nothing, {"loss": tokens.new_zeros(len(normalizer.names))}, tokens
        total = (found.scores * tokens).sum()
        if entropy is not None and found.entropy is not None:
            total = total + (found.entropy * entropy).sum()
        if loss.per == "token":
            return total, self._token_figures(batch, found.figures, normalizer), tokens
        # Every context parallel rank has every pair: it reports its part of the sum, but takes the whole gradient.
        part = normalizer.figure_scale / self._topology.context
        return total, {name: normalizer.pair_sums(of * part, batch) for name, of in found.figures.items()}, tokens

    def _loss_inputs(self, batch: MicroBatch, loss: Loss) -> LossInputs:
        return LossInputs(
            targets=batch.targets,
            weights=batch.weights,
            sample=batch.sample,
            sample_count=len(batch.members),
            pairs=batch.pairs,
            reduce_context=context_sum(self._context_group, loss.per),
            advantages=batch.fields.get("advantages"),
            old_logprobs=batch.fields.get("old_logprobs"),
            ref_logprobs=batch.fields.get("ref_logprobs"),
            returns=batch.fields.get("returns"),
            old_values=batch.fields.get("old_values"),
            last=to_device(last_tokens(batch)[0], batch.sample.device) if loss.of == "values" else None,
            extra=batch.fields,
            members=batch.members,
        )

    # --- bringing results together ---

    def _reduce_metrics(
        self, stored: list[dict[str, Tensor]], normalizer: LossNormalizer
    ) -> tuple[tuple[str, ...], Tensor]:
        """Sums [adapters, figures] over micro batches and ranks, on the device, without waiting for it."""
        mine = tuple(dict.fromkeys(name for item in stored for name in item))
        names = ("loss",)
        if normalizer.loss.function is not cross_entropy:  # only the last stage knows what else a loss reported
            told = gather_objects((mine, normalizer.function.problem), "world", self._groups, "metrics of the loss")
            raise_together([problem for _, problem in told], normalizer.function)
            names = tuple(dict.fromkeys(name for reported, _ in told for name in reported))
        values = torch.zeros(len(normalizer.names), len(names), dtype=torch.float32, device=self._engine.device)
        counts = self._groups.coordinates.tensor == 0
        for item in stored if counts else []:
            for position, name in enumerate(names):
                if name in item:
                    values[:, position] += item[name]
        if self._topology.world_size > 1:
            dist.all_reduce(values, group=self._groups.device_group("world"))
        return names, values

    def _of_samples(
        self, values: dict[str, list[Tensor]], batches: list[MicroBatch], plan: list[list[int]], count: int
    ) -> dict[str, Any]:
        """Each of ``values``, a tensor a micro batch where the loss is computed, as one CPU tensor a sample, on every stage."""
        found = {}
        for name, of_batches in values.items():
            pairs = zip(batches, of_batches, strict=True) if of_batches else ()
            found[name] = self._in_order([self._collect(batch, of) for batch, of in pairs], plan, count)
        if self._topology.pipeline > 1:
            found = broadcast_object(found, "pp", self._groups, self._topology.pipeline - 1, "log-probabilities")
        return found

    def _collect(self, batch: MicroBatch, values: Tensor) -> list[Tensor]:
        """One unpadded CPU tensor a sample from this rank's tokens, context parallel parts brought together."""
        whole = values.new_zeros((sum(batch.padded_lengths), *values.shape[1:]))
        whole.index_copy_(0, batch.place.to(values.device), values)
        return [part.clone() for part in unpack(self._over_context(whole), batch)]

    def _over_context(self, values: Tensor) -> Tensor:
        """On the CPU, with what the other context parallel ranks have in the places where this one has zeros."""
        if self._context_group is not None:
            values = values.to(self._engine.device)
            dist.all_reduce(values, group=self._context_group)
        return values.cpu()

    @staticmethod
    def _in_order(values: list[list[Tensor]], plan: list[list[int]], count: int) -> list[Tensor | None]:
        ordered: list[Tensor | None] = [None] * count
        for members, tensors in zip(plan, values, strict=False):
            for index, tensor in zip(members, tensors, strict=False):
                ordered[index] = tensor
        return ordered
