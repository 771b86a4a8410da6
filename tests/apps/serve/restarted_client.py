"""A client program that trains until it is told to stop, across restarts of its server.

    python restarted_client.py JOB.json RESULT.json

JOB has the address, the key, the model, rank, seed, and either "enough", a file that ends it, or "steps", how many to take.
It does nothing about a server that is gone: the client's own retries do. Imports nothing of megascend.
"""

import json
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
os.environ["TINKER_TELEMETRY"] = "0"

import tinker  # noqa: E402
from tinker import types  # noqa: E402

SAVE_EVERY, NEW_EVERY = 11, 40


def batch(seed: int, step: int, vocabulary: int) -> list[types.Datum]:
    """Return the data of a step, the same for the same job."""
    chance = random.Random(f"{seed}/{step}")
    data = []
    for _ in range(chance.choice((1, 2, 3))):
        tokens = [chance.randrange(3, vocabulary) for _ in range(chance.randrange(4, 24))]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def train(client: Any, job: dict[str, Any], step: int) -> tuple[Any, Any]:
    """Send one step without waiting for it; sometimes with two gradient requests."""
    passes = [client.forward_backward(batch(job["seed"], step, job["vocabulary"]), "cross_entropy")]
    if step % 3 == 0:
        passes.append(client.forward_backward(batch(job["seed"] + 1000, step, job["vocabulary"]), "cross_entropy"))
    adam = types.AdamParams(
        learning_rate=job["learning_rate"], eps=job["eps"], grad_clip_norm=1.0 if step % 5 == 0 else 0.0
    )
    return passes, client.optim_step(adam)


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    service = tinker.ServiceClient(base_url=job["url"], api_key=job["key"])
    client = service.create_lora_training_client(base_model=job["model"], rank=job["rank"], seed=job["seed"])
    pace = random.Random(job["seed"])
    losses: list[float] = []
    under_way: list[tuple[Any, Any]] = []
    step = 0
    while step < job["steps"] if job["steps"] is not None else not Path(job["enough"]).exists():
        under_way.append(train(client, job, step))
        step += 1
        if len(under_way) > step % 3:  # up to three steps are under way
            for passes, optim in under_way:
                losses += [future.result().metrics["loss:sum"] for future in passes]
                optim.result()
            under_way = []
            Path(job["started"]).touch()
        if step % SAVE_EVERY == 0:
            path = client.save_state(f"step-{step}").result().path
            if step % NEW_EVERY < SAVE_EVERY:
                client = service.create_training_client_from_state_with_optimizer(path)
        if job["steps"] is None:
            time.sleep(pace.uniform(0, 0.05))
    for passes, optim in under_way:
        losses += [future.result().metrics["loss:sum"] for future in passes]
        optim.result()
    path = client.save_state("end").result().path
    with open(result_path, "w") as file:
        json.dump({"steps": step, "losses": losses, "path": path}, file)
    sys.stdout.flush()
    os._exit(0)  # the client's threads wait for a minute otherwise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
