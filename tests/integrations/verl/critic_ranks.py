"""A critic on several ranks with verl's worker: answers of each rank as JSON, and trained weights as tensors.

torchrun critic_ranks.py CRITIC OUT_DIRECTORY SETTINGS_OF_THE_ENGINE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from critic_calls import STEPS, batch, configs, loss_of_verl
from safetensors.torch import save_file
from verl.utils import tensordict_utils
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker


def main(critic: str, out: str, settings: str) -> None:
    worker = TrainingWorker(TrainingWorkerConfig(model_type="value_model", **configs(critic, **json.loads(settings))))
    worker.reset()
    worker.set_loss_fn(loss_of_verl())
    engine = worker.engine
    part = slice(engine.get_data_parallel_rank(), None, engine.get_data_parallel_size())
    report: dict[str, Any] = {"data rank": part.start, "collects": engine.is_mp_src_rank_with_outputs()}

    def rank_batch(**extra: Any) -> Any:
        data = batch(part)
        tensordict_utils.assign_non_tensor(data, **extra)
        return data

    answer = worker.infer_batch(rank_batch(compute_loss=False))
    report["values"] = None if answer is None else answer["values"].values().tolist()
    report["steps"] = []
    for _ in range(STEPS):
        answer = worker.train_batch(rank_batch(update_lr_scheduler=True))
        metrics = None if answer is None else tensordict_utils.get(answer, "metrics")
        report["steps"].append(metrics and {name: metrics[name] for name in ("loss", "grad_norm", "lr")})
    rank = worker.rank
    save_file(
        {name: tensor.contiguous() for name, tensor in engine.get_per_tensor_param()[0]},
        f"{out}/rank{rank}.safetensors",
    )
    Path(out, f"rank{rank}.json").write_text(json.dumps(report))
    engine.backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
