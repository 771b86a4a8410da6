"""Train with the engine of tests/outside/bigram: ``python bigram_ranks.py CHECKPOINT FOLDER WORLD_SIZE``.

A program, so that ranks are forked from a process without any other engine. The ranks' results go to FOLDER/ranks.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend import Adam, Backend, Batching, Sample, backends
from megascend.errors import ConfigError
from megascend.testing import run_distributed

OUTSIDE = Path(__file__).parents[1] / "outside"
STEPS, LR = 4, 0.02
TOKENS = [[5, 9, 7, 5, 9], [9, 7, 7, 5, 3, 9, 7], [1, 2, 3]]


def main(checkpoint: Path, folder: Path, world_size: int) -> None:
    def make(**options: Any) -> Backend:
        adam = Adam(lr=LR, weight_decay=0.0, max_grad_norm=0.0)
        batching = Batching(micro_batch_tokens=12)
        return backends.make_backend(
            "bigram", model=checkpoint, optimizer=adam, batching=batching, platform="cpu", timeout_s=60, **options
        )

    def on_rank() -> Any:
        sys.path.insert(0, str(OUTSIDE))
        import bigram  # noqa: F401

        samples = [Sample.causal(ids) for ids in TOKENS]
        losses, norms = [], []
        with make() as first:
            shard = first.shard(samples)
            for _ in range(STEPS // 2):
                losses.append(first.forward_backward(shard).loss)
                norms.append(first.optimizer_step().grad_norm)
            first.save(folder / "saved", progress={"at": STEPS // 2}, wait=True)
        with make(seed=7) as second:
            assert second.load(folder / "saved") == {"at": STEPS // 2}
            for _ in range(STEPS // 2):
                losses.append(second.forward_backward(shard).loss)
                norms.append(second.optimizer_step().grad_norm)
            second.export_hf(folder / "out")
            with pytest.raises(ConfigError, match="engine 'bigram' has no setting adapters, parallel"):
                make(adapters=None, parallel=None)
            trained = {name: tensor.clone() for name, tensor in second.named_weights()}
            kinds = (second.engine.kind, second.world_size, second.platform.name)
        foreign = sorted(name for name in sys.modules if name.split(".")[0] in ("megatron", "mcore_bridge"))
        return losses, norms, kinds, trained, foreign

    torch.save(run_distributed(on_rank, world_size, init=False), folder / "ranks.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
