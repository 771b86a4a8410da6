"""Micro batches as replayed CUDA graphs, which need no host time per kernel.

A micro batch is padded to one of a few shapes (:mod:`megascend.training.batch.step_shapes`). All that changes between calls is
the content of static memory: tokens, segments, coefficients, parameters or factors of adapters, and gradients. The first micro
batch of a shape runs eagerly on that memory; the second is captured, which executes nothing, and then replayed, as are all later
ones. The loss, the normalisation and all reported numbers are computed outside the graph, on the original micro batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megascend.config import CudaGraphs
from megascend.engines.base import OnOutput, Output
from megascend.engines.common.heads import PlainOutput
from megascend.engines.megatron.captured_step import CapturedStep, CudaCapture, StepCounts, StepFunctions, write
from megascend.engines.megatron.output_head import OutputHead
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.batch.step_shapes import StepKind, StepShape, step_shape
from megascend.training.kernels.linear_divergence import TeacherDivergence
from megascend.training.lora.adapter_set import AdapterSet
from megascend.training.lora.grouped import kernel_of
from megascend.training.lora.stacked_adapters import StackedAdapters

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_STACKS = 8
"""Maximum number of stacks of adapters. Graphs read a stack's addresses, so the oldest stack is dropped with its graphs."""


@dataclass(frozen=True)
class GraphReport:
    """Counts of micro batches since the backend was built, by outcome, and the memory of the CUDA graphs.

    Attributes:
        captures: CUDA graphs that exist now.
        captured, replayed: captures made, and micro batches that were replayed.
        first: micro batches that were the first of their shape, padded and not captured.
        eager: micro batches that ran without a graph, by reason.
        dropped: captures dropped for other ones, or because memory ran out.
        capture_bytes: device memory of all captures.
        stack_bytes: device memory of the adapters' stacked copies.
    """

    captures: int
    captured: int
    replayed: int
    first: int
    eager: dict[str, int]
    dropped: int
    capture_bytes: int
    stack_bytes: int


class GraphedSteps:
    """Runner of micro batches that replays captured steps; see the module's docstring.

    Args:
        forward: the model on a micro batch, up to the hidden states that ``head`` takes.
        eager: the output of a micro batch that is not captured.
        adapters: adapters of the model, or None if its own parameters are trained; their stacks come from a pool from now on.
        evaluating: context in which the model is in evaluation mode.
        uncached: context in which captured work reads nothing from Megatron's caches, whose memory may be freed later.
        drop_unfinished: drops gradients that a failed backward pass has left in ``grad``.
    """

    def __init__(
        self,
        forward: Callable[[MicroBatch], Tensor],
        eager: Callable[[MicroBatch], Any],
        head: OutputHead,
        adapters: AdapterSet | None,
        monitor: HangMonitor,
        settings: CudaGraphs,
        device: torch.device,
        evaluating: Callable[[], AbstractContextManager[None]],
        uncached: Callable[[], AbstractContextManager[None]],
        drop_unfinished: Callable[[], None],
        capture: CudaCapture,
    ) -> None:
        self._eager, self._head, self._evaluating, self._capture = eager, head, evaluating, capture
        self._adapters, self._monitor, self._settings, self._device = adapters, monitor, settings, device
        self._functions = StepFunctions(forward, head, self._mode, uncached, drop_unfinished, capture)
        self._stacks = None if adapters is None else adapters.keep_stacks(MAX_STACKS, self._drop_steps_of)
        self._steps: OrderedDict[StepShape, CapturedStep] = OrderedDict()
        self._counts = StepCounts()
        self._largest = settings.max_tokens
        # An input that requires a gradient: replayed outputs have no autograd graph.
        self._root = torch.empty(0, requires_grad=True)

    def run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        """Run micro batches as :meth:`megascend.engines.base.Engine.run`, for models on one rank.

        Raises:
            torch.OutOfMemoryError: memory ran out; all captures have been dropped.
        """
        try:
            with self._capture.stream():
                return self._run(batches, on_output, forward_only=forward_only)
        except torch.OutOfMemoryError:
            self._shrink_after_oom()  # frees memory for the caller that retries
            raise

    def _run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        results = []
        for batch in batches:
            with self._monitor.phase("forward"):
                output = self._output(batch, forward_only=forward_only)
            loss, result = on_output(batch, output)
            if not forward_only and loss.requires_grad:  # a replayed cross entropy has already added its gradients
                # As Megatron's schedule, whose mean over micro batches Engine.scales undoes.
                (loss / len(batches)).backward()
            results.append(result)
        return results

    def report(self) -> GraphReport:
        """Report the counts and memory so far."""
        return GraphReport(
            captures=sum(step.captured for step in self._steps.values()),
            capture_bytes=self._capture.bytes,
            stack_bytes=0 if self._stacks is None else self._stacks.bytes,
            **asdict(self._counts),
        )

    def clear(self) -> None:
        """Drop all captures."""
        # A graph that is still running must not lose its memory.
        self._capture.wait()
        self._steps.clear()
        self._capture.free()

    def release_memory(self) -> None:
        """Drop all captures to free memory for other work."""
        captured = sum(step.captured for step in self._steps.values())
        if captured:
            pool_gib = self._capture.bytes / 2**30
            self._counts.dropped += captured
            self.clear()
            logger.warning("memory ran out: %d CUDA graphs with %.1f GiB are dropped", captured, pool_gib)

    def _shrink_after_oom(self) -> None:
        """Drop all captures after a micro batch ran out of memory, and lower the size limit below the largest captured size.

        So this cannot repeat forever: in the end nothing is captured.
        """
        captured = [shape.tokens for shape, step in self._steps.items() if step.captured]
        if captured:
            # Not the size that failed: that may be a small one, which lacked the memory that the largest capture holds.
            self._largest = max(captured) - 1
            self.release_memory()
            logger.warning(
                "micro batches above %d tokens run without CUDA graphs from now on. Set batching.cuda_graphs.max_tokens or "
                "batching.micro_batch_tokens lower to keep them",
                self._largest,
            )

    def _retry_without_captures(self, work: Callable[[], T]) -> T:
        """Call ``work``, and once more after dropping all captures if memory ran out.

        Args:
            work: must not accumulate anything, since it may be called twice.
        """
        try:
            return work()
        except torch.OutOfMemoryError:
            if not any(step.captured for step in self._steps.values()):
                raise
        self._shrink_after_oom()  # outside the except block, where the error still references the tensors of ``work``
        return work()

    def _output(self, batch: MicroBatch, *, forward_only: bool) -> Output:
        problem = self._not_captured_because(batch)
        if problem is None:
            return _GraphedOutput(self, batch, forward_only)
        self._counts.note_eager(problem)
        with self._mode(forward_only):
            return self._retry_without_captures(lambda: self._eager(batch))

    def _mode(self, forward_only: bool) -> AbstractContextManager[None]:
        """Return the context of the model in eager mode."""
        return self._evaluating() if forward_only else nullcontext()

    def _not_captured_because(self, batch: MicroBatch) -> str | None:
        """Return the reason why a micro batch cannot be captured, with the same text for all of its kind, or None."""
        stacked = self._stacked
        # The number of tokens does not depend on the kind.
        tokens = self._shape_of(batch, "forward", entropy=False).tokens
        if tokens > self._settings.max_tokens:
            return f"micro batches above batching.cuda_graphs.max_tokens={self._settings.max_tokens} tokens"
        if tokens > self._largest:
            return "micro batches of sizes at which captures ran out of memory"
        if batch.candidate_ids is not None:
            return "micro batches with candidates of a teacher"
        if batch.teacher_states is not None:
            return "micro batches with hidden states of a teacher"
        if batch.allowed is not None or batch.temperature != 1:
            return "micro batches of a policy with a temperature or a sampling mask"
        if batch.segments is not None and batch.segments.keys is not None:
            return "adapters with dropout"
        mixed = stacked is not None and len(stacked.adapters) > 1
        if mixed and self._device.type == "cuda" and kernel_of(self._device) is None:
            return "several adapters, on a device without a grouped product"
        return None

    def _shape_of(self, batch: MicroBatch, kind: StepKind, *, entropy: bool) -> StepShape:
        stacked = self._stacked
        adapters, rank = (0, 0) if stacked is None else (len(stacked.adapters), stacked.rank)
        rows = 0 if batch.packed is not None else len(batch.input_ids)
        return step_shape(kind, batch.padded_lengths, rows=rows, adapters=adapters, rank=rank, entropy=entropy)

    @property
    def _stacked(self) -> StackedAdapters | None:
        return None if self._adapters is None else self._adapters.layers.stacked

    def step(self, batch: MicroBatch, kind: StepKind, *, entropy: bool = False) -> CapturedStep:
        """Return the step for a micro batch, with its tokens loaded."""
        shape = self._shape_of(batch, kind, entropy=entropy)
        step = self._steps.get(shape)
        if step is None:
            # Least recently used first.
            while len(self._steps) >= self._settings.max_count:
                self._drop(next(iter(self._steps)))
            step = CapturedStep(
                shape, self._stacked, self._functions, self._counts, self._retry_without_captures, self._device
            )
            self._steps[shape] = step
        self._steps.move_to_end(shape)
        assert step.stacked is self._stacked, "captured work would read the factors of other adapters"
        step.static.load(batch)
        return step

    def _drop(self, shape: StepShape) -> None:
        step = self._steps.pop(shape)
        if step.captured:
            self._capture.wait()
            self._counts.dropped += 1

    def _drop_steps_of(self, stacked: StackedAdapters) -> None:
        """Drop the captured work that reads a stack, before the stack is freed."""
        for shape in [shape for shape, step in self._steps.items() if step.stacked is stacked]:
            self._drop(shape)


class _GraphedOutput:
    """Output of one micro batch, computed on demand; see :class:`megascend.engines.base.Output`."""

    fuses_loss = True  # fp16 is refused
    prediction = None

    def __init__(self, steps: GraphedSteps, batch: MicroBatch, forward_only: bool) -> None:
        self._steps, self._batch, self._forward_only = steps, batch, forward_only
        self._count = len(batch.targets)
        self._hidden: Tensor | None = None

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        """Compute the sum, and accumulate its gradients before returning; the result requires none."""
        step = self._steps.step(self._batch, "cross_entropy")
        write(step.static.coefficients, coefficients * loss_grad)
        (logprobs,) = step.forward()
        # A copy: the next micro batch overwrites the static output.
        copy = logprobs[: self._count].clone()
        # where, not a product: at weight 0 a log-probability of -inf must not turn the sum into NaN.
        return -torch.where(coefficients != 0, copy * coefficients, 0.0).sum(), copy

    def logprobs(self, entropy: bool, candidates: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert candidates is None, "micro batches with candidates are not captured"
        step = self._steps.step(self._batch, "forward" if self._forward_only else "logprobs", entropy=entropy)
        hidden, *static_outputs = step.forward()
        self._hidden = hidden
        # Copies: the next micro batch overwrites the static outputs.
        outputs = [output[: self._count].clone() for output in static_outputs]
        if not self._forward_only:
            outputs = list(_Differentiable.apply(self._steps._root, step, *outputs))
        return outputs[0], outputs[1] if entropy else None, None

    def logits(self, rows: Tensor | None = None) -> Tensor:
        return self._output().logits(rows)

    def logit_factors(self) -> tuple[Tensor, Tensor, float | None]:
        return self._output().logit_factors()

    def divergence(self, divergence: TeacherDivergence, states: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("micro batches with hidden states of a teacher are not captured")

    def _output(self) -> PlainOutput:
        """Return the output of the last hidden states [1, n, h], which the next micro batch overwrites."""
        if self._hidden is None:
            (self._hidden,) = self._steps.step(self._batch, "hidden").forward()
        hidden = self._hidden.flatten(0, 1)[: self._count].unsqueeze(0)
        return self._steps._head.output(hidden, self._batch.targets)


class _Differentiable(torch.autograd.Function):
    """Autograd node of a step's log-probabilities and entropies; its backward pass runs the step's."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, step: CapturedStep, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        static = ctx.step.static
        # The two possible outputs in order; without entropies there is one gradient.
        for coefficients, grad in zip((static.coefficients, static.entropy_coefficients), grads, strict=False):
            if grad is not None:
                write(coefficients, grad)
            else:
                coefficients.zero_()
        ctx.step.backward()
        return (None, None, *[None for _ in grads])


@contextlib.contextmanager
def without_rotary_cache(model: Any) -> Iterator[None]:
    """Compute rotary tables within the context instead of taking them from Megatron's cache."""
    rotary = getattr(model, "rotary_pos_emb", None)
    # Megatron decorates forward with lru_cache(maxsize=32), so all rotary embeddings share one cache. A captured step that
    # read a cached table would read freed memory after its eviction.
    clear = getattr(getattr(type(rotary), "forward", None), "cache_clear", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()
