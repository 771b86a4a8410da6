"""One leg of a run, on a rank of any engine."""

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
    """Train some steps, optionally from a checkpoint, and return losses and norms.

    Args:
        load: a checkpoint to begin with.
        save: (number of steps, path).
        adapter: the trained adapter; weights are those with it merged.

    Returns:
        ``losses``, ``norms``; on rank 0 weights by Hugging Face's names: ``saved`` at the save, ``loaded`` after the load,
        ``weights`` at the end.
    """
    results: dict[str, Any] = {"losses": [], "norms": [], "saved": {}, "loaded": {}}
    with make() as backend:
        if load is not None:
            results["progress"] = backend.load(load)
            results["loaded"] = weights_of(backend, adapter)
        elif adapter is not None:
            backend.add_adapter(adapter, Lora(rank=4, alpha=8))
        samples = backend.shard(causal_samples(token_lists()))
        for step in range(steps):
            if save is not None and step == save[0]:
                backend.save(save[1], progress={"at": step}, wait=True)
                results["saved"] = weights_of(backend, adapter)
            results["losses"].append(backend.forward_backward(samples, adapter=adapter).loss)
            results["norms"].append(backend.optimizer_step().grad_norm)
        results["weights"] = weights_of(backend, adapter)
        results["steps"] = backend.step_count
    return results


def weights_of(backend: Any, adapter: str | None) -> dict[str, Tensor]:
    """Return copies of all weights on the CPU, on rank 0."""
    return {name: tensor.cpu().clone() for name, tensor in backend.named_weights(adapter, receivers="main")}
