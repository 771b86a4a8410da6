"""Conversion of SkyRL's prepared batches to samples, and of results to SkyRL's answers; without SkyRL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from megascend.apps.sampling.request import SampledSequence, SampleResult
from megascend.errors import ConfigError, DataError
from megascend.integrations.skyrl.batches import pass_of, sample_output, sample_request_of
from megascend.integrations.skyrl.launch import engine_command, settings_from
from megascend.integrations.skyrl.settings import BackendConfig, serve_settings


def batch_of(loss: str, settings: Any = None, kind: str = "encoded_text", **fields: Any) -> SimpleNamespace:
    """Build two requests: one sample of ann, two of bob."""
    text = SimpleNamespace(type=kind, tokens=[1, 2, 3])
    columns = {
        "token_weights": [1.0, 0.0, 2.0],
        "sampling_logprobs": [-1.0] * 3,
        "advantages": [0.5, 0.5, -1.0],
        **fields,
    }
    return SimpleNamespace(
        all_model_inputs=[SimpleNamespace(chunks=[text])] * 3,
        all_targets=[[2, 3, 4]] * 3,
        **{f"all_{name}": [values] * 3 for name, values in columns.items()},
        all_loss_fns=[loss] * 3,
        all_loss_fn_configs=[settings] * 3,
        request_batch_slices=[("1", "ann", 0, 1), ("2", "bob", 1, 3)],
    )


def test_request_pass_has_its_samples_and_a_summed_loss() -> None:
    request_pass = pass_of(batch_of("cross_entropy"), 1)
    assert (request_pass.request, request_pass.model, len(request_pass.samples)) == ("2", "bob", 2)
    logprobs = [torch.tensor([-1.0, -2.0, -3.0])] * 2
    outputs = request_pass.outputs(logprobs)
    assert outputs[1]["logprobs"] == {"data": [-1.0, -2.0, -3.0], "dtype": "float32", "shape": [3]}
    assert outputs[1]["elementwise_loss"]["data"] == [1.0, 0.0, 6.0]


def test_policy_losses_take_advantages_and_their_settings() -> None:
    logprobs = [torch.tensor([-1.0, -1.0, -0.5])]
    ratio = 1.6487212707  # exp(0.5)
    plain = pass_of(batch_of("importance_sampling", token_weights=[]), 0).outputs(logprobs)
    assert plain[0]["elementwise_loss"]["data"] == pytest.approx([-0.5, -0.5, ratio])
    # a bad token whose probability has grown is not clipped by the pessimistic minimum
    clipped = pass_of(batch_of("ppo", {"clip_high_threshold": 1.2}, token_weights=[], advantages=[1.0] * 3), 0)
    assert clipped.outputs(logprobs)[0]["elementwise_loss"]["data"] == pytest.approx([-1.0, -1.0, -1.2])


def test_unsupported_batches_raise_errors() -> None:
    with pytest.raises(ConfigError, match="dppo"):
        pass_of(batch_of("dppo"), 0)
    with pytest.raises(DataError, match="image"):
        pass_of(batch_of("cross_entropy", kind="image"), 0)
    with pytest.raises(DataError, match="length"):
        pass_of(batch_of("cross_entropy", token_weights=[1.0]), 0)


def test_a_request_to_sample() -> None:
    params = SimpleNamespace(
        max_tokens=4, temperature=0.5, top_p=0.9, top_k=3, seed=7, stop_tokens=[5], stop_strings=["x"]
    )
    text = SimpleNamespace(chunks=[SimpleNamespace(type="encoded_text", tokens=[1, 2])])
    batch = SimpleNamespace(
        all_model_inputs=[text] * 2, all_sampling_params=[params] * 2, request_batch_slices=[("1", "ann", 0, 2, True)]
    )
    request = sample_request_of(batch, 0, "m0-sampler")
    assert (list(request.prompt), request.num_samples, request.adapter, request.prompt_logprobs) == (
        [1, 2],
        2,
        "m0-sampler",
        True,
    )
    assert (request.params.seed, request.params.stop, request.params.top_k) == (7, (5, "x"), 3)


def test_settings_and_the_engines_command() -> None:
    settings = serve_settings("model", BackendConfig(max_lora_adapters=3, max_lora_rank=16, precision="fp32"))
    assert (settings.max_models, settings.max_samplers, settings.max_rank, settings.precision) == (3, 3, 16, "fp32")
    config = SimpleNamespace(backend_config={"ranks": 2, "parallel": {"tensor": 2}})
    command = engine_command(config, ["--base-model", "model"])
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert command[-3:] == ["--engine", "--base-model", "model"]
    words = [
        "--base-model",
        "model",
        "--backend",
        "a:B",
        "--backend-config",
        '{"ranks": 2, "max_lora_rank": 4}',
        "--x",
        "1",
    ]
    assert (settings_from(words).model.name, settings_from(words).max_rank) == ("model", 4)
    with pytest.raises(ValueError, match="Extra inputs"):
        BackendConfig(tensor_parallel_size=2)  # type: ignore[call-arg]


class Output030(BaseModel):
    """Fields of ``skyrl.tinker.types.SampleOutput`` in 0.3.0."""

    sequences: list[dict[str, Any]]
    prompt_logprobs: list[float] | None = None


class Output(BaseModel):
    """Fields of ``skyrl.tinker.types.SampleOutput`` after 0.3.0."""

    sequences: list[dict[str, Any]]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


def test_answers_have_the_prompt_logprobs_that_the_version_can_hold() -> None:
    result = SampleResult(
        samples=(SampledSequence((7, 8), (-0.5, -1.5), "length"),),
        prompt_logprobs=(None, -2.0),
        topk_prompt_logprobs=(None, ((4, -0.1), (9, -2.0))),
    )
    sequences = [{"stop_reason": "length", "tokens": [7, 8], "logprobs": [-0.5, -1.5]}]
    old, new = sample_output(result, Output030), sample_output(result, Output)
    assert old.model_dump() == {"sequences": sequences, "prompt_logprobs": [0.0, -2.0]}
    assert new.model_dump() == {
        "sequences": sequences,
        "prompt_logprobs": [None, -2.0],
        "topk_prompt_logprobs": [None, [(4, -0.1), (9, -2.0)]],
    }
    baseline = sample_output(SampleResult(samples=result.samples), Output)
    assert (baseline.prompt_logprobs, baseline.topk_prompt_logprobs) == (None, None)
