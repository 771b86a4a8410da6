"""Programs of the FSDP engine's ranks with experts for tests. A script like ranks.py, in the same folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from ranks import do_jobs, make, not_finite, on_ranks, smallest_margin, trajectory  # noqa: F401 - jobs

from megascend import Adapters, Moe, Parallel
from megascend.errors import MegascendError
from megascend.testing.parity import causal_samples, token_lists


def balanced(
    checkpoint: str, world_size: int, lengths: tuple[int, ...], steps: int, **options: Any
) -> tuple[list[float], list[float], list[list[int]]]:
    """Return losses and norms under an auxiliary loss, and the samples of each micro batch of all ranks."""

    def on_rank() -> Any:
        with make(checkpoint, **options) as backend:
            global_batch = causal_samples(token_lists(lengths=lengths))
            number = {id(sample): index for index, sample in enumerate(global_batch)}
            shard = backend.shard(global_batch)
            members: list[list[int]] = []
            run = backend.engine.run

            def watched(batches: Any, *args: Any, **kwargs: Any) -> Any:
                members[:] = [
                    [number[id(shard[member])] for member in batch.members] for batch in batches if not batch.dummy
                ]
                return run(batches, *args, **kwargs)

            figures = []
            with patch.object(backend.engine, "run", watched):
                for _ in range(steps):
                    figures.append((backend.forward_backward(shard).loss, backend.optimizer_step().grad_norm))
            return figures, members if backend.groups.coordinates.context == 0 else []

    ranks = on_ranks(on_rank, world_size)
    losses, norms = (list(values) for values in zip(*ranks[0][0], strict=True))
    return losses, norms, [group for _, members in ranks for group in members]


def wrong_norms(checkpoint: str) -> dict[str, Any]:
    """Return norms of one step on EP2 x FSDP2: the engine's, without the factor of the experts' gradients, of one mesh only, and
    torch's own.
    """

    def on_rank() -> dict[str, Any]:
        norms: dict[str, Any] = {}
        with make(checkpoint, parallel=Parallel(expert=2)) as backend:
            samples = backend.shard(causal_samples(token_lists()))
            parameters = list(backend.engine.model.parameters())  # type: ignore[attr-defined]
            backend.forward_backward(samples)
            try:
                norms["torch"] = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
            except RuntimeError as error:
                norms["torch"] = str(error)
            sharded = [p.grad for p in parameters if p.grad is not None and p.device_mesh.size() == 4]
            norms["without experts"] = float(torch.nn.utils.get_total_norm(sharded).full_tensor())  # type: ignore[attr-defined]
            norms["right"] = backend.optimizer_step().grad_norm
        with make(checkpoint, parallel=Parallel(expert=2)) as backend:
            optimizer: Any = backend.engine.optimizer  # type: ignore[attr-defined]
            optimizer._shards = [replace(shard, divided=1) for shard in optimizer._shards]
            backend.forward_backward(backend.shard(causal_samples(token_lists())))
            norms["unscaled"] = backend.optimizer_step().grad_norm
        return norms

    ranks = on_ranks(on_rank, 4)
    return next(rank for rank in ranks if rank == ranks[0])


def refused(experts: str, dense: str) -> dict[str, str]:
    """Return the error message for each setting that does not fit a model."""
    balance = Moe(aux_loss="transformers", aux_loss_coefficient=0.1)
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "no experts": (dense, {"parallel": Parallel(expert=2)}),
        "no such loss": (dense, {"moe": balance}),
        "moe.experts='grouped'": (experts, {"moe": Moe(experts="grouped")}),
        "others' samples": (experts, {"moe": balance, "adapters": Adapters()}),
    }

    def on_rank(checkpoint: str, options: dict[str, Any]) -> str:
        try:
            make(checkpoint, **options).close()
        except MegascendError as error:
            return str(error)
        return "it was not refused"

    return {words: on_ranks(on_rank, 2, *arguments)[0] for words, arguments in settings.items()}


if __name__ == "__main__":
    do_jobs(globals())
