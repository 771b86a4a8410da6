"""``megascend serve`` with two real vLLM servers, one of which is killed while it samples, and restarted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess
from megascend.apps.serve.samplers.vllm import KEY_VARIABLE
from megascend.config.serve import ServeConfig
from support.vllm_server import START_S, vllm_python
from weightwire.vllm.contract import CPU_VARIABLES

sys.path.insert(0, str(Path(__file__).parents[1] / "apps" / "serve"))
from serve_ranks import KEYS, service

pytestmark = pytest.mark.nightly

BOUND = 1e-5
OPTIONS = [
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "16", "--disable-uvicorn-access-log"),
    *("--enable-lora", "--max-lora-rank", "16", "--max-loras", "3", "--api-key", "engine-secret"),
]  # fmt: skip
ENVIRONMENT = {
    **CPU_VARIABLES,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
RANKS = {"alice": 8, "bob": 4}
REQUESTS, AT_ONCE, TOKENS = 32, 8, 48
WAIT_S = 180.0


class Tenant:
    """Tenant that trains an adapter, saves it for sampling, and samples from it."""

    def __init__(self, url: str, name: str, model: Path) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": KEYS[name]}, timeout=120)
        self.prompt = [(5 * index + len(name)) % 250 + 1 for index in range(12)]
        session = self._http.post("/create_session", json={"tags": []}).json()["session_id"]
        lora = {"rank": RANKS[name], "seed": 7}
        body = {"session_id": session, "model_seq_id": 0, "base_model": str(model), "lora_config": lora}
        self._model, self._number = self.fetch(self._post("create_model", body))["model_id"], 0
        for _ in range(6):
            self._ask("forward_backward", forward_backward_input=self._data([self.prompt]))
            self._ask("optim_step", adam_params={"learning_rate": 1e-2})
        self.path = self._ask("save_weights_for_sampler", path="trained")["path"]

    def sample(self, seed: int) -> dict[str, Any]:
        """Return a response."""
        params = {"max_tokens": TOKENS, "temperature": 1.0, "seed": seed}
        body = {"model_path": self.path, "prompt": {"chunks": [{"tokens": self.prompt}]}, "sampling_params": params}
        return self.fetch(self._post("asample", body))

    def trainer_logprobs(self, responses: list[list[int]]) -> list[list[float]]:
        """Compute the trainer's log-probabilities of the responses' tokens."""
        result = self._ask("forward", forward_input=self._data([self.prompt + tokens for tokens in responses]))
        outputs = [output["logprobs"]["data"] for output in result["loss_fn_outputs"]]
        return [logprobs[-len(tokens) :] for logprobs, tokens in zip(outputs, responses, strict=True)]

    def fetch(self, request: str) -> Any:
        while True:
            response = self._http.post("/retrieve_future", json={"request_id": request})
            if response.status_code != 408:
                assert response.status_code == 200, response.text
                assert "error" not in response.json(), response.text
                return response.json()

    def _post(self, path: str, body: dict[str, Any]) -> str:
        response = self._http.post(f"/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()["request_id"]

    def _ask(self, path: str, /, **body: Any) -> Any:
        self._number += 1
        return self.fetch(self._post(path, {"model_id": self._model, "seq_id": self._number, **body}))

    def _data(self, texts: list[list[int]]) -> dict[str, Any]:
        def tensor(data: list[Any], dtype: str) -> dict[str, Any]:
            return {"data": data, "dtype": dtype}

        data = [
            {
                "model_input": {"chunks": [{"tokens": tokens[:-1]}]},
                "loss_fn_inputs": {
                    "target_tokens": tensor(tokens[1:], "int64"),
                    "weights": tensor([1.0] * (len(tokens) - 1), "float32"),
                },
            }
            for tokens in texts
        ]
        return {"data": data, "loss_fn": "cross_entropy"}


def figure(url: str, name: str, server: int, reason: str = "") -> float:
    """Return a vLLM server's metric from ``/metrics``; 0 if it is missing."""
    reason_label = f'reason="{reason}",' if reason else ""
    text = httpx.get(f"{url}/metrics").text
    match = re.search(rf'^megascend_vllm_{name}{{{reason_label}server="{server}"}} (\S+)$', text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def adapters(address: str) -> set[str]:
    """Return the names of the adapters that a vLLM server has loaded."""
    request = urllib.request.Request(f"{address}/v1/models", headers={"Authorization": "Bearer engine-secret"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return {model["id"] for model in json.load(answer)["data"] if model.get("parent") is not None}


def until(true: Callable[[], bool], message: str) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, message
        time.sleep(0.05)


def check(answers_by_tenant: dict[Tenant, list[dict[str, Any]]]) -> float:
    """Return the largest difference between the sampler's and the trainer's log-probabilities."""
    largest = 0.0
    for tenant, answers in answers_by_tenant.items():
        sequences = [answer["sequences"][0] for answer in answers]
        expected = tenant.trainer_logprobs([sequence["tokens"] for sequence in sequences])
        for sequence, logprobs in zip(sequences, expected, strict=True):
            assert len(sequence["tokens"]) == len(sequence["logprobs"]) > 0
            largest = max(largest, *(abs(a - b) for a, b in zip(sequence["logprobs"], logprobs, strict=True)))
    return largest


def test_killed_server_loses_no_request_and_rejoins(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "engine-secret")
    python, model = vllm_python(), tmp_path / "model"
    command = [
        sys.executable,
        "-m",
        "megascend",
        "new-model",
        str(model),
        "--hidden",
        "128",
        "--layers",
        "2",
        "--heads",
        "4",
    ]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)

    def vllm(log: str, port: int | None = None) -> VllmProcess:
        return VllmProcess(
            python, model, log=tmp_path / log, options=OPTIONS, environment=ENVIRONMENT, port=port,
            module="vllm.entrypoints.openai.api_server",
        )  # fmt: skip

    with ExitStack() as stack:
        servers = [stack.enter_context(vllm(f"vllm-{number}.log")) for number in range(2)]
        for server in servers:
            server.wait_until_listening(START_S)
        settings = ServeConfig.model_validate(
            {
                "model": model, "storage": tmp_path / "storage", "port": 0, "precision": "fp32", "platform": "cpu",
                "vllm": [server.address for server in servers],
            }
        )  # fmt: skip
        url = stack.enter_context(service(settings, 1, tmp_path / "service", 1500.0))
        tenants = [Tenant(url, name, model) for name in RANKS]
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))

        def sample(count: int, first: int) -> list[tuple[Tenant, Any]]:
            return [
                (tenant, pool.submit(tenant.sample, first + number)) for number in range(count) for tenant in tenants
            ]

        def ended(requests: list[tuple[Tenant, Any]]) -> dict[Tenant, list[dict[str, Any]]]:
            return {
                tenant: [future.result(WAIT_S) for owner, future in requests if owner is tenant] for tenant in tenants
            }

        ended(sample(2, 0))
        names = {name for server in servers for name in adapters(server.address)}
        assert len(names) == 3, "two tenants' adapters and one for the base model"

        # The first server is killed while it has requests, and no request fails.
        requests = sample(REQUESTS, 10)
        until(lambda: figure(url, "pending", 0) >= 2, "the first server has nothing to do")
        os.killpg(servers[0].pid, signal.SIGKILL)
        answers = ended(requests)
        assert sum(map(len, answers.values())) == 2 * REQUESTS
        failures = figure(url, "failures_total", 0, "lost")
        assert failures >= 1
        assert figure(url, "left_out", 0) == 1
        assert figure(url, "failures_total", 1, "lost") == 0
        differences = [check(answers)]

        # Restarted at its address, it is used again and gets the adapters again.
        servers[0].close()
        before = figure(url, "answered_total", 0)
        repeated = stack.enter_context(vllm("vllm-again.log", servers[0].port))
        repeated.wait_until_listening(START_S)
        assert adapters(repeated.address) == set()

        def taken_back() -> bool:
            ended(sample(4, 1000))
            return figure(url, "answered_total", 0) > before and adapters(repeated.address) >= names - {
                name for name in names if name.endswith("-base")
            }

        until(taken_back, "the first server gets no requests, or lacks adapters")
        assert figure(url, "left_out", 0) == 0

        # Kill the second server: the adapters that the first one reloaded must match the trainer's.
        requests = sample(REQUESTS, 2000)
        until(lambda: figure(url, "pending", 1) >= 1, "the second server has nothing to do")
        os.killpg(servers[1].pid, signal.SIGKILL)
        differences.append(check(ended(requests)))
        before = figure(url, "answered_total", 0)
        differences.append(check(ended(sample(4, 3000))))
        assert figure(url, "answered_total", 0) == before + 8, "only the first server is running"
        print(
            f"lost on the way {failures:.0f}; log-probabilities differ from the trainer's by {max(differences):.1e} at most"
        )
        assert max(differences) < BOUND
