"""Steps of engine fsdp on a GPU, as JSON lines; run as a script, so that the process has no Megatron.

    python fsdp_program.py CHECKPOINT STEPS CASE...

A case is a granularity of recomputation, optionally with ``+compile``. ``waits``: code positions where the host waits for the
device in another step. ``compiled``: number of graphs; ``compiled_late``: those of the third step and later.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

import megascend
from megascend.testing.parity import LR, MAX_GRAD_NORM, WEIGHT_DECAY, causal_samples, token_lists


def report(checkpoint: str, steps: int, case: str) -> dict[str, Any]:
    granularity, _, compiled = case.partition("+")
    backend = megascend.FsdpBackend(
        checkpoint,
        platform="cuda",
        optimizer=megascend.Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM),
        batching=megascend.Batching(micro_batch_tokens=64),
        fsdp=megascend.Fsdp(compile=bool(compiled)),
        recompute=megascend.Recompute(granularity=granularity),  # type: ignore[arg-type]
    )
    samples = backend.shard(causal_samples(token_lists()))

    def step() -> tuple[Any, Any]:
        return backend.forward_backward(samples), backend.optimizer_step()

    counters = torch._dynamo.utils.counters
    counters.clear()
    losses, norms, graphs = [], [], []
    for _ in range(steps):
        result, outcome = step()
        losses.append(result.loss)
        norms.append(outcome.grad_norm)
        graphs.append(counters["stats"]["unique_graphs"])
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    backend.close()
    torch._dynamo.reset()
    waits = [f"{entry.filename}:{entry.lineno}" for entry in caught if "synchronizing" in str(entry.message)]
    late = graphs[-1] - graphs[1]
    return {
        "case": case,
        "losses": losses,
        "norms": norms,
        "waits": waits,
        "compiled": graphs[-1],
        "compiled_late": late,
    }


if __name__ == "__main__":
    import torch._dynamo.utils

    for case in sys.argv[3:]:
        print(json.dumps(report(sys.argv[1], int(sys.argv[2]), case)), flush=True)
