"""Training programs to run with captured steps and without: all figures must be equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megascend.changes import patched
from megascend.config import Adam, Lora, Schedule
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from megascend.backend import Backend

T = TypeVar("T")

ROUNDS = 4
"""The first round of a shape runs eagerly, the second is captured, the others are replayed."""


def gradients_of(backend: Backend) -> list[Tensor]:
    """Return the gradient tensors that the current step accumulates into."""
    if backend.engine.adapters is None:  # type: ignore[reportAttributeAccessIssue]
        chunks = backend.engine.bare_chunks  # type: ignore[reportAttributeAccessIssue]
        return [parameter.main_grad for chunk in chunks for parameter in chunk.parameters()]
    stacked = backend.engine.adapters.layers.stacked  # type: ignore[reportAttributeAccessIssue]
    return [] if stacked is None else [grads for stack in stacked.stacks for grads in (stack.a_grads, stack.b_grads)]


class CaptureOnCpu:
    """Stand-in for CUDA graphs on a CPU.

    Operations are captured with their scalar arguments and memory; a replay runs them again on that memory and calls nothing
    else. As with graphs, capturing has no side effects, and work that reads tensor values on the host cannot be captured. On a
    CPU this concerns several samples and several adapters, whose products are computed one by one. Unless ``strict``, such work
    is called again instead, and its results are copied to the same memory: possible only if a backward pass is part of the work
    or none follows.

    Args:
        protected: returns the gradients that the work accumulates into.
    """

    def __init__(self, protected: Callable[[], Sequence[Tensor]], *, strict: bool = False) -> None:
        self._protected, self._strict = protected, strict
        self.bytes = 0

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See :class:`megascend.engines.megatron.captured_step.CudaCapture`."""
        before = [tensor.clone() for tensor in self._protected()]
        operations = _Operations()
        try:
            with (
                operations,
                patched(Tensor, "tolist", _refuse, "values are not read on the host while work is captured"),
            ):
                outputs: Any = work()
            return operations.replay, outputs
        except HostReadError:
            if self._strict:
                raise
        finally:
            for tensor, value in zip(self._protected(), before, strict=True):
                tensor.copy_(value)
        outputs = work()
        for tensor, value in zip(self._protected(), before, strict=True):
            tensor.copy_(value)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in outputs):
            raise HostReadError("work whose backward pass runs later cannot be called again")

        def again() -> None:
            for tensor, value in zip(outputs, work(), strict=True):  # type: ignore[reportArgumentType]
                tensor.copy_(value)

        return again, outputs

    def stream(self) -> AbstractContextManager[None]:
        """Return a null context: everything runs in order on a CPU."""
        return nullcontext()

    def wait(self) -> None:
        """Do nothing: a CPU runs nothing asynchronously."""

    def free(self) -> None:
        """Do nothing: Python frees the memory."""


class HostReadError(RuntimeError):
    """Captured work read a tensor value on the host."""


def _refuse(tensor: Tensor) -> Any:
    raise HostReadError(f"a tensor of shape {tuple(tensor.shape)} is read on the host")


def _alias(value: Any) -> Any:
    """Return a view of a tensor's current memory: upstream later replaces some tensors' memory (``tensor.data = ...``)."""
    return torch.ops.aten.alias.default(value) if isinstance(value, Tensor) else value


class _Operations(TorchDispatchMode):
    """Dispatch mode that records every operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        before = tree_map(_alias, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, *before, tree_map(_alias, result)))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operations again on the recorded memory."""
        for func, args, kwargs, result in self._calls:
            input_storages = {
                leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            }
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in input_storages:
                    old.copy_(new)


def life(backend: Backend, lengths: Sequence[int] = (40, 9, 33, 70, 12, 5)) -> dict[str, Tensor]:
    """Add, train (alone and mixed) and remove adapters; return every figure and value by name.

    Args:
        lengths: of all samples together; micro batches are up to the backend.
    """
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    samples = [Sample.causal(torch.randint(0, backend.vocab_size, (n + 1,), generator=generator)) for n in lengths]

    def of(*names: str) -> list[Sample]:
        return [replace(sample, adapter=names[index % len(names)]) for index, sample in enumerate(samples)]

    def learn(name: str, batch: Sequence[Sample], loss: str = "cross_entropy") -> None:
        for step in range(ROUNDS):
            result = backend.forward_backward(backend.shard(batch), loss)
            backend.forward_backward(backend.shard([*batch, *batch][:2]), loss)  # gradients of two calls add up
            outcome = backend.optimizer_step()
            for adapter, step_result in outcome.adapters.items():
                figures = [step_result.grad_norm, step_result.lr]
                if (loss_result := result.adapters.get(adapter)) is not None:
                    figures += [loss_result.loss, *loss_result.metrics.values()]
                tensors[f"{name} {step} {adapter}"] = torch.tensor(figures, dtype=torch.float64)

    def look(name: str, batch: Sequence[Sample], **options: Any) -> None:
        for step in range(3):
            result = backend.forward(backend.shard([*batch, *batch]), entropy=step == 2, **options)
            tensors[f"{name} {step}"] = torch.cat(result.logprobs + (result.entropy or []))

    backend.add_adapter("a", Lora(rank=4))
    learn("alone", of("a")[:1])
    schedule = Schedule(kind="linear", warmup_steps=2, total_steps=20)
    backend.add_adapter("b", Lora(rank=12, optimizer=Adam(lr=3e-5, eps=1e-6), schedule=schedule))
    backend.add_adapter("c", Lora(rank=3, targets=("q_proj", "down_proj")))
    learn("mixed", of("a", "b", "c"))
    learn("two", of("c", "a"))
    look("mixed", of("a", "b", "c"))
    look("reference", of("a", "b", "c"), reference=True)
    for step in range(3):
        tensors[f"next {step}"] = torch.cat(backend.next_token_logits(backend.shard([*of("b", "a"), *of("a")])))
    backend.remove_adapter("b")
    backend.add_adapter("d", Lora(rank=10, rslora=True))
    learn("another", of("d", "c", "a"))
    policy = [
        replace(
            sample, old_logprobs=torch.full(sample.weights.shape, -4.5), advantages=torch.ones(sample.weights.shape)
        )
        for sample in of("a", "d")
    ]
    learn("policy", policy, "ppo")
    backend.forward_backward(backend.shard(of("a", "d")))
    backend.discard_gradients(["a", "d"])
    learn("alone again", of("a")[:1])
    look("alone", of("d")[:1])
    tensors["logits"] = torch.cat(backend.forward(of("a")[:2], logits=True).logits or [])
    for name in ("a", "c", "d"):
        weights = dict(backend.named_weights(name, adapter_only=True))
        tensors[f"values of {name}"] = torch.cat([tensor.flatten() for tensor in weights.values()])
    return tensors


LAYOUTS = {"rows": (128,) * 6, "one": (300,), "packed": (100, 60, 128, 7, 33), "row": (384,), "odd rows": (90,) * 4}
"""Lengths of samples that a backend whose micro batches hold 384 tokens arranges in every possible layout."""


def life_of_a_model(backend: Backend, layouts: Mapping[str, Sequence[int]] = LAYOUTS) -> dict[str, Tensor]:
    """Train a model with new sample weights and learning rates in every step; return every figure and value by name."""
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(4)

    def samples(*lengths: int) -> list[Sample]:
        batch = [Sample.causal(torch.randint(0, backend.vocab_size, (n + 1,), generator=generator)) for n in lengths]
        for number, sample in enumerate(batch):
            sample.weights = sample.weights * (1 + number + len(tensors))
            sample.old_logprobs = torch.full(sample.weights.shape, -5.0)
            sample.advantages = torch.linspace(-1, 1, len(sample.weights))
        return batch

    for step in range(ROUNDS):
        for kind, lengths in layouts.items():
            for loss in ("cross_entropy", "ppo"):
                batch = samples(*lengths)
                result = backend.forward_backward(backend.shard(batch), loss)
                backend.forward_backward(backend.shard(batch[::-1]), loss)  # gradients of two calls add up
                outcome = backend.optimizer_step(lr=1e-4 / (1 + len(tensors)))
                figures = [outcome.grad_norm, outcome.lr, result.loss, *result.metrics.values()]
                tensors[f"{kind} {loss} {step}"] = torch.tensor(figures, dtype=torch.float64)
            inspected = backend.forward(backend.shard(samples(*lengths)), entropy=True)
            local_outputs = [*inspected.logprobs, *(inspected.entropy or [])]
            tensors[f"{kind} seen {step}"] = torch.cat([torch.zeros(0), *local_outputs])
    tensors["logits"] = torch.cat(backend.forward(samples(128, 128, 50), logits=True).logits or [])
    tensors["next"] = torch.cat(backend.next_token_logits(backend.shard(samples(128, 128, 40))))
    tensors |= {f"values of {name}": value.clone() for name, value in backend.named_weights()}
    return tensors


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return every figure's difference relative to the expected one (Euclidean norms)."""
    assert actual.keys() == expected.keys()
    return {
        name: float((actual[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-12))
        for name, value in expected.items()
    }
