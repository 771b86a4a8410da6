"""Forward and backward passes of samples, on any engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.engines.base import Engine, OnOutput, Output, ScalarOutput
from megascend.engines.step.checks import (
    check_fields,
    check_labels,
    check_pairs,
    check_requirements,
    check_samples,
    require_head,
)
from megascend.engines.step.loss import MicroBatchLoss, normalizer_of
from megascend.engines.step.policy import policy_output
from megascend.engines.step.shared_output import token_output
from megascend.errors import DataError, LossFunctionError, MegascendError, OutOfDeviceMemoryError
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
from megascend.runtime.distributed.memory import catch_oom_on_all_ranks
from megascend.runtime.distributed.objects import broadcast_object, gather_objects
from megascend.training.batch import agreement
from megascend.training.batch.loss import Loss
from megascend.training.batch.loss_call import LossNormalizer, raise_together
from megascend.training.batch.losses import cross_entropy
from megascend.training.batch.micro_batch import MicroBatch, build, last_tokens, pair_positions, unpack
from megascend.training.batch.packing import plan_micro_batches, split_to
from megascend.training.batch.prefixes import PrefixPlan, plan_prefixes
from megascend.training.batch.results import MTP_LOSS, ForwardBackwardResult, ForwardResult
from megascend.training.batch.sample import Sample
from megascend.training.batch.shared_batch import share
from megascend.training.kernels.host_copy import to_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

LOGIT_ROWS = 512
"""Tokens whose full logits are on the host at a time: with a vocabulary of 150 thousand, 0.3 GB in fp32."""
FORWARD_PHASE = "forward"
"""Phase that engines mark around the forward pass of every micro batch, or of each of its chunks."""

OnMicroBatch = Callable[[int, int], None]
"""(micro batches already started, micro batches in the call) -> None."""


@contextmanager
def reporting_progress(
    monitor: HangMonitor, on_micro_batch: OnMicroBatch | None, micro_batches: int, chunks: int
) -> Iterator[None]:
    """Call ``on_micro_batch`` when a forward pass begins, within the context. Local, on any engine.

    Args:
        chunks: model chunks on this rank, each of which runs a forward pass of every micro batch.
    """
    entered = 0

    def on_phase(name: str) -> None:
        nonlocal entered
        if name == FORWARD_PHASE and on_micro_batch is not None:
            on_micro_batch(entered // chunks, micro_batches)
            entered += 1

    # Every engine marks its phases with the monitor, so engines need no progress callback of their own.
    monitor.on_phase = on_phase
    try:
        yield
    finally:
        monitor.on_phase = None


@dataclass(frozen=True)
class RankPlan:
    """A rank's micro batches.

    Attributes:
        members: indices of each one's samples.
        adapter_names: adapter of each sample.
        prefixes: what samples have in common, if that is computed once.
    """

    members: list[list[int]]
    adapter_names: list[str]
    prefixes: PrefixPlan | None


class Step:
    """Runs an engine's model on samples."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._groups, self._topology = engine, engine.groups, engine.topology

    @property
    def _context_group(self) -> ProcessGroup | None:
        return self._groups.device_group("cp") if self._topology.context > 1 else None

    # --- passes ---

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss: Loss,
        adapter: str | None = None,
        on_micro_batch: OnMicroBatch | None = None,
        outputs: Literal["logprobs", "values"] | None = None,
        *,
        accumulate: bool = True,
    ) -> ForwardBackwardResult:
        """Accumulate gradients of the loss over the global batch; see ``Backend.forward_backward``.

        Args:
            outputs: values of every token that the result includes.
            accumulate: False drops the gradients, and those of earlier calls; for measurements before the first step.
        """
        engine, trainable = self._engine, self._engine.trainable
        with self._groups.monitor.phase("forward and backward"):
            call = f"forward_backward({loss.describe()}{f', {outputs}=True' if outputs else ''}){trainable.describe()}"
            # A measurement repeats samples to fill micro batches, which must not be taken for common prefixes.
            plan, agreed = self._plan(call, samples, loss, adapter, shares=accumulate)
            normalizer = normalizer_of(loss, agreed, engine)
            compute = MicroBatchLoss(normalizer, self._context_group)
            token_outputs: list[Tensor] = []  # of each micro batch, on ranks that compute the loss

            def loss_fn(batch: MicroBatch, output: Output | ScalarOutput) -> tuple[Tensor, dict[str, Tensor]]:
                total, metrics, values = compute(batch, output)
                if outputs:
                    token_outputs.append(values.detach())
                return total, metrics

            def run_batches() -> tuple[list[MicroBatch], list[dict[str, Tensor]]]:
                batches = self._build(samples, plan, normalizer.names, loss)
                chunks = self._topology.virtual_pipeline
                progress = reporting_progress(self._groups.monitor, on_micro_batch, agreed.micro_batches, chunks)
                with trainable.applying(normalizer.names), progress:
                    return batches, self._run(batches, loss_fn, forward_only=False)

            try:
                if engine.router_replay is not None:
                    # Discard counts that passes without gradients, or a failed pass, have left behind.
                    engine.router_replay.take_counts()
                batches, batch_metrics = self._run_or_raise_oom(run_batches, call)
                metrics, values = self._reduce_metrics(batch_metrics, normalizer)
                replayed = self._reduce_replay_counts(agreed)
                sample_outputs: dict[str, Any] = {}
                if outputs:
                    sample_outputs = self._gather_by_sample({outputs: token_outputs}, batches, plan, len(samples))
                # Last, so that an error before it leaves the gradients unchanged.
                self._accumulate() if accumulate else trainable.abandon()
            except LossFunctionError:  # raised by _reduce_metrics on all ranks, after the model's collectives
                trainable.abandon()
                raise
        return ForwardBackwardResult(
            agreed.micro_batches,
            agreed.counts,
            loss,
            metrics,
            values,
            normalizer.metric_scale,
            self._groups.rank == 0,
            _replayed=replayed,
            **sample_outputs,
        )

    @torch.no_grad()
    def forward(
        self,
        samples: Sequence[Sample],
        entropy: bool,
        logits: bool,
        adapter: str | None = None,
        reference: bool = False,
        candidates: bool = False,
    ) -> ForwardResult:
        """Compute log-probabilities of the targets; see ``Backend.forward``."""

        def scores(batch: MicroBatch, output: Output) -> dict[str, Tensor | None]:
            policy = policy_output(batch, output)
            logprobs, entropies, selected = policy.logprobs(entropy, batch.candidate_ids if candidates else None)
            return {
                "logprobs": logprobs,
                "entropy": entropies,
                "logits": output.logits() if logits else None,
                # A dummy batch has none.
                "candidates": torch.zeros_like(logprobs)[:, None] if selected is None else selected,
            }

        flags = {"logprobs": True, "entropy": entropy, "logits": logits, "candidates": candidates}
        names = [name for name, requested in flags.items() if requested]
        call = f"forward({entropy=}, {logits=}, {reference=}{', candidates=True' if candidates else ''})"
        return ForwardResult(
            **self.token_scores(
                call,
                samples,
                adapter,
                names,
                scores,
                reference=reference,
                requires=("candidates",) if candidates else (),
            )
        )

    @torch.no_grad()
    def values(self, samples: Sequence[Sample], adapter: str | None = None, reference: bool = False) -> list[Tensor]:
        """Compute a scalar head's value at every token; see ``Backend.values``."""

        def scores(batch: MicroBatch, output: Any) -> dict[str, Tensor | None]:
            return {"values": output.values}

        return self.token_scores(
            f"values({reference=})", samples, adapter, ("values",), scores, reference=reference, output="values"
        )["values"]

    @torch.no_grad()
    def divergences(self, samples: Sequence[Sample], loss: Loss, adapter: str | None = None) -> list[Tensor]:
        """Compute the divergence from the teacher of a loss at every target; see ``Backend.divergences``."""
        divergence = loss.divergence
        assert divergence is not None

        def scores(batch: MicroBatch, output: Output) -> dict[str, Tensor | None]:
            if batch.teacher_states is None:  # a dummy batch, on all ranks of the tensor parallel group
                return {"divergence": output.logprobs(False)[0]}
            states = to_device(batch.teacher_states, batch.targets.device)
            return {"divergence": output.divergence(divergence, states)[1]}

        call = f"divergences({loss.describe()})"
        return self.token_scores(
            call, samples, adapter, ("divergence",), scores, requires=("teacher_states",), loss=loss
        )["divergence"]

    @torch.no_grad()
    def top_logprobs(
        self, samples: Sequence[Sample], count: int, adapter: str | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the ``count`` likeliest tokens at every position of samples: int64 ids, fp32 log-probabilities [length, count].

        On the CPU, likeliest first, with dropout off. At most :data:`LOGIT_ROWS` tokens' logits are held at a time.
        """

        def scores(batch: MicroBatch, output: Output) -> dict[str, Tensor | None]:
            chunks = torch.arange(len(batch.targets)).split(LOGIT_ROWS)
            # A chunk of rows at a time: full logits are far larger than their top ``count``.
            parts = [output.logits(rows).log_softmax(-1).topk(count) for rows in chunks]
            return {
                "ids": torch.cat([part.indices for part in parts]),
                "values": torch.cat([part.values for part in parts]),
            }

        top = self.token_scores(f"top_logprobs({count})", samples, adapter, ("ids", "values"), scores)
        return list(zip(top["ids"], top["values"], strict=True))

    def token_scores(
        self,
        call: str,
        samples: Sequence[Sample],
        adapter: str | None,
        names: Sequence[str],
        scores: Callable[[MicroBatch, Output], dict[str, Tensor | None]],
        *,
        reference: bool = False,
        output: Literal["logprobs", "values"] = "logprobs",
        requires: Sequence[str] = (),
        loss: Loss | None = None,
    ) -> dict[str, Any]:
        """Return under each of ``names`` a CPU tensor [length, ...] for every sample, with dropout off.

        Args:
            call: description of the call, for messages; ranks must agree on it.
            scores: computes the tensors in ``names`` from a micro batch's output, each with a row for every token; also called
                for dummy batches, which only match other ranks' collectives.
            output: kind of output that the model's head must compute.
            requires: fields that all samples must have.
            loss: loss whose fields the micro batches need; default: those of a forward pass.
        """
        engine, trainable = self._engine, self._engine.trainable
        require_head(engine, output, call)

        def stored_scores(batch: MicroBatch, output: Output) -> tuple[Tensor, dict[str, Any]]:
            # Engines expect a loss; with forward_only nothing differentiates it.
            return batch.weights.sum(), scores(batch, output)

        with self._groups.monitor.phase("forward only"):
            plan, agreed = self._plan(f"{call}{trainable.describe()}", samples, None, adapter, reference, requires)
            order = list(agreed.counts)

            def run_batches() -> tuple[list[MicroBatch], list[dict[str, Any]]]:
                batches = self._build(samples, plan, order, loss)
                with engine.evaluating(), trainable.applying(order):
                    return batches, self._run(batches, stored_scores, forward_only=True)

            batches, stored = self._run_or_raise_oom(run_batches, call)
            values = {name: [scores[name] for scores in stored] for name in names}
            return self._gather_by_sample(values, batches, plan, len(samples))

    @torch.no_grad()
    def next_token_logits(
        self,
        samples: Sequence[Sample],
        adapter: str | None = None,
        *,
        everywhere: bool = True,
        on_batch: Callable[[MicroBatch], None] = lambda batch: None,
    ) -> list[Tensor]:
        """Compute next-token logits after each sample; see ``Backend.next_token_logits``.

        Args:
            everywhere: return them on all pipeline stages, instead of only on the last.
            on_batch: called with every micro batch of samples before it runs.
        """
        engine, trainable = self._engine, self._engine.trainable
        require_head(engine, "logprobs", "next_token_logits")

        def scores(batch: MicroBatch, output: Output) -> tuple[Tensor, Tensor]:
            rows, members = last_tokens(batch)
            logits = output.logits(rows)
            # 0 for samples whose last token is on another context parallel rank: the sum over them follows.
            member_logits = logits.new_zeros(len(batch.members), logits.shape[1]).index_copy_(0, members, logits)
            return batch.weights.sum(), member_logits

        with self._groups.monitor.phase("forward only"):
            call = f"next_token_logits(){trainable.describe()}"
            # Each sample's keys and values are written to the cache.
            plan, agreed = self._plan(call, samples, None, adapter, shares=False)
            order = list(agreed.counts)

            def run_batches() -> list[Tensor]:
                batches = self._build(samples, plan, order, None)
                for batch in batches:
                    if not batch.dummy:
                        on_batch(batch)
                with engine.evaluating(), trainable.applying(order):
                    return engine.run(batches, scores, forward_only=True)

            stored = self._run_or_raise_oom(run_batches, call)
            values = [list(self._sum_over_context(logits)) for logits in stored]
            ordered = self._restore_order(values, plan.members, len(samples)) if stored else []
            if everywhere and self._topology.pipeline > 1:
                ordered = broadcast_object(ordered, "pp", self._groups, self._topology.pipeline - 1, "logits")
        return ordered  # type: ignore[return-value]  every sample is in one micro batch

    def _run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        """Run the engine on micro batches; ``on_output`` gets those of samples, with an output for each of their tokens."""

        def on_rows(batch: MicroBatch, output: Any) -> tuple[Tensor, Any]:
            return on_output(batch.of_samples, output if batch.shared is None else token_output(output, batch.shared))

        return self._engine.run(batches, on_rows, forward_only=forward_only)

    def _run_or_raise_oom(self, run_batches: Callable[[], T], call: str) -> T:
        """Call ``run_batches``; on independent ranks, raise OutOfDeviceMemoryError on all if one runs out of memory."""
        # Other ranks may be in a collective of the model, where no message reaches them: only the hang monitor ends that wait.
        if self._topology.world_size == 1 or not self._engine.independent_ranks:
            return run_batches()
        try:
            return catch_oom_on_all_ranks(run_batches, self._groups, call)
        except OutOfDeviceMemoryError:
            self._engine.trainable.abandon()
            raise

    def _accumulate(self) -> None:
        """Accumulate the gradients of the call.

        Running out of memory here becomes a MegascendError: callers take OutOfMemoryError to mean unchanged gradients.
        """
        try:
            self._engine.trainable.collect()
        except torch.OutOfMemoryError as error:
            raise MegascendError(
                f"gradients are incomplete: out of memory while accumulating them ({error})"
            ) from error

    # --- planning ---

    def _plan(
        self,
        call: str,
        samples: Sequence[Sample],
        loss: Loss | None,
        adapter: str | None,
        reference: bool = False,
        requires: Sequence[str] = (),
        shares: bool = True,
    ) -> tuple[RankPlan, agreement.Agreement]:
        """Plan this rank's micro batches, as many as on every other rank (trailing ones may be empty).

        Args:
            shares: common prefixes may be computed once.
        """
        engine, layout = self._engine, self._engine.layout
        plan: list[list[int]] = []
        adapter_names: list[str] = []
        prefixes: PrefixPlan | None = None
        lengths = [layout.padded_length(len(sample)) for sample in samples]
        pairs: Sequence[Hashable | None] = [
            sample.pair if loss is not None and loss.per == "pair" else None for sample in samples
        ]
        try:
            check_samples(samples, engine)
            training = loss is not None
            # The reference is the model without adapters.
            adapter_names = (
                [""] * len(samples) if reference else engine.trainable.names(samples, adapter, training=training)
            )
            check_pairs(pairs, adapter_names)
            pair_positions(samples, loss)
            check_requirements(samples, requires, call)
            if loss is not None:
                check_requirements(samples, loss.requires, f"loss {loss.name!r}")
                check_fields(samples, loss)
                check_labels(samples, loss, 0 if engine.info.scalar_head is None else engine.info.scalar_head.outputs)
            budget = engine.batching.budget
            if shares and self._may_share(adapter_names, training=training):
                prefixes = plan_prefixes(samples, adapter_names, pairs, budget, engine.batching.shortest_prefix)
            if prefixes is not None:
                lengths, pairs = prefixes.costs(lengths), prefixes.unit
            plan = plan_micro_batches(lengths, pairs, budget, layout.packing, kinds=adapter_names)
            report = agreement.report(samples, len(plan), adapter_names, loss, prefixes and prefixes.common)
        except DataError as error:
            # Reported, not raised: the other ranks wait in the exchange below.
            report = agreement.RankReport(problem=str(error))
        agreed = agreement.exchange(report, self._topology, self._groups, call)
        return RankPlan(split_to(plan, agreed.micro_batches, lengths, pairs), adapter_names, prefixes), agreed

    def _may_share(self, adapter_names: Sequence[str], *, training: bool) -> bool:
        # With dropout, a prefix has other activations in each sample.
        adapters = self._engine.trainable.adapters
        dropout = training and any(adapters[name].lora.dropout for name in set(adapter_names) if name)
        return self._engine.shares_prefixes and not dropout

    def _build(
        self,
        samples: Sequence[Sample],
        plan: RankPlan,
        order: list[str],
        loss: Loss | None,
    ) -> list[MicroBatch]:
        """Build the micro batches of ``plan``; ``order``: the adapters of all ranks' samples, which layers know by index."""
        engine, prefixes = self._engine, plan.prefixes
        adapter_index = [order.index(name) for name in plan.adapter_names]
        batches = []
        for planned in plan.members:
            # In place: results are matched to samples by the plan.
            planned.sort(key=lambda member: adapter_index[member])
            if prefixes is not None:
                planned.sort(key=lambda i: (adapter_index[i], prefixes.unit[i], prefixes.order[i]))
            source, index, members = samples, adapter_index, planned
            if not planned:
                # A dummy batch takes part in the other ranks' collectives: the shortest sample, with weight 0.
                if not samples:
                    source, index = [Sample(input_ids=[0], target_ids=[0], weights=[0.0])], [0]
                members = [min(range(len(source)), key=lambda member: len(source[member]))]
            common = [0] if prefixes is None or not planned else [prefixes.common[member] for member in members]
            batch = build(
                source,
                members,
                replace(engine.layout, token_multiple=1) if any(common) else engine.layout,
                loss if planned else None,
                engine.device,
                dummy=not planned,
                adapter_index=index,
                mtp=loss is not None and engine.mtp_loss_weight > 0,
                image_layout=engine.info.image_layout,
            )
            if any(common):
                batch = share(batch, source, common, engine.layout, engine.device)
            engine.trainable.prepare(batch, source, order)
            batches.append(batch)
        return batches

    # --- collecting results ---

    def _reduce_metrics(
        self, stored: list[dict[str, Tensor]], normalizer: LossNormalizer
    ) -> tuple[tuple[str, ...], Tensor]:
        """Sum metrics over micro batches and ranks to [adapters, metrics], on the device, without waiting for it."""
        names = ("loss", MTP_LOSS) if self._engine.mtp_loss_weight else ("loss",)
        if normalizer.loss.function is not cross_entropy:  # only the last stage knows the names of other metrics
            local = tuple(dict.fromkeys(name for metrics in stored for name in metrics))
            report = (local, normalizer.function.problem)
            reports = gather_objects(report, "world", self._groups, "metrics of the loss")
            raise_together([problem for _, problem in reports], normalizer.function)
            names = tuple(dict.fromkeys(name for reported, _ in reports for name in reported))
        values = torch.zeros(len(normalizer.names), len(names), dtype=torch.float32, device=self._engine.device)
        # Tensor parallel ranks compute the same metrics, which must enter the sum once.
        contributes = self._groups.coordinates.tensor == 0
        for metrics in stored if contributes else []:
            for position, name in enumerate(names):
                if name in metrics:
                    values[:, position] += metrics[name]
        if self._topology.world_size > 1:
            # Over the world: ranks that compute no loss, and tensor parallel copies, contribute zeros.
            dist.all_reduce(values, group=self._groups.device_group("world"))
        return names, values

    def _reduce_replay_counts(self, agreed: agreement.Agreement) -> Tensor | None:
        """Sum the counts of router replay over ranks; None if no rank has a sample with ``routed_experts``. Collective."""
        if self._engine.router_replay is None or not any(counts.routed for counts in agreed.counts.values()):
            return None
        counts = self._engine.router_replay.take_counts()
        if self._topology.world_size > 1:
            dist.all_reduce(counts, group=self._groups.device_group("world"))
        return counts

    def _gather_by_sample(
        self, values: dict[str, list[Tensor]], batches: list[MicroBatch], plan: RankPlan, count: int
    ) -> dict[str, Any]:
        """Turn ``values``, a tensor per micro batch on the last stage, into one CPU tensor per sample on every stage."""
        by_sample = {}
        for name, tensors in values.items():
            pairs = zip(batches, tensors, strict=True) if tensors else ()
            by_sample[name] = self._restore_order(
                [self._collect(batch.of_samples, tensor) for batch, tensor in pairs], plan.members, count
            )
        if self._topology.pipeline > 1:
            last = self._topology.pipeline - 1
            by_sample = broadcast_object(by_sample, "pp", self._groups, last, "log-probabilities")
        return by_sample

    def _collect(self, batch: MicroBatch, values: Tensor) -> list[Tensor]:
        """Return one unpadded CPU tensor per sample from the tokens of all context parallel ranks."""
        padded = values.new_zeros((sum(batch.padded_lengths), *values.shape[1:]))
        padded.index_copy_(0, batch.token_index.to(values.device), values)
        # Copies: a view of one sample would keep the values of the whole micro batch alive.
        return [tensor.clone() for tensor in unpack(self._sum_over_context(padded), batch)]

    def _sum_over_context(self, values: Tensor) -> Tensor:
        """Sum values over context parallel ranks, which have zeros for each other's tokens; return them on the CPU."""
        if self._context_group is not None:
            values = values.to(self._engine.device)
            dist.all_reduce(values, group=self._context_group)
        return values.cpu()

    @staticmethod
    def _restore_order(values: list[list[Tensor]], plan: list[list[int]], count: int) -> list[Tensor | None]:
        """Sort tensors of samples, by micro batch, into the order of the ``count`` samples of the call."""
        ordered: list[Tensor | None] = [None] * count
        for members, tensors in zip(plan, values, strict=False):
            # A dummy batch has an output, but no members.
            for index, tensor in zip(members, tensors, strict=False):
                ordered[index] = tensor
        return ordered
