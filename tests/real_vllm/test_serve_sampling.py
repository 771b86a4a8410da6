"""``megascend serve`` with a real vLLM for sampling and the real Tinker client: both sides have the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess
from megascend.apps.serve.samplers.vllm import KEY_VARIABLE
from megascend.config.serve import ServeConfig
from support.vllm_server import START_S, vllm_python
from weightwire.vllm.contract import CPU_VARIABLES

sys.path.insert(0, str(Path(__file__).parents[1] / "apps" / "serve"))
from serve_ranks import KEYS, service

BOUND = 1e-5
OPTIONS = [
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "16", "--disable-uvicorn-access-log"),
    *("--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--api-key", "engine-secret"),
]  # fmt: skip
TEXTS = {"alice": "one two three four five six seven", "bob": "red green blue red green blue red"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()
    folder = tmp_path_factory.mktemp("model") / "model"
    command = [
        sys.executable,
        "-m",
        "megascend",
        "new-model",
        str(folder),
        "--hidden",
        "128",
        "--layers",
        "2",
        "--heads",
        "4",
    ]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a plain vLLM server and return its address."""
    folder = tmp_path_factory.mktemp("vllm")
    environment = CPU_VARIABLES | {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    with VllmProcess(
        vllm_python(),
        model,
        log=folder / "log",
        options=OPTIONS,
        environment=environment,
        module="vllm.entrypoints.openai.api_server",
    ) as process:
        process.wait_until_listening(START_S)
        yield process.address


def adapters(address: str) -> list[str]:
    request = urllib.request.Request(f"{address}/v1/models", headers={"Authorization": "Bearer engine-secret"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return [model["id"] for model in json.load(answer)["data"] if model.get("parent") is not None]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tenants_sample_from_their_trained_adapters(
    model: Path, vllm: str, tmp_path: Path, monkeypatch, ranks: int
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "engine-secret")
    settings = ServeConfig.model_validate(
        {
            "model": model, "storage": tmp_path / "storage", "port": 0, "precision": "fp32", "platform": "cpu", "vllm": [vllm],
            "parallel": {"tensor": ranks},
        }
    )  # fmt: skip
    names = ("alice", "bob")
    job = {
        "keys": {name: KEYS[name] for name in names}, "ranks": {"alice": 8, "bob": 4}, "model": str(model), "steps": 60,
        "texts": {name: list(TEXTS[name].encode()) for name in names},
    }  # fmt: skip
    with service(settings, ranks, tmp_path / "service") as url:
        (tmp_path / "job.json").write_text(json.dumps(job | {"url": url}))
        program = [sys.executable, str(Path(__file__).with_name("serve_client.py"))]
        subprocess.run(
            [*program, str(tmp_path / "job.json"), str(tmp_path / "result.json")],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300, check=True,
        )  # fmt: skip
        answer = json.loads((tmp_path / "result.json").read_text())
        loaded = adapters(vllm)
        assert len(loaded) == 3, "two tenants' adapters and one for the base model"
        assert all(name.startswith("megascend-") for name in loaded)
    assert adapters(vllm) == [], "the service unloads its adapters when it ends"
    for name in names:
        check_tenant(answer[name])
    assert "100000" in answer["refused"]
    assert largest(answer["base"][1:], answer["base of the trainer"]) < BOUND, (
        "the base model while adapters are loaded"
    )
    learned, base = (sum(values[1:]) / 7 for values in (answer["alice"]["prompt"], answer["base"]))
    assert learned > base + 2, "alice's prompt is likelier to her model than to the base model"


def check_tenant(answer: dict[str, Any]) -> None:
    first, second = answer["responses"]
    assert len(first) == 3
    assert [sequence[0] for sequence in first] == [sequence[0] for sequence in second], "the same seed"
    difference = 0.0
    for (tokens, logprobs, _), trainer in zip(first, answer["trainer"], strict=True):
        difference = max(difference, largest(logprobs, trainer[-len(tokens) :]))
    difference = max(difference, largest(answer["prompt"][1:], answer["trainer"][0][:7]))
    print(f"log-probabilities of sampler and trainer differ by {difference:.1e} at most")
    assert difference < BOUND
    greedy = answer["greedy"][0]
    assert answer["stopped by a token"][0] == greedy[: greedy.index(greedy[2]) + 1]
    assert answer["stopped by a token"][2].endswith("stop")
    stopped = bytes(answer["stopped by a text"][0]).decode()
    assert stopped.endswith(answer["ending"])
    assert bytes(greedy).decode().startswith(stopped)


def largest(first: list[float], second: list[float]) -> float:
    return float((torch.tensor(first, dtype=torch.float64) - torch.tensor(second, dtype=torch.float64)).abs().max())
