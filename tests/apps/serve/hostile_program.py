"""A tenant that sends what no client should, again and again, and notes what it was answered.

    python hostile_program.py JOB.json RESULT.json STOP

JOB has address, key, model and the names of others' models. Ends when there is the file STOP. Imports nothing of megascend.
"""

import collections
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

TENSORS = {"target_tokens": "int64", "weights": "float32", "logprobs": "float32", "advantages": "float32"}


class Attacker:
    """Sends what other tenants' batches could suffer from, and counts answers by what was sent."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.http = httpx.Client(base_url=f"{job['url']}/api/v1", headers={"X-API-Key": job["key"]}, timeout=120)
        self.answers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.number = 0
        self.chance = random.Random(1)
        session = self.http.post("/create_session", json={"tags": []}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": job["model"], "lora_config": {"rank": 64}}
        self.model = self.fetch(self.http.post("/create_model", json=body).json()["request_id"])["model_id"]

    def fetch(self, name: str) -> dict[str, Any]:
        while True:
            response = self.http.post("/retrieve_future", json={"request_id": name})
            if response.status_code != 408:
                return response.json()

    def send(self, attack: str, path: str, **options: Any) -> None:
        """Send a request; count its answer by status, and by its future's category if any."""
        response = self.http.post(path, **options)
        result = str(response.status_code)
        if response.status_code == 200 and "request_id" in response.json():
            result += " " + self.fetch(response.json()["request_id"]).get("category", "done")
        self.answers[attack][result] += 1

    def train(self, attack: str, model: str | None = None, loss: str = "cross_entropy", **inputs: Any) -> None:
        """Send a forward_backward of one sample and a step, of its own model in order, or of another's."""
        inputs = {"target_tokens": [5, 6, 7], "weights": [1.0, 1.0, 1.0]} | inputs
        tensors = {name: {"data": value, "dtype": TENSORS[name]} for name, value in inputs.items()}
        datum = {"model_input": {"chunks": [{"tokens": [4, 5, 6]}]}, "loss_fn_inputs": tensors}
        body = {"model_id": model or self.model, "forward_backward_input": {"data": [datum], "loss_fn": loss}}
        for path, extra in (("/forward_backward", body), ("/optim_step", {"model_id": model or self.model})):
            self.number += model is None
            content = json.dumps({**extra, "seq_id": self.number if model is None else 1})
            self.send(f"{attack}{path}", path, content=content, headers={"content-type": "application/json"})

    def attack(self) -> None:
        """Send every hostile request once."""
        self.train("NaN", weights=[float("nan"), 1.0, 1.0])
        self.train("infinite", weights=[1.0, float("inf"), 1.0])
        self.train("overflow", weights=[3e38, 3e38, -3e38])  # finite loss in shared batches, infinite gradient
        self.train("vocabulary", target_tokens=[5, 10**6, 7])
        self.train("negative token", target_tokens=[5, -1, 7])
        self.train("lengths", weights=[1.0])
        self.train("loss", loss="no such loss")
        for model in self.chance.sample(self.job["others"], 2):
            self.train("others", model=model)


def main(job_path: str, result_path: str, stop: str) -> None:
    attacker, rounds = Attacker(json.loads(Path(job_path).read_text())), 0
    while not Path(stop).exists():
        attacker.attack()
        rounds += 1
        time.sleep(0.2)
    Path(result_path).write_text(json.dumps({"rounds": rounds, "answers": attacker.answers}))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
