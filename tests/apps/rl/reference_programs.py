"""Runs of learn() with a reference model on an engine's ranks, in a process of its own; for test_kl_reference.

python reference_programs.py ENGINE RANKS OPTIONS CHECKPOINT GROUPS CASES full|lora RESULT

OPTIONS: JSON, sections and settings of the backend. CASES: JSON, a list of (settings of the objective, settings of the reference,
steps before). RESULT: for each case the values of rank 0: loss, gradient norm, divergence, log-probabilities of the reference,
and gradients on the single-process engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import megascend
from megascend.apps.rl.learn import learn, step_samples
from megascend.apps.rl.reference import ReferenceModel
from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.config.rl import Objective, ReferenceSettings
from megascend.testing import run_distributed


def learned(backend: Any, groups: list[TrajectoryGroup], case: tuple[Any, Any, int], adapter: str | None) -> Any:
    """Return the figures of a step, and what must be as it was."""
    objective, settings, steps = Objective(**case[0]), ReferenceSettings(**case[1]), case[2]
    reference = ReferenceModel(backend, settings)
    for _ in range(steps):
        learn(backend, groups, Objective(), adapter)
        backend.optimizer_step()
    before = {name: tensor.clone() for name, tensor in backend.named_weights(device="cpu")}
    samples = step_samples(groups, objective)
    # All of them on every data parallel rank.
    logprobs = reference.logprobs(samples)
    after = dict(backend.named_weights(device="cpu"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    result = learn(backend, groups, objective, adapter, measured=False, reference=reference)
    divergence, gradients = result.divergence, None
    assert divergence is not None
    if backend.engine.kind == "single" and backend.engine.precision == "fp32" and adapter is None:
        gradients = {name: parameter.grad.clone() for name, parameter in backend.engine.model.named_parameters()}
    return {
        "loss": result.result.loss,
        "norm": backend.optimizer_step().grad_norm,
        "divergence": [divergence.tokens, divergence.k1, divergence.k3],
        "logprobs": logprobs,
        "gradients": gradients,
    }


SECTIONS = {"parallel": megascend.Parallel, "optimizer": megascend.Adam, "fsdp": megascend.Fsdp}


def on_rank(engine: str, settings: dict[str, Any], checkpoint: str, groups: Any, cases: Any, lora: bool) -> list[Any]:
    """Compute all cases, each on a backend of its own."""
    kind = {"megatron": megascend.MegatronBackend, "fsdp": megascend.FsdpBackend, "single": megascend.SingleBackend}
    options: dict[str, Any] = {"precision": "fp32", "self_check": False, "timeout_s": 60, "platform": "cpu"}
    settings = {"optimizer": {"lr": 0.01}} | settings
    options |= {name: SECTIONS[name](**value) if name in SECTIONS else value for name, value in settings.items()}
    if lora:
        options["adapters"] = megascend.Adapters()
    results = []
    for case in cases:
        with kind[engine](checkpoint, **options) as backend:
            if lora:
                backend.add_adapter("default", megascend.Lora(rank=4))
            results.append(learned(backend, groups, case, "default" if lora else None))
    return results


def main(
    engine: str, ranks: str, options: str, checkpoint: str, recorded: str, cases: str, lora: str, path: str
) -> None:
    groups = [TrajectoryGroup.from_json(values) for values in json.loads(Path(recorded).read_text(encoding="utf-8"))]
    arguments = (engine, json.loads(options), checkpoint, groups, json.loads(cases), lora == "lora")
    if engine == "single":
        results = on_rank(*arguments)
    else:
        first, *later_ranks = run_distributed(on_rank, int(ranks), *arguments, init=False, timeout_s=240)
        for rank in later_ranks:
            assert [case["norm"] for case in rank] == [case["norm"] for case in first]
            assert [case["divergence"] for case in rank] == [case["divergence"] for case in first]
        results = first
    torch.save(results, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
