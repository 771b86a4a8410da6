"""Check sharded pushes of engine fsdp or single: python sharded_push_without_megatron.py ENGINE CHECKPOINT FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "weightwire"))
from engine_process import engines
from worker_slices import exported, slices_are, specs_of, vllm_like

import megascend
import megascend.engines.fsdp.engine  # ranks find them imported
from megascend.testing import run_distributed
from megascend.testing.parity import causal_samples, token_lists


def push(engine: str, checkpoint: str, folder: Path, precision: str) -> None:
    folder.mkdir()
    with engines(folder, "engine", workers=2, needs=vllm_like) as served:

        def on_rank() -> Any:
            settings: dict[str, Any] = {"precision": precision, "optimizer": megascend.Adam(lr=1e-5), "platform": "cpu"}
            settings["batching"] = megascend.Batching(micro_batch_tokens=64)
            backend = megascend.make_backend(engine, model=checkpoint, timeout_s=60, **settings)
            pushes = []
            with megascend.WeightSync(backend, served, mode="auto") as sync:
                for version in range(1, 4):
                    backend.forward_backward(backend.shard(causal_samples(token_lists())))
                    backend.optimizer_step()
                    pushes.append(sync.push(version))
                backend.export_hf(folder / "after")
                order = [name for name, _ in backend.named_weights(receivers="main", device="meta")]
            return pushes, order

        results = run_distributed(on_rank, 2 if engine == "fsdp" else 1, init=False, timeout_s=120)
        trained = exported(folder / "after", results[0][1])
        for number, worker in enumerate(served[0].weights()[0]):
            assert slices_are(worker, vllm_like(specs_of(trained), 2, number), trained), number
        for pushes, _ in results:
            assert all(push.sharded for push in pushes), pushes
            assert [push.base for push in pushes] == ([None, 1, 2] if precision == "bf16" else [None] * 3), pushes


if __name__ == "__main__":
    for precision in ("bf16", "fp32"):
        push(sys.argv[1], sys.argv[2], Path(sys.argv[3]) / precision, precision)
