"""What ranks of the FSDP engine do with experts for a test. A script like ranks.py, beside which it lies."""

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
    """Losses and norms under an auxiliary loss, and the samples of each micro batch of all ranks."""

    def on_rank() -> Any:
        with make(checkpoint, **options) as backend:
            everything = causal_samples(token_lists(lengths=lengths))
            number = {id(sample): index for index, sample in enumerate(everything)}
            mine = backend.shard(everything)
            members: list[list[int]] = []
            run = backend.engine.run

            def watched(batches: Any, *args: Any, **kwargs: Any) -> Any:
                members[:] = [
                    [number[id(mine[place])] for place in batch.members] for batch in batches if not batch.dummy
                ]
                return run(batches, *args, **kwargs)

            figures = []
            with patch.object(backend.engine, "run", watched):
                for _ in range(steps):
                    figures.append((backend.forward_backward(mine).loss, backend.optimizer_step().grad_norm))
            return figures, members if backend.groups.coordinates.context == 0 else []

    ranks = on_ranks(on_rank, world_size)
    losses, norms = (list(values) for values in zip(*ranks[0][0], strict=True))
    return losses, norms, [group for _, members in ranks for group in members]


def wrong_norms(checkpoint: str) -> dict[str, Any]:
    """The norm of one step on EP2 x FSDP2: as it is, without the factor of the experts' gradients, of one mesh alone, and what
    torch's own function says."""

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
            of_all_ranks = [p.grad for p in parameters if p.grad is not None and p.device_mesh.size() == 4]
            norms["without experts"] = float(torch.nn.utils.get_total_norm(of_all_ranks).full_tensor())  # type: ignore[attr-defined]
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
    """Of each setting that does not go with a model: the message."""
    balance = Moe(aux_loss="transformers", aux_loss_coefficient=0.1)
    asked: dict[str, tuple[str, dict[str, Any]]] = {
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

    return {what: on_ranks(on_rank, 2, *arguments)[0] for what, arguments in asked.items()}


if __name__ == "__main__":
    do_jobs(globals())
