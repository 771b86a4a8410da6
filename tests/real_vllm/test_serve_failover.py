"""``megascend serve`` above two real vLLM servers, one of which is killed while it samples, and started again."""

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
from driving import START_S, vllm_python

from megascend.config.serve import ServeConfig
from megascend.rollout.engines.vllm_process import VllmProcess
from megascend.serve.samplers.vllm import KEY_VARIABLE
from weightwire.vllm.contract import CPU_VARIABLES

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
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
    """Trains a model, saves it for sampling, and samples from what it saved."""

    def __init__(self, url: str, name: str, model: Path) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": KEYS[name]}, timeout=120)
        self.prompt = [(5 * place + len(name)) % 250 + 1 for place in range(12)]
        session = self._http.post("/create_session", json={"tags": []}).json()["session_id"]
        lora = {"rank": RANKS[name], "seed": 7}
        body = {"session_id": session, "model_seq_id": 0, "base_model": str(model), "lora_config": lora}
        self._model, self._number = self.fetch(self._post("create_model", body))["model_id"], 0
        for _ in range(6):
            self._ask("forward_backward", forward_backward_input=self._data([self.prompt]))
            self._ask("optim_step", adam_params={"learning_rate": 1e-2})
        self.path = self._ask("save_weights_for_sampler", path="trained")["path"]

    def sample(self, seed: int) -> dict[str, Any]:
        """A response."""
        params = {"max_tokens": TOKENS, "temperature": 1.0, "seed": seed}
        body = {"model_path": self.path, "prompt": {"chunks": [{"tokens": self.prompt}]}, "sampling_params": params}
        return self.fetch(self._post("asample", body))

    def of_trainer(self, responses: list[list[int]]) -> list[list[float]]:
        """What the trainer's model says of their tokens."""
        found = self._ask("forward", forward_input=self._data([self.prompt + tokens for tokens in responses]))
        outputs = [each["logprobs"]["data"] for each in found["loss_fn_outputs"]]
        return [logprobs[-len(tokens) :] for logprobs, tokens in zip(outputs, responses, strict=True)]

    def fetch(self, request: str) -> Any:
        while True:
            found = self._http.post("/retrieve_future", json={"request_id": request})
            if found.status_code != 408:
                assert found.status_code == 200, found.text
                assert "error" not in found.json(), found.text
                return found.json()

    def _post(self, path: str, body: dict[str, Any]) -> str:
        made = self._http.post(f"/{path}", json=body)
        assert made.status_code == 200, made.text
        return made.json()["request_id"]

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
    """Of a vLLM server, from ``/metrics``; 0 if there is none."""
    more = f'reason="{reason}",' if reason else ""
    text = httpx.get(f"{url}/metrics").text
    found = re.search(rf'^megascend_vllm_{name}{{{more}server="{server}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def adapters(address: str) -> set[str]:
    """Names that a vLLM server knows."""
    request = urllib.request.Request(f"{address}/v1/models", headers={"Authorization": "Bearer engine-secret"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return {each["id"] for each in json.load(answer)["data"] if each.get("parent") is not None}


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def check(found: dict[Tenant, list[dict[str, Any]]]) -> float:
    """The largest difference of the sampler's log-probabilities from the trainer's."""
    worst = 0.0
    for tenant, answers in found.items():
        sequences = [answer["sequences"][0] for answer in answers]
        expected = tenant.of_trainer([each["tokens"] for each in sequences])
        for each, logprobs in zip(sequences, expected, strict=True):
            assert len(each["tokens"]) == len(each["logprobs"]) > 0
            worst = max(worst, *(abs(a - b) for a, b in zip(each["logprobs"], logprobs, strict=True)))
    return worst


def test_one_of_two_servers_is_killed_while_it_samples_and_is_taken_back(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "engine-secret")
    python, model = vllm_python(), tmp_path / "model"
    made = [
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
    subprocess.run(made, check=True, timeout=120, stdout=subprocess.DEVNULL)

    def vllm(log: str, port: int | None = None) -> VllmProcess:
        return VllmProcess(
            python, model, log=tmp_path / log, options=OPTIONS, environment=ENVIRONMENT, port=port,
            module="vllm.entrypoints.openai.api_server",
        )  # fmt: skip

    with ExitStack() as stack:
        servers = [stack.enter_context(vllm(f"vllm-{number}.log")) for number in range(2)]
        for each in servers:
            each.wait_until_listening(START_S)
        settings = ServeConfig.model_validate(
            {
                "model": model, "storage": tmp_path / "storage", "port": 0, "precision": "fp32", "platform": "cpu",
                "vllm": [each.address for each in servers],
            }
        )  # fmt: skip
        url = stack.enter_context(service(settings, 1, tmp_path / "service", 1500.0))
        tenants = [Tenant(url, name, model) for name in RANKS]
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))

        def sample(count: int, first: int) -> list[tuple[Tenant, Any]]:
            return [
                (tenant, pool.submit(tenant.sample, first + number)) for number in range(count) for tenant in tenants
            ]

        def ended(asked: list[tuple[Tenant, Any]]) -> dict[Tenant, list[dict[str, Any]]]:
            return {tenant: [each.result(WAIT_S) for of, each in asked if of is tenant] for tenant in tenants}

        ended(sample(2, 0))
        names = {name for each in servers for name in adapters(each.address)}
        assert len(names) == 3, "of two tenants, and one that changes nothing"

        # The first one is killed while it has requests, and no request fails.
        asked = sample(REQUESTS, 10)
        until(lambda: figure(url, "pending", 0) >= 2, "the first server has nothing to do")
        os.killpg(servers[0].pid, signal.SIGKILL)
        found = ended(asked)
        assert sum(map(len, found.values())) == 2 * REQUESTS
        lost = figure(url, "failures_total", 0, "lost")
        assert lost >= 1
        assert figure(url, "left_out", 0) == 1
        assert figure(url, "failures_total", 1, "lost") == 0
        worst = [check(found)]

        # Started again at its address, it is taken back and gets the adapters again.
        servers[0].close()
        before = figure(url, "answered_total", 0)
        again = stack.enter_context(vllm("vllm-again.log", servers[0].port))
        again.wait_until_listening(START_S)
        assert adapters(again.address) == set()

        def taken_back() -> bool:
            ended(sample(4, 1000))
            return figure(url, "answered_total", 0) > before and adapters(again.address) >= names - {
                name for name in names if name.endswith("-base")
            }

        until(taken_back, "the first server is not asked again, or lacks adapters")
        assert figure(url, "left_out", 0) == 0

        # Now the other one: what the first one was given again is what the trainer has.
        asked = sample(REQUESTS, 2000)
        until(lambda: figure(url, "pending", 1) >= 1, "the second server has nothing to do")
        os.killpg(servers[1].pid, signal.SIGKILL)
        worst.append(check(ended(asked)))
        before = figure(url, "answered_total", 0)
        worst.append(check(ended(sample(4, 3000))))
        assert figure(url, "answered_total", 0) == before + 8, "it alone is there"
        print(f"lost on the way {lost:.0f}; log-probabilities differ from the trainer's by {max(worst):.1e} at most")
        assert max(worst) < BOUND
