"""Programs of the ranks of two tests of optimizers, for engines that need a process without Megatron.

python optimizer_ranks.py JOB RESULT
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import megascend
from megascend.engines.common.checkpoints import engine_state
from megascend.errors import MegascendError
from megascend.testing import run_distributed
from megascend.testing.parity import causal_samples, token_lists
from megascend.training.checkpoint.hf_slices import held_weights
from weightwire.slices import index_of


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


MAIN = "optimizer.state.param."


def mains(
    checkpoint: str, engine: str, world_size: int, steps: int = 0, by_weight: bool = True, **options: Any
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the main parameters after some steps, and the exported weights.

    Args:
        by_weight: main parameters by weights of the checkpoint, NaN where no rank has them; else by tensors of the engine.
    """

    def on_rank() -> dict[str, dict[str, torch.Tensor]]:
        settings: dict[str, Any] = {"platform": "cpu", "timeout_s": 60, "self_check": False}
        settings["batching"] = megascend.Batching(micro_batch_tokens=64)
        with megascend.make_backend(engine, model=checkpoint, **settings | options) as backend:
            for _ in range(steps):
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
            core = backend.engine
            state = engine_state(core, loading=True)
            state = {name: value for name, value in state.items() if hasattr(value, "slices")}
            # fp32 parameters are their own main parameters; of others a rank may have no part. Two names are buffers.
            tensors = {
                name: state.get(f"{MAIN}{name}", value)
                for name, value in state.items()
                if "optimizer." not in name
                and not name.endswith(("correction_bias", "layer_scalar"))
                and (f"{MAIN}{name}" in state or value.dtype == torch.float32)
            }
            values: dict[str, torch.Tensor] = {}
            if by_weight:
                for name, offsets, part in held_weights(tensors, core.hf_slices()):
                    shape = core.info.tensors[name].shape
                    whole = values.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
                    whole[index_of(offsets, part.shape)] = part.double().cpu()
            else:
                for name, tensor in tensors.items():
                    values |= {f"{name} at {offsets}": part.double().cpu() for offsets, part in tensor.slices}
            exports = {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}
            return {"mains": values, "exports": exports}

    ranks = run_distributed(on_rank, world_size, init=False, timeout_s=180)
    merged: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, part in rank["mains"].items():
            merged[name] = torch.where(part.isnan(), merged.get(name, part), part)
    return {"mains": merged, "exports": ranks[0]["exports"]}


if __name__ == "__main__":
    jobs = torch.load(sys.argv[1], weights_only=False)
    torch.save([globals()[name](*arguments, **options) for name, arguments, options in jobs], sys.argv[2])
