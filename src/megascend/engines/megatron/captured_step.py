"""Step of micro batches of one shape: run eagerly the first time, then captured as CUDA graphs, then replayed.

Captured kernels read a micro batch by address: its tensors are static, and every call copies its data into them.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megascend.engines.megatron.output_head import OutputHead
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.batch.step_shapes import StepShape, adapter_ends, boundaries
from megascend.training.kernels.host_copy import to_device
from megascend.training.lora.grouped import Segments
from megascend.training.lora.segments import TokenSegments, tokens_per_adapter
from megascend.training.lora.stacked_adapters import StackedAdapters

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CudaCapture:
    """Capturer of work as CUDA graphs in one memory pool: no two of them run at the same time, so they may share memory.

    The pool is as large as the largest graph needs, not as all together. A graph's results are valid until another one runs.

    Args:
        own_stream: run all work on one stream that is not the default one. Autograd's AccumulateGrad nodes, which outlive a step
            under Megatron's DDP, belong to the stream on which they were created, and nodes of the default stream cannot be
            captured.
    """

    def __init__(self, *, own_stream: bool = False) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # those of the pool
        self._stream = torch.cuda.Stream() if own_stream else None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Activate the stream for captured work; the current stream waits for it before and after the context."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream()
        # Work queued before must be seen here, and the work of this block outside after it.
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Call ``work`` once, and record its device operations without executing them. Waits for the device.

        The work has run before, so that no lazy initialisation is captured.

        Returns:
            A function that executes the recorded operations; and the result of ``work``, tensors that each execution overwrites.
        """
        gc.collect()  # torch.cuda.graph may do so, which would free the last graph after it has been counted
        if not self._graphs:
            # A pool whose last graph was destroyed accepts no further graph: torch fails with an internal assertion.
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # torch caches cuBLAS's workspace per stream. An older one is not in the graph's pool and could be freed while the graph
        # still writes to it; one allocated from the pool would stay cached beyond the life of all graphs.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # thread_local: other threads (checkpoints, NCCL's watchdog) may call CUDA during the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = work()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        self._graphs.add(graph)
        return graph.replay, outputs

    def wait(self) -> None:
        """Wait for the device: captured work must not be dropped while it runs."""
        torch.cuda.synchronize()

    def free(self) -> None:
        """Free the device memory of captured work that has been dropped."""
        torch.cuda.empty_cache()

    @property
    def bytes(self) -> int:
        """Bytes held by the graph memory pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(
            segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )


class StaticBatch:
    """Static input tensors of one shape.

    Attributes:
        batch: the model's input: token ids, positions, segments of attention and of adapters.
        coefficients, entropy_coefficients: float32 [tokens], factors of each token's log-probability (or its negative, for cross
            entropy) and of its entropy in the differentiated sum; 0 at padding.
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

        empty = indices(0)  # for fields that only the loss needs, which is computed on the original micro batch
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
            sample=empty,
            token_index=empty,
            pairs=indices(0, 2),
            adapter_index=[],
            positions=[],
            padding=empty,
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
        """Build the adapter segments; with several adapters their ends are only in device memory."""
        if not self._shape.adapters:
            return None
        segments = Segments(self._ends) if self._shape.adapters > 1 else None
        return TokenSegments(None if segments else 0, segments, segments, adapter_index)

    def load(self, batch: MicroBatch) -> None:
        """Copy the tokens of ``batch`` into the static tensors. Padding is token 0 at position 0."""
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
            # Computed on the device from the ends: one small copy in place of an index per token.
            self._ends.copy_(to_device(torch.tensor(ends, dtype=torch.int32), self._device))
            self.batch.segments.adapter_index.copy_(torch.searchsorted(self._ends, self._tokens, right=True))


def write(static: Tensor, values: Tensor) -> None:
    """Write ``values`` to the start of ``static`` and 0 to the rest; shapes are flattened."""
    flat, count = static.view(-1), values.numel()
    flat[:count].copy_(values.reshape(-1), non_blocking=True)
    # Coefficients that an earlier, longer micro batch has left here would train the padding of this one.
    flat[count:].zero_()


@dataclass(frozen=True)
class StepFunctions:
    """Functions that a step consists of, and the capturer.

    Attributes:
        hidden_states: the model on a micro batch, up to the input of ``head``.
        mode: context for the model, given True if no backward pass follows.
        uncached: context in which captured work reads nothing from Megatron's caches, whose memory may be freed later.
        drop_unfinished: drops gradients that a failed backward pass has left in ``grad``.
    """

    hidden_states: Callable[[MicroBatch], Tensor]
    head: OutputHead
    mode: Callable[[bool], AbstractContextManager[None]]
    uncached: Callable[[], AbstractContextManager[None]]
    drop_unfinished: Callable[[], None]
    capture: CudaCapture


@dataclass
class StepCounts:
    """Counts of micro batches by outcome; see :class:`megascend.engines.megatron.graphed_steps.GraphReport`."""

    captured: int = 0
    replayed: int = 0
    first: int = 0
    dropped: int = 0
    eager: dict[str, int] = field(default_factory=dict)

    def note_eager(self, problem: str) -> None:
        """Count a micro batch that runs without a CUDA graph; log the first one for each reason."""
        if problem not in self.eager:
            logger.warning("not in a CUDA graph: %s", problem)
        self.eager[problem] = self.eager.get(problem, 0) + 1


class RunWithRoom(Protocol):
    """Function that calls work, and once more after dropping all captures if memory runs out."""

    def __call__(self, work: Callable[[], tuple[Tensor, ...]], /) -> tuple[Tensor, ...]: ...


class CapturedStep:
    """Step of one shape: its static memory and its work, captured or not yet.

    Attributes:
        static: input tensors.
        stacked: the adapters that it reads, or None.
        captured: the step is replayed.
    """

    def __init__(
        self,
        shape: StepShape,
        stacked: StackedAdapters | None,
        functions: StepFunctions,
        counts: StepCounts,
        with_room: RunWithRoom,
        device: torch.device,
    ) -> None:
        self._shape, self.stacked = shape, stacked
        self._functions, self._counts, self._with_room = functions, counts, with_room
        self.static = StaticBatch(shape, device)
        self.captured = False
        self._has_run = self._refused = False
        self._replay_forward: Callable[[], None] | None = None
        self._replay_backward: Callable[[], None] | None = None
        self._static_outputs: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[Tensor, ...]:
        """Compute the outputs of the step's kind; they are valid until another micro batch runs.

        For cross entropy: log-probabilities, with gradients already accumulated. Else hidden states, and by kind
        log-probabilities and entropies.
        """
        if self._replay_forward is None and self._has_run and not self._refused:
            self._try_to_capture()
        if self._replay_forward is not None:
            self._counts.replayed += 1
            self._replay_forward()
            return self._static_outputs
        if self._refused:
            self._counts.note_eager(f"micro batches of {self._shape}, which could not be captured")
        else:
            self._counts.first += 1
        self._has_run = True
        # Only the forward pass may be repeated after running out of memory: the backward pass accumulates.
        outputs = self._back(self._with_room(self._forward_outputs))
        if self._shape.kind == "logprobs":
            self._static_outputs = outputs  # with its graph, for the backward pass
        return tuple(output.detach() for output in outputs)

    def backward(self) -> None:
        """Accumulate gradients for the coefficients in ``static``."""
        if self._replay_backward is not None:
            self._replay_backward()
            return
        outputs, self._static_outputs = self._static_outputs, ()
        self._differentiate(outputs)

    def _work(self) -> tuple[Tensor, ...]:
        """Run the captured part: the forward pass, for cross entropy also the backward pass."""
        return self._back(self._forward_outputs())

    def _back(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the backward pass of cross entropy, which accumulates gradients; other kinds pass through."""
        if self._shape.kind != "cross_entropy":
            return outputs
        loss, logprobs = outputs
        loss.backward()
        return (logprobs,)

    def _forward_outputs(self) -> tuple[Tensor, ...]:
        """Run the forward pass; for cross entropy return the loss and log-probabilities."""
        batch = self.static.batch
        with self._functions.mode(self._shape.kind in ("forward", "hidden")):
            hidden = self._functions.hidden_states(batch)
        if self._shape.kind == "hidden":
            return (hidden,)
        output = self._functions.head.output(hidden, batch.targets)
        if self._shape.kind == "cross_entropy":
            # 1.0: the static coefficients already contain the loss's gradient.
            return output.cross_entropy(self.static.coefficients, 1.0)
        logprobs, entropies, _ = output.logprobs(self._shape.entropy)
        return (hidden, logprobs) if entropies is None else (hidden, logprobs, entropies)

    def _differentiate(self, all_outputs: tuple[Tensor, ...]) -> None:
        # The first output is the hidden states: they are kept for logits, and get their gradient through the other two.
        coefficients = (self.static.coefficients, self.static.entropy_coefficients)
        outputs = all_outputs[1:]
        torch.autograd.backward(outputs, coefficients[: len(outputs)])

    def _try_to_capture(self) -> None:
        capture = self._functions.capture
        try:
            with self._functions.uncached():
                # The loss between the two passes is computed outside, on the original micro batch: hence two graphs.
                forward, outputs = capture.capture(self._work)
                backward = None
                if self._shape.kind == "logprobs":
                    backward, _ = capture.capture(lambda: self._differentiate(outputs))
        # torch.OutOfMemoryError is one of these: such a step stays eager.
        except RuntimeError as error:
            logger.warning("%s could not be captured as a CUDA graph: %s", self._shape, error)
            self._functions.drop_unfinished()  # gradients in the capture's memory, which were never computed
            self._refused = True
            return
        self._static_outputs = tuple(output.detach() for output in outputs)  # releases autograd's graph
        self._replay_forward, self._replay_backward, self.captured = forward, backward, True
        self._counts.captured += 1
