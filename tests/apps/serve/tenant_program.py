"""Tenants that train at a random pace, one after another, with an unmodified Tinker client.

    python tenant_program.py JOBS.json RESULT.json [READY GO]

Each of JOBS has address, key, model, rank, seed, learning rate, pause and steps. With READY and GO, the program touches the one
once the model of its first job is there, and begins when there is the other. Imports nothing of megascend.
"""

import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from client_program import result
from tinker import types


def batch(chance: random.Random, vocabulary: int, policy: bool) -> list[types.Datum]:
    """Build one to four samples of random lengths."""
    data = []
    for _ in range(chance.randint(1, 4)):
        count = chance.randint(4, 40)
        tokens = [chance.randrange(3, vocabulary) for _ in range(count + 1)]
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if policy:
            inputs["logprobs"] = [chance.uniform(-7, -4) for _ in range(count)]
            inputs["advantages"] = [chance.uniform(-1, 1) for _ in range(count)]
        else:
            inputs["weights"] = [chance.choice([0.0, 1.0, 0.5]) for _ in range(count)]
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def terms_size(datum: types.Datum, logprobs: Any) -> float:
    """Return the sum of the absolute terms of a loss, which bounds its rounding error."""
    inputs = {name: value.data for name, value in datum.loss_fn_inputs.items()}
    if "weights" in inputs:
        return sum(abs(weight * logprob) for weight, logprob in zip(inputs["weights"], logprobs, strict=True))
    terms = zip(inputs["logprobs"], inputs["advantages"], logprobs, strict=True)
    return sum(abs(math.exp(logprob - old) * advantage) for old, advantage, logprob in terms)


def train(client: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return (loss, sum of its terms' sizes) of each step of a job, and the path of its saved adapter."""
    chance, pace = random.Random(job["seed"]), random.Random()
    adam = types.AdamParams(
        learning_rate=job["learning_rate"], eps=1e-3
    )  # no step from what is rounded in a gradient of 0
    losses = []
    for _ in range(job["steps"]):
        time.sleep(pace.uniform(0, job["pause_s"]))
        data = batch(chance, job["vocabulary"], policy=job["loss"] != "cross_entropy")
        future, step = client.forward_backward(data, job["loss"]), client.optim_step(adam)
        outputs = future.result()
        size = sum(
            terms_size(inputs, out["logprobs"].data) for inputs, out in zip(data, outputs.loss_fn_outputs, strict=True)
        )
        losses.append((outputs.metrics["loss:sum"], size))
        step.result()
    return {"losses": losses, "path": client.save_state("end").result().path}


def main(jobs_path: str, result_path: str, ready: str | None = None, go: str | None = None) -> None:
    answers = []
    for job in json.loads(Path(jobs_path).read_text()):
        service = tinker.ServiceClient(base_url=job["url"], api_key=job["key"])
        settings = {"base_model": job["model"], "rank": job["rank"], "seed": job["seed"]}
        client = result(service.create_lora_training_client(**settings))
        if ready is not None and go is not None:
            Path(ready).write_text(client.model_id)
            while not Path(go).exists():
                time.sleep(0.005)
        answers.append(train(client, job))
    Path(result_path).write_text(json.dumps(answers))
    sys.stdout.flush()
    os._exit(0)  # the client's threads wait for a minute otherwise


if __name__ == "__main__":
    main(*sys.argv[1:])
