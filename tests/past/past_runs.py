"""The runs of which every release keeps the figures: a whole dense model, a whole model with experts, and two adapters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megascend import Adam, Adapters, Backend, Batching, Lora, Moe, Parallel, Sample, Schedule
from megascend.backends import FsdpBackend, MegatronBackend
from megascend.testing import run_distributed
from megascend.testing.parity import token_lists

STEPS, SAVED_AT = 4, 2
VOCABULARY = 64
SHAPE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", SHAPE),
    "experts": ("qwen3_moe", SHAPE | {"moe_intermediate_size": 16, "num_experts": 4}),
}
"""Tiny models as :mod:`make_past` made them; their weights are kept, since another transformers may draw others."""
RUNS = {"dense": "dense", "experts": "experts", "adapters": "dense"}
"""The model of each run."""


def samples(run: str) -> list[Sample]:
    owners = ("a", "b") if run == "adapters" else (None,)
    tokens = token_lists(VOCABULARY)
    return [
        Sample.causal(ids, prompt_length=3, adapter=owners[number % len(owners)]) for number, ids in enumerate(tokens)
    ]


def make_backend(engine: str, run: str, model: Path, parallel: Any) -> Backend:
    kind = {"megatron": MegatronBackend, "fsdp": FsdpBackend}[engine]
    return kind(
        model=model,
        precision="fp32",
        parallel=parallel,
        optimizer=Adam(lr=1e-2),
        schedule=Schedule(kind="cosine", warmup_steps=2, total_steps=8),
        batching=Batching(micro_batch_tokens=64),
        adapters=Adapters() if run == "adapters" else None,
        moe=Moe(aux_loss="none"),
        self_check=False,
        timeout_s=60,
    )


def add_adapters(backend: Backend) -> None:
    backend.add_adapter("a", Lora(rank=2, alpha=4, seed=1))
    backend.add_adapter("b", Lora(rank=4, targets=("q_proj", "down_proj"), seed=2))


def train(engine: str, run: str, model: Path, parallel: Any, world_size: int, **places: Path) -> list[dict[str, float]]:
    """Return each step's losses and gradient norms; start at the checkpoint ``load_from``, or save one into ``save_to``."""

    def on_rank() -> list[dict[str, float]]:
        with make_backend(engine, run, model, parallel) as backend:
            if "load_from" in places:
                backend.load(places["load_from"])
            elif run == "adapters":
                add_adapters(backend)
            batch, figures = backend.shard(samples(run)), []
            while backend.step_count < STEPS:
                result, step = backend.forward_backward(batch), backend.optimizer_step()
                if run == "adapters":
                    row = {f"loss {name}": result.adapters[name].loss for name in "ab"}
                    row |= {f"norm {name}": step.adapters[name].grad_norm for name in "ab"}
                else:
                    row = {"loss": result.loss, "norm": step.grad_norm}
                figures.append(row)
                if "save_to" in places and backend.step_count == SAVED_AT:
                    backend.save(places["save_to"], wait=True)
            if "save_to" in places and run == "adapters":
                backend.save_adapter("a", places["save_to"].with_name("adapter"))
            return figures

    return run_distributed(on_rank, world_size, init=False, timeout_s=120)[0]


if __name__ == "__main__":  # engine fsdp, on two ranks, in a process that has not been made ready for Megatron
    run, model, *checkpoint = sys.argv[1:]
    places = {"load_from": Path(checkpoint[0])} if checkpoint else {}
    print(json.dumps(train("fsdp", run, Path(model), Parallel(), 2, **places)))
