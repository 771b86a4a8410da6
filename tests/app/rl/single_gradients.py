"""Save the gradients of a step on recorded groups, computed in a process without Megatron; for test_learn.

python single_gradients.py CHECKPOINT GROUPS CASES CAP RESULT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import megascend
from megascend.app.rl.learn import learn
from megascend.config.rl import Objective
from megascend.rollout.group import TrajectoryGroup

checkpoint, recorded, cases, cap, result = sys.argv[1:]
groups = [TrajectoryGroup.from_json(values) for values in json.loads(Path(recorded).read_text())]
results = []
for loss, correction, average in json.loads(cases):
    objective = Objective(loss=loss, correction=correction, average=average, cap=float(cap))
    with megascend.SingleBackend(checkpoint, precision="fp32") as backend:
        learned = learn(backend, groups, objective)
        model: Any = backend.engine.model  # type: ignore[attr-defined]
        assert learned.mismatch is not None
        results.append(
            {
                "loss": learned.result.loss,
                "gradients": {name: parameter.grad.clone() for name, parameter in model.named_parameters()},
                "tokens": learned.mismatch.tokens,
                "truncated": learned.mismatch.truncated,
            }
        )
torch.save(results, result)
