"""Two tenants at once against one `megascend serve`, each with the Tinker client, unmodified, and a key of its own.

    bash cookbook/tinker_two_tenants.sh                     # starts a server with a small model, then this
    python cookbook/tinker_two_tenants.py --model NAME      # with TINKER_BASE_URL and MEGASCEND_API_KEYS=NAME=KEY,NAME=KEY

Ada trains an adapter of rank 4, Ben one of rank 32 with another learning rate. They learn contradicting answers to one question,
and the server's status tells how many of its batches held both of them. Exit code 1 unless each learned its own answer, none can
see the other's model, and at least half of the batches were shared.
"""

import argparse
import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="what the server calls its model")
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()

URL = os.environ["TINKER_BASE_URL"]
KEYS = [entry.partition("=")[2] for entry in os.environ["MEGASCEND_API_KEYS"].split(",")]
QUESTION = "Tea or coffee?"


@dataclass
class Tenant:
    name: str
    key: str
    rank: int
    learning_rate: float
    answer: str


TENANTS = [
    Tenant("Ada", KEYS[0], rank=4, learning_rate=3e-3, answer=" Tea."),
    Tenant("Ben", KEYS[1], rank=32, learning_rate=5e-3, answer=" Coffee, please."),
]


def status(key: str) -> dict:
    """Return the server's status as a tenant sees it."""
    request = urllib.request.Request(f"{URL}/status", headers={"X-API-Key": key})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def train(tenant: Tenant, trainer: tinker.TrainingClient) -> tuple[list[float], str]:
    """Return the loss per token of each step, and the trained model's answer."""
    tokenizer = trainer.get_tokenizer()
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False)
    response = tokenizer.encode(tenant.answer, add_special_tokens=False)
    sequence = prompt + response
    inputs = {"target_tokens": sequence[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(response)}
    data = [types.Datum(model_input=types.ModelInput.from_ints(sequence[:-1]), loss_fn_inputs=inputs)]
    losses = []
    for _ in range(options.steps):
        learned = trainer.forward_backward(data, "cross_entropy")
        # Sent together, so that the server can batch both tenants' requests.
        stepped = trainer.optim_step(types.AdamParams(learning_rate=tenant.learning_rate))
        losses.append(learned.result().metrics["loss:sum"] / len(response))
        stepped.result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=len(response), temperature=0.0)
    output = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
    return losses, str(tokenizer.decode(list(output.tokens)))


trainers = []
for tenant in TENANTS:  # both have their models before either begins
    service = tinker.ServiceClient(base_url=URL, api_key=tenant.key)
    trainers.append(service.create_lora_training_client(base_model=options.model, rank=tenant.rank, seed=0).result())
with ThreadPoolExecutor(len(TENANTS)) as pool:
    results = list(pool.map(train, TENANTS, trainers))

problems = []
for tenant, (losses, text) in zip(TENANTS, results, strict=True):
    print(f"{tenant.name}: rank {tenant.rank}, loss {losses[0]:.4f} -> {losses[-1]:.4f}, says{text}")
    if text != tenant.answer:
        problems.append(f"{tenant.name} has not learned its answer")
    visible = [model["rank"] for model in status(tenant.key)["tenant"]["models"]]
    if visible != [tenant.rank]:
        problems.append(f"{tenant.name} sees models of ranks {visible}")
batches = [models for models, _ in status(TENANTS[0].key)["totals"]["batches"]["recent"]]
shared = sum(models == len(TENANTS) for models in batches)
print(f"{shared} of the last {len(batches)} batches held both tenants")
if 2 * shared < len(batches):
    problems.append("fewer than half of the batches were shared")
if problems:
    raise SystemExit("; ".join(problems))
print("learned: each tenant its own answer")
