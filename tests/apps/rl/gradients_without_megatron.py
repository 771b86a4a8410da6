"""Save the gradients of steps on recorded groups, computed without Megatron on one rank or on several; for test_learn.

python gradients_without_megatron.py CHECKPOINT GROUPS CASES ENGINE RANKS RESULT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import megascend
from megascend.apps.rl.learn import learn
from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.config.rl import Objective
from megascend.testing import run_distributed

checkpoint, recorded, cases, engine, ranks, result = sys.argv[1:]
groups = [TrajectoryGroup.from_json(values) for values in json.loads(Path(recorded).read_text())]


def steps() -> list[dict[str, Any]]:
    # Few tokens: each rank has several micro batches.
    settings: dict[str, Any] = {"platform": "cpu", "batching": megascend.Batching(micro_batch_tokens=24)}
    results = []
    with megascend.make_backend(engine, model=checkpoint, precision="fp32", timeout_s=60, **settings) as backend:
        parameters: dict[str, Any] = dict(backend.engine.model.named_parameters())  # type: ignore[attr-defined]
        for values in json.loads(cases):
            backend.discard_gradients()
            learned = learn(backend, groups, Objective(**values))
            assert learned.mismatch is not None
            assert learned.result.micro_batches > 1
            results.append(
                {
                    "loss": learned.result.loss,
                    "gradients": {name: complete(parameter.grad) for name, parameter in parameters.items()},
                    "tokens": learned.mismatch.tokens,
                    "truncated": learned.mismatch.truncated,
                    "entropy": learned.entropy,
                }
            )
    return results


def complete(gradient: Any) -> torch.Tensor:
    """Return a copy of a gradient, gathered where ranks have shards of it."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


if engine == "single":
    torch.save(steps(), result)
else:
    torch.save(run_distributed(steps, int(ranks), init=False, timeout_s=200)[0], result)
