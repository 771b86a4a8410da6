"""Two tenants of a Tinker server, through its real client: skyrl_tenants.py ADDRESS MODEL OUT.json

Each has a session of its own. First each trains alone, then both at once from the same start.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
import torch
from tinker import types

RANKS, RATES, STEPS = {"ann": 8, "bob": 4}, {"ann": 1e-2, "bob": 4e-3}, 6
LENGTHS = (7, 12, 5)


def sequences(name: str, step: int) -> list[list[int]]:
    """Build token ids of a tenant's samples in a step; every second step repeats them."""
    generator = torch.Generator().manual_seed(10 * ord(name[0]) + step % 2)
    return [torch.randint(0, 200, (length + 1,), generator=generator).tolist() for length in LENGTHS]


def batch(name: str, step: int) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
        )
        for ids in sequences(name, step)
    ]


def models(address: str, model: str, names: list[str]) -> dict[str, tinker.TrainingClient]:
    """Create an adapter for each tenant, in separate sessions."""
    clients = {name: tinker.ServiceClient(base_url=address, api_key="tml-any") for name in names}
    return {
        name: client.create_lora_training_client(base_model=model, rank=RANKS[name], seed=ord(name[0]))
        for name, client in clients.items()
    }


def train(tenants: dict[str, tinker.TrainingClient]) -> dict[str, list[dict[str, float]]]:
    """Return metrics of every step, by tenant. All tenants send their requests before one waits."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in tenants}
    for step in range(STEPS):
        passes = {name: client.forward_backward(batch(name, step), "cross_entropy") for name, client in tenants.items()}
        metrics = {name: dict(future.result().metrics) for name, future in passes.items()}
        steps = {name: client.optim_step(adam(name)) for name, client in tenants.items()}
        for name, future in steps.items():
            figures[name].append({**metrics[name], **(future.result().metrics or {})})
    return figures


def adam(name: str) -> types.AdamParams:
    return types.AdamParams(learning_rate=RATES[name], beta1=0.9, beta2=0.95, eps=1e-8)


def loss(client: tinker.TrainingClient) -> float:
    """Compute losses of ann's first batch, without training."""
    return client.forward(batch("ann", 0), "cross_entropy").result().metrics["loss:sum"]


def checkpoints(client: tinker.TrainingClient, service: tinker.ServiceClient) -> dict[str, Any]:
    """Save, train on, load into a new model; sample from what was saved."""
    before = loss(client)
    path = client.save_state("kept").result().path
    sampler = client.save_weights_and_get_sampling_client("kept-to-sample")
    train({"ann": client})
    loaded = service.create_training_client_from_state(path)
    ids = sequences("ann", 0)[0]
    prompt = types.ModelInput.from_ints(ids)
    params = types.SamplingParams(max_tokens=4, seed=1)
    responses = sampler.sample(prompt, num_samples=2, sampling_params=params, include_prompt_logprobs=True).result()
    expected = loaded.forward(batch("ann", 0), "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    return {
        "losses": {"saved": before, "trained": loss(client), "loaded": loss(loaded)},
        "responses": [list(sequence.tokens) for sequence in responses.sequences],
        "prompt_logprobs": [list(responses.prompt_logprobs[1:]), list(expected)],
    }


def refusal(client: tinker.TrainingClient) -> str:
    """Return the client's error for targets that are one token short."""
    ids = sequences("ann", 0)[0]
    bad = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[2:], "weights": [1.0] * (len(ids) - 2)},
    )
    try:
        client.forward_backward([bad], "cross_entropy").result()
    except ValueError as error:  # what tinker 0.16 makes of HTTP 400
        return str(error)
    raise AssertionError("a target that is too short was taken")


def main(address: str, model: str, out: str) -> None:
    single: dict[str, list[dict[str, float]]] = {}
    starts: dict[str, str] = {}
    for name in RANKS:
        tenant = models(address, model, [name])
        starts[name] = tenant[name].save_weights_for_sampler("start").result().path
        single |= train(tenant)
    tenant_models = models(address, model, list(RANKS))
    mixed = train(tenant_models)
    service = tinker.ServiceClient(base_url=address, api_key="tml-any")
    report = {"alone": single, "mixed": mixed, "starts": starts, "refusal": refusal(tenant_models["ann"])}
    report |= checkpoints(tenant_models["ann"], service)
    with open(out, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
