"""A life of several adapters, step by step, to run with captured steps and without: the figures must be the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from megascend.batch.sample import Sample
from megascend.config import Adam, Lora, Schedule

if TYPE_CHECKING:
    from megascend.backend import Backend

T = TypeVar("T")

ROUNDS = 4
"""The first of a shape runs as usual, the second is captured, the others are replayed."""


def gradients_of(backend: Backend) -> list[Tensor]:
    """What the work of the present call adds gradients to."""
    stacked = backend.engine.adapters.layers.stacked  # type: ignore[reportAttributeAccessIssue]
    return [] if stacked is None else [of for stack in stacked.stacks for of in (stack.a_grads, stack.b_grads)]


class CaptureAgain:
    """Stands in for CUDA graphs where there are none: runs the work again, and writes its results to the same memory.

    As with graphs, capturing leaves no trace. A backward pass by itself is not captured, since its forward pass would have to be
    the same object each time.

    Args:
        protected: the gradients that work adds to.
    """

    def __init__(self, protected: Callable[[], Sequence[Tensor]]) -> None:
        self._protected = protected
        self.bytes = 0

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See :class:`megascend.engines.megatron.capture.Capture`."""
        before = [tensor.clone() for tensor in self._protected()]
        found: Any = work()
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in found):
            raise RuntimeError("work whose backward pass comes later is not captured here")
        for tensor, value in zip(self._protected(), before, strict=True):
            tensor.copy_(value)

        def replay() -> None:
            for tensor, value in zip(found, work(), strict=True):  # type: ignore[reportArgumentType]
                tensor.copy_(value)

        return replay, found

    def wait(self) -> None:
        """Nothing runs by itself here."""


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


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """For every figure the difference relative to the expected one (Euclidean norms)."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-12))
        for name, value in expected.items()
    }
