"""The cache of latent attention: its responses against transformers' ``generate``, adapters' against peft, and its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cached_responses import make_backend

from megascend import Adapters, Lora, Parallel
from megascend.apps.sampling.request import SampleRequest, SampleResult
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from support.generated import GREEDY, assert_equal, generated, prompts
from support.lora_parity import write_adapter

pytestmark = pytest.mark.usefixtures("megatron_imported")

LATENT, ROTATED, LAYERS = 32, 8, 4
"""Widths and layers of tiny models."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, queries without latent": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3, YaRN": ("deepseek_v3", {"rope_parameters": YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
}
LAYOUTS = {
    "single": (1, Parallel()),
    "TP2 + SP": (2, Parallel(tensor=2, expert=2, expert_tensor=1)),
    "PP2": (2, Parallel(pipeline=2)),
}
IN_CI = (("deepseek_v3, YaRN", "TP2 + SP"), ("deepseek_v3, queries without latent", "single"))
CASES = [
    (model, layout) if (model, layout) in IN_CI else pytest.param(model, layout, marks=pytest.mark.nightly)
    for model in MODELS
    for layout in LAYOUTS
]
LORAS = {
    "all": Lora(rank=4, alpha=40.0, seed=1),
    "latents": Lora(rank=8, alpha=60.0, seed=2, targets=("kv_a_proj_with_mqa", "kv_b_proj")),
}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_greedy_responses_equal_transformers_generate(model: str, layout: str, parity_folder: Path) -> None:
    from megascend.apps.sampling import decoders, sampler

    arch, overrides = MODELS[model]
    checkpoint = case_checkpoint(parity_folder, arch, **overrides)
    requests = [SampleRequest(prompt, GREEDY) for prompt in prompts()]
    bytes_per_token: set[float] = set()

    class Measured(decoders.KeyValues):
        def begin(self) -> None:
            super().begin()
            slots = sum(tensors[0].shape[0] * tensors[0].shape[2] for tensors in self._layers.values())
            bytes_per_token.add(self.bytes / slots)

    def on_rank() -> tuple[list[SampleResult], str | None, set[float]]:
        decoders.KeyValues = Measured
        with make_backend(checkpoint, LAYOUTS[layout][1]) as backend:
            responses = sampler.Sampler(backend)
            return responses.generate(requests), responses.cache_unsupported_reason, bytes_per_token

    ranks = run_distributed(on_rank, LAYOUTS[layout][0], init=False, timeout_s=120)
    expected = generated(checkpoint, [(prompt, None) for prompt in prompts()])
    for results, reason, measured in ranks:
        assert reason is None
        assert measured == {(LATENT + ROTATED) * 4}  # of a layer; heads expanded would take 4 * (24 + 16) numbers
        assert_equal(results, expected)


@pytest.mark.parametrize(
    "layout",
    [
        "TP2 + SP",
        pytest.param("single", marks=pytest.mark.nightly),
        pytest.param("PP2", marks=pytest.mark.nightly),
    ],
)
def test_adapters_on_projections_of_latents_equal_peft(layout: str, parity_folder: Path, tmp_path: Path) -> None:
    from megascend.apps.sampling.sampler import Sampler

    checkpoint = case_checkpoint(parity_folder, "deepseek_v3")
    limits = Adapters(max_count=4, max_rank=16)

    def write() -> None:
        with make_backend(checkpoint, Parallel(), adapters=limits) as backend:
            for name, lora in LORAS.items():
                write_adapter(backend, tmp_path / name, lora)

    run_distributed(write, 1, init=False, timeout_s=120)
    first, second, third, fourth = prompts()
    pairs = [(first, "all"), (second, None), (third, "latents"), (fourth, "all"), (first, "latents"), (first, None)]
    requests = [SampleRequest(prompt, GREEDY, name) for prompt, name in pairs]

    def on_rank() -> tuple[list[SampleResult], list[SampleResult], str | None]:
        with make_backend(checkpoint, LAYOUTS[layout][1], adapters=limits) as backend:
            for name in LORAS:
                backend.load_adapter(name, tmp_path / name)
            sampler = Sampler(backend)
            single = sampler.generate([request for request in requests if request.adapter == "latents"])
            return sampler.generate(requests), single, sampler.cache_unsupported_reason

    ranks = run_distributed(on_rank, LAYOUTS[layout][0], init=False, timeout_s=120)
    expected = generated(checkpoint, [(prompt, name and tmp_path / name) for prompt, name in pairs])
    assert (
        len({tuple(tokens) for (prompt, _), (tokens, *_) in zip(pairs, expected, strict=True) if prompt == first}) == 3
    )
    for mixed, single, reason in ranks:
        assert reason is None
        assert_equal(mixed, expected)
        assert_equal(single, [expected[index] for index, (_, name) in enumerate(pairs) if name == "latents"])
