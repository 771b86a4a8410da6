"""A part of a run, on a rank of any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megascend.config import Lora
from megascend.testing.parity import causal_samples, token_lists


def run_leg(
    make: Callable[[], Any],
    steps: int,
    load: str | None = None,
    save: tuple[int, str] | None = None,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Losses and norms of some steps.

    Args:
        load: a checkpoint to begin with.
        save: (after how many steps, where to).
        adapter: what is trained; weights are those with it merged.

    Returns:
        ``losses``, ``norms``; ``saved``, ``loaded``, ``weights``: the weights there, by Hugging Face's names, and at the end; on
        rank 0. ``before``: those before each step, of a run without an adapter.
    """
    found: dict[str, Any] = {"losses": [], "norms": [], "before": [], "saved": {}, "loaded": {}}
    with make() as backend:
        if load is not None:
            found["progress"] = backend.load(load)
            found["loaded"] = weights_of(backend, adapter)
        elif adapter is not None:
            backend.add_adapter(adapter, Lora(rank=4, alpha=8))
        samples = backend.shard(causal_samples(token_lists()))
        for step in range(steps):
            if save is not None and step == save[0]:
                backend.save(save[1], progress={"at": step}, wait=True)
                found["saved"] = weights_of(backend, adapter)
            if adapter is None:
                found["before"].append(weights_of(backend, adapter))
            found["losses"].append(backend.forward_backward(samples, adapter=adapter).loss)
            found["norms"].append(backend.optimizer_step().grad_norm)
        found["weights"] = weights_of(backend, adapter)
        found["steps"] = backend.step_count
    return found


def weights_of(backend: Any, adapter: str | None) -> dict[str, Tensor]:
    """On rank 0, copies on the CPU."""
    return {name: tensor.cpu().clone() for name, tensor in backend.named_weights(adapter, receivers="main")}
