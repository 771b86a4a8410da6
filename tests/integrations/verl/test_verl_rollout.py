"""The actor of a rollout replica without Ray: samples and weight updates, compared with transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

from verl_runs import python

from megascend.errors import ConfigError, EngineError
from megascend.integrations.verl.rollout_server import RolloutServer
from megascend.integrations.verl.rollout_settings import translate_rollout
from megascend.sync.delivery import Delivery
from megascend.sync.push import push_tensors

pytestmark = pytest.mark.nightly

PROMPT = list(range(40, 60))
SETTINGS = {
    "name": "megascend",
    "tensor_model_parallel_size": 1,
    "dtype": "float32",
    "prompt_length": 32,
    "response_length": 8,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollout")
    command = ["-m", "megascend", "new-model", "qwen3", "--arch", "qwen3", "--hidden", "64", "--layers", "2"]
    new_model = python(command, folder, VERL_ENGINE_VENDOR="")
    assert new_model.returncode == 0, new_model.stderr
    return folder / "qwen3"


class Served:
    """A server of the local engine, under the name that a delivery asks for."""

    def __init__(self, model: Path) -> None:
        self.name = "replica"
        self.server = RolloutServer(translate_rollout(SETTINGS), str(model), 0, [257])
        asyncio.run(self.server.start())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def sampled(self, **parameters: Any) -> Any:
        return asyncio.run(self.server.generate(PROMPT, {"temperature": 1.0, "logprobs": True, **parameters}, "1"))


def reference(model: Any, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        scores = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_log_probabilities_are_those_of_transformers_before_and_after_an_update(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference_model: Any = AutoModelForCausalLM.from_pretrained(model)
    served = Served(model)
    first = served.sampled()
    assert len(first.token_ids) == 8
    assert first.log_probs == pytest.approx(reference(reference_model, first.token_ids), abs=1e-5)
    assert first.extra_fields["global_steps"] is None
    with torch.no_grad():
        for parameter in reference_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    delivery = Delivery(transport="gloo", device=torch.device("cpu"), bucket_bytes=100_000, timeout_s=60)
    push_tensors(delivery, [served.server.engine], served.announce(5), dict(reference_model.state_dict()))
    second = served.sampled()
    assert second.log_probs == pytest.approx(reference(reference_model, second.token_ids), abs=1e-5)
    assert (second.extra_fields["min_global_steps"], second.extra_fields["global_steps"]) == (5, 5)
    delivery.close()
    asyncio.run(served.close())


def test_unsupported_sampling_requests_raise(model: Path) -> None:
    served = Served(model)
    for parameters, message in (
        ({"top_p": 0.5}, "top_p=0.5"),
        ({"presence_penalty": 1.0}, "presence_penalty=1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            served.sampled(**parameters)
    with pytest.raises(ConfigError, match="image_data: only text"):
        asyncio.run(served.generate(PROMPT, {}, "1", image_data=["x"]))
    with pytest.raises(EngineError, match="leaves no room"):
        asyncio.run(served.generate(PROMPT * 2, {}, "1"))
    with pytest.raises(ConfigError, match="trainer_mode=sync"):
        asyncio.run(served.abort_all_requests())
    asyncio.run(served.close())
