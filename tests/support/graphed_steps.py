"""A life of several adapters, step by step, to run with captured steps and without: the figures must be the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megascend.batch.sample import Sample
from megascend.changes import patched
from megascend.config import Adam, Lora, Schedule

if TYPE_CHECKING:
    from megascend.backend import Backend

T = TypeVar("T")

ROUNDS = 4
"""The first of a shape runs as usual, the second is captured, the others are replayed."""


def gradients_of(backend: Backend) -> list[Tensor]:
    """What the work of the present call adds gradients to."""
    if backend.engine.adapters is None:  # type: ignore[reportAttributeAccessIssue]
        chunks = backend.engine.bare_chunks  # type: ignore[reportAttributeAccessIssue]
        return [parameter.main_grad for chunk in chunks for parameter in chunk.parameters()]
    stacked = backend.engine.adapters.layers.stacked  # type: ignore[reportAttributeAccessIssue]
    return [] if stacked is None else [of for stack in stacked.stacks for of in (stack.a_grads, stack.b_grads)]


class CaptureOnCpu:
    """Stands in for CUDA graphs where there are none.

    What is captured are the operations, with the numbers and the memory that they were called with; a replay runs them again on
    that memory and calls nothing else. As with graphs, capturing leaves no trace, and what reads values of a tensor on the host
    cannot be captured. On a CPU that are several samples and several adapters, whose products go one by one. Unless ``strict``,
    their work is called anew instead, and its results written to the same memory: that is possible where a backward pass is part
    of the work, or none follows.

    Args:
        protected: the gradients that work adds to.
    """

    def __init__(self, protected: Callable[[], Sequence[Tensor]], *, strict: bool = False) -> None:
        self._protected, self._strict = protected, strict
        self.bytes = 0

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See :class:`megascend.engines.megatron.captured_step.Capture`."""
        before = [tensor.clone() for tensor in self._protected()]
        operations = _Operations()
        try:
            with (
                operations,
                patched(Tensor, "tolist", _refuse, "values are not read on the host while work is captured"),
            ):
                found: Any = work()
            return operations.replay, found
        except HostReadError:
            if self._strict:
                raise
        finally:
            for tensor, value in zip(self._protected(), before, strict=True):
                tensor.copy_(value)
        found = work()
        for tensor, value in zip(self._protected(), before, strict=True):
            tensor.copy_(value)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in found):
            raise HostReadError("work whose backward pass comes later is not called anew")

        def again() -> None:
            for tensor, value in zip(found, work(), strict=True):  # type: ignore[reportArgumentType]
                tensor.copy_(value)

        return again, found

    def stream(self) -> AbstractContextManager[None]:
        """Everything happens in order here."""
        return nullcontext()

    def wait(self) -> None:
        """Nothing runs by itself here."""

    def free(self) -> None:
        """Python does that."""


class HostReadError(RuntimeError):
    """Work needs a value of a tensor on the host."""


def _refuse(tensor: Tensor) -> Any:
    raise HostReadError(f"a tensor of shape {tuple(tensor.shape)} is read on the host")


def _alias(value: Any) -> Any:
    """The memory that a tensor has now: upstream gives some tensors other memory later (``tensor.data = ...``)."""
    return torch.ops.aten.alias.default(value) if isinstance(value, Tensor) else value


class _Operations(TorchDispatchMode):
    """Keeps every operation that runs, with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        before = tree_map(_alias, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self._kept.append((func, *before, tree_map(_alias, result)))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run all of them on the memory of then."""
        for func, args, kwargs, result in self._kept:
            given = {of.untyped_storage().data_ptr() for of in tree_leaves((args, kwargs)) if isinstance(of, Tensor)}
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


def life(backend: Backend, lengths: Sequence[int] = (40, 9, 33, 70, 12, 5)) -> dict[str, Tensor]:
    """Adapters that come, learn alone and mixed, and go; every figure and value by name.

    Args:
        lengths: of all samples together; micro batches are up to the backend.
    """
    found: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    samples = [Sample.causal(torch.randint(0, backend.vocab_size, (n + 1,), generator=generator)) for n in lengths]

    def of(*names: str) -> list[Sample]:
        return [replace(sample, adapter=names[index % len(names)]) for index, sample in enumerate(samples)]

    def learn(name: str, batch: Sequence[Sample], loss: str = "cross_entropy") -> None:
        for step in range(ROUNDS):
            result = backend.forward_backward(backend.shard(batch), loss)
            backend.forward_backward(backend.shard([*batch, *batch][:2]), loss)  # gradients of two calls add up
            outcome = backend.optimizer_step()
            for adapter, one in outcome.adapters.items():
                of_one = result.adapters.get(adapter)
                figures = [one.grad_norm, one.lr] + ([] if of_one is None else [of_one.loss, *of_one.metrics.values()])
                found[f"{name} {step} {adapter}"] = torch.tensor(figures, dtype=torch.float64)

    def look(name: str, batch: Sequence[Sample], **options: Any) -> None:
        for step in range(3):
            result = backend.forward(backend.shard([*batch, *batch]), entropy=step == 2, **options)
            found[f"{name} {step}"] = torch.cat(result.logprobs + (result.entropy or []))

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
        found[f"next {step}"] = torch.cat(backend.next_token_logits(backend.shard([*of("b", "a"), *of("a")])))
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
    found["logits"] = torch.cat(backend.forward(of("a")[:2], logits=True).logits or [])
    for name in ("a", "c", "d"):
        weights = backend.engine.trainable.named_weights(name, everywhere=True)  # type: ignore[reportAttributeAccessIssue]
        found[f"values of {name}"] = torch.cat([tensor.flatten() for tensor in weights.values()])
    return found


LAYOUTS = {"rows": (128,) * 6, "one": (300,), "packed": (100, 60, 128, 7, 33), "row": (384,), "odd rows": (90,) * 4}
"""Lengths of samples that a backend whose micro batches hold 384 tokens lays out in every way there is."""


def life_of_a_model(backend: Backend, layouts: Mapping[str, Sequence[int]] = LAYOUTS) -> dict[str, Tensor]:
    """A model that learns, from other weights and learning rates in every step; every figure and value by name."""
    found: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(4)

    def samples(*lengths: int) -> list[Sample]:
        made = [Sample.causal(torch.randint(0, backend.vocab_size, (n + 1,), generator=generator)) for n in lengths]
        for number, sample in enumerate(made):
            sample.weights = sample.weights * (1 + number + len(found))
            sample.old_logprobs = torch.full(sample.weights.shape, -5.0)
            sample.advantages = torch.linspace(-1, 1, len(sample.weights))
        return made

    for step in range(ROUNDS):
        for kind, lengths in layouts.items():
            for loss in ("cross_entropy", "ppo"):
                batch = samples(*lengths)
                result = backend.forward_backward(backend.shard(batch), loss)
                backend.forward_backward(backend.shard(batch[::-1]), loss)  # gradients of two calls add up
                outcome = backend.optimizer_step(lr=1e-4 / (1 + len(found)))
                figures = [outcome.grad_norm, outcome.lr, result.loss, *result.metrics.values()]
                found[f"{kind} {loss} {step}"] = torch.tensor(figures, dtype=torch.float64)
            looked = backend.forward(backend.shard(samples(*lengths)), entropy=True)
            of_this_rank = [*looked.logprobs, *(looked.entropy or [])]
            found[f"{kind} seen {step}"] = torch.cat([torch.zeros(0), *of_this_rank])
    found["logits"] = torch.cat(backend.forward(samples(128, 128, 50), logits=True).logits or [])
    found["next"] = torch.cat(backend.next_token_logits(backend.shard(samples(128, 128, 40))))
    found |= {f"values of {name}": value.clone() for name, value in backend.named_weights()}
    return found


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """For every figure the difference relative to the expected one (Euclidean norms)."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-12))
        for name, value in expected.items()
    }
