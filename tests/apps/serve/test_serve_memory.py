"""One rank runs out of memory: the request fails alone with category "server", and other tenants are not affected."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve_ranks import KEYS, service

from megascend.config import Parallel
from megascend.config.serve import ServeConfig
from megascend.testing import write_tiny_checkpoint

NEVER_MADE, NEVER_STEPPED, NEVER_RUN = 33, 34, 35
"""Ranks of adapters for which there is no room at their creation, in their steps, and in forward and backward passes."""
STEPS = 6


def run_short_of_memory() -> None:
    """Raise out-of-memory errors on the last rank only, in place of AdamW's moments and activations that do not fit."""
    if os.environ["RANK"] != str(int(os.environ["WORLD_SIZE"]) - 1):
        return
    from megascend.engines.megatron.engine import MegatronEngine
    from megascend.training.lora.adapter import Adapter

    make_room, run, stepped = Adapter.make_room, MegatronEngine.run, set()

    def make_room_if_there_is(adapter: Adapter) -> None:
        rank = adapter.lora.rank
        if rank == NEVER_MADE or (rank == NEVER_STEPPED and adapter.name in stepped):
            raise torch.OutOfMemoryError("CUDA out of memory")
        stepped.add(adapter.name)
        make_room(adapter)

    def run_if_there_is_room(engine: Any, batches: Sequence[Any], *args: Any, **options: Any) -> Any:
        stacked = engine.adapters.layers.stacked
        if any(adapter is not None and adapter.lora.rank == NEVER_RUN for adapter in stacked.adapters if stacked):
            run(engine, batches[:1], *args, **options)  # it ran out half way
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(engine, batches, *args, **options)

    Adapter.make_room = make_room_if_there_is
    MegatronEngine.run = run_if_there_is_room


class Tenant:
    """Sends requests in JSON."""

    def __init__(self, url: str, name: str, model: Path) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": KEYS[name]}, timeout=60)
        self.base, self.model, self.number = str(model), "", 0

    def ask(self, path: str, **body: Any) -> Any:
        response = self.http.post(f"/{path}", json=body)
        assert response.status_code == 200, response.text
        while True:
            answer = self.http.post("/retrieve_future", json={"request_id": response.json()["request_id"]})
            if answer.status_code != 408:
                return answer.json()

    def create(self, rank: int) -> Any:
        session = self.http.post("/create_session", json={"tags": []}).json()["session_id"]
        lora, self.number = {"rank": rank, "seed": 7}, 0
        answer = self.ask("create_model", session_id=session, model_seq_id=0, base_model=self.base, lora_config=lora)
        self.model = answer.get("model_id", "")
        return answer

    def numbered(self, path: str, **body: Any) -> Any:
        self.number += 1
        return self.ask(path, model_id=self.model, seq_id=self.number, **body)

    def forward_backward(self, seed: int) -> Any:
        data = []
        for count in (7, 12, 9):
            tokens = [
                (seed * 31 + count * position * position + 5 * position) % 290 + 3 for position in range(count + 1)
            ]
            inputs = {
                "target_tokens": {"data": tokens[1:], "dtype": "int64"},
                "weights": {"data": [1.0] * count, "dtype": "float32"},
            }
            data.append({"model_input": {"chunks": [{"tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs})
        return self.numbered("forward_backward", forward_backward_input={"data": data, "loss_fn": "cross_entropy"})

    def step(self) -> Any:
        return self.numbered("optim_step", adam_params={"learning_rate": 1e-3, "eps": 1e-3})

    def train(self, rank: int) -> list[float]:
        """Train a new model for a few steps; return its losses."""
        assert self.create(rank)["type"] == "create_model"
        losses = []
        for seed in range(STEPS):
            losses.append(self.forward_backward(seed)["metrics"]["loss:sum"])
            assert "error" not in self.step()
        return losses


def is_out_of_memory(answer: Any) -> bool:
    return answer.get("category") == "server" and "memory has no room" in answer["error"]


@pytest.mark.nightly_cases("one rank", "DP2")  # covered: TP2
@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(1, Parallel()), (2, Parallel(tensor=2)), (2, Parallel())],
    ids=["one rank", "TP2", "DP2"],
)
def test_request_out_of_memory_on_one_rank_fails_alone(tmp_path: Path, ranks: int, parallel: Parallel) -> None:
    model = write_tiny_checkpoint(tmp_path / "qwen3", "qwen3", num_hidden_layers=2)
    settings = ServeConfig(
        model=model, port=0, storage=tmp_path / "storage", precision="fp32", parallel=parallel, platform="cpu"
    )
    with service(settings, ranks, tmp_path / "run", 200.0, run_short_of_memory) as url:
        alice, bob, mallory = (Tenant(url, name, model) for name in KEYS)
        undisturbed = [alice.train(8), bob.train(16)]
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(alice.train, 8), pool.submit(bob.train, 16)]
            hungry_answers = hungry(mallory, exhaust_passes=parallel.tensor == 1)
            disturbed = [item.result(120) for item in futures]
    for expected, losses in zip(undisturbed, disturbed, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
    assert all(is_out_of_memory(item) for item in hungry_answers["refused"]), hungry_answers
    assert hungry_answers["losses"][0] == pytest.approx(hungry_answers["losses"][1], rel=1e-6), (
        "no parameter has changed"
    )


def hungry(tenant: Tenant, *, exhaust_passes: bool) -> dict[str, Any]:
    """Ask for what has no room.

    Args:
        of_passes: also in forward and backward passes. Tensor parallel ranks would wait for one another in them.
    """
    refused = [tenant.create(NEVER_MADE)]
    assert tenant.create(NEVER_STEPPED)["type"] == "create_model"
    losses = []
    for _ in range(2):
        losses.append(tenant.forward_backward(1)["metrics"]["loss:sum"])
        refused.append(tenant.step())
    if exhaust_passes:
        assert tenant.create(NEVER_RUN)["type"] == "create_model"
        refused.append(tenant.forward_backward(1))
        after = tenant.step()
        assert "gradients are incomplete" in after["error"], after
    return {"refused": refused, "losses": losses}
