"""Two tenants' requests in the form that SkyRL's engine passes to a backend, and a backend for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from skyrl.tinker import types
from skyrl.tinker.engine import prepare_model_pass_batch

from megascend.integrations.skyrl.backend import MegascendBackend

TENANTS = {
    "ann": types.LoraConfig(rank=8, alpha=16, seed=1),
    "bob": types.LoraConfig(rank=4, alpha=8, seed=2, train_mlp=False),
}
STEPS = 4


def backend(model: Path, **settings: Any) -> MegascendBackend:
    """Start one rank in fp32 on the CPU."""
    values = {"precision": "fp32", "platform": "cpu", "max_lora_adapters": 4, "max_lora_rank": 8, **settings}
    return MegascendBackend(str(model), MegascendBackend.config_class(**values))


def request_of(tenant: str, step: int, loss: str = "cross_entropy") -> types.ForwardBackwardInput:
    """Build three samples of a tenant."""
    generator = torch.Generator().manual_seed(1000 * len(tenant) + ord(tenant[0]) + step % 2)

    def datum(length: int) -> types.Datum:
        tokens = torch.randint(0, 200, (length + 1,), generator=generator).tolist()
        empty = types.TensorData(data=[])
        return types.Datum(
            model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens[:-1])]),
            loss_fn_inputs=types.LossFnInputs(
                target_tokens=types.TensorData(data=tokens[1:]),
                weights=types.TensorData(data=[1.0] * length if loss == "cross_entropy" else []),
                advantages=empty if loss == "cross_entropy" else types.TensorData(data=[0.5] * length),
                logprobs=empty if loss == "cross_entropy" else types.TensorData(data=[-5.0] * length),
            ),
        )

    return types.ForwardBackwardInput(data=[datum(length) for length in (7, 12, 5)], loss_fn=loss)


def batch_of(tenants: list[str], step: int, loss: str = "cross_entropy") -> types.PreparedModelPassBatch:
    """Build one batch with a request of each tenant by SkyRL's own function."""
    return prepare_model_pass_batch({f"r-{name}": (name, request_of(name, step, loss)) for name in tenants})


def adam(rate: float) -> types.OptimStepInput:
    values = {"learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    return types.OptimStepInput(adam_params=types.AdamParams(**values))


def train(on: MegascendBackend, tenants: list[str]) -> dict[str, list[float]]:
    """Train all tenants in shared batches; return the summed losses of every step by tenant. Removes the models."""
    for name in tenants:
        on.create_model(name, TENANTS[name])
    losses: dict[str, list[float]] = {name: [] for name in tenants}
    for step in range(STEPS):
        results = on.forward_backward(batch_of(tenants, step))
        for name in tenants:
            losses[name].append(results[f"r-{name}"].metrics["loss:sum"])
            on.optim_step(name, adam(1e-2 if name == "ann" else 3e-2))
    for name in tenants:
        on.delete_model(name)
    return losses
