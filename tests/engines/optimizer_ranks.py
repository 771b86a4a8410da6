"""Programs of the ranks of test_optimizer_layouts.py, for engines that need a process without Megatron.

python optimizer_ranks.py JOB RESULT
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import megascend
from megascend.errors import MegascendError
from megascend.testing import run_distributed
from megascend.testing.parity import causal_samples, token_lists


def train(
    checkpoint: str,
    engine: str,
    world_size: int,
    optimizer: dict[str, Any],
    steps: int,
    save: tuple[int, str] | None = None,
    load: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return losses, norms and, at the end, weights of rank 0; all ranks report equal losses. An error as its message.

    Args:
        save: (number of steps before it, directory).
        load: directory to begin from.
    """

    def on_rank() -> dict[str, Any]:
        settings: dict[str, Any] = {"precision": "fp32", "platform": "cpu", "timeout_s": 60, "self_check": False}
        settings["batching"] = megascend.Batching(micro_batch_tokens=64)
        results: dict[str, Any] = {"losses": [], "norms": []}
        try:
            arguments = settings | options | {"optimizer": megascend.Adam(**optimizer)}
            with megascend.make_backend(engine, model=checkpoint, **arguments) as backend:
                if load is not None:
                    backend.load(load)
                samples = backend.shard(causal_samples(token_lists()))
                for step in range(steps):
                    if save is not None and step == save[0]:
                        backend.save(save[1], wait=True)
                    results["losses"].append(backend.forward_backward(samples).loss)
                    results["norms"].append(backend.optimizer_step().grad_norm)
                results["weights"] = {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}
        except MegascendError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return results

    ranks = run_distributed(on_rank, world_size, init=False, timeout_s=180)
    assert all(rank.get("losses") == ranks[0].get("losses") for rank in ranks)
    assert all(("error" in rank) == ("error" in ranks[0]) for rank in ranks)
    return ranks[0]


if __name__ == "__main__":
    jobs = torch.load(sys.argv[1], weights_only=False)
    torch.save([globals()[name](*arguments, **options) for name, arguments, options in jobs], sys.argv[2])
