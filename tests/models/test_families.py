"""Every declared architecture, in every layout and on every engine, against transformers and peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend.apps.sampling.request import SampleRequest, SamplingParams
from megascend.models import architecture_named
from megascend.models.checkpoint_files.architectures import make_known_to_transformers
from megascend.models.registry import proven
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    TrainingCurve,
    bounds,
    case_backend,
    case_checkpoint,
    causal_samples,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from support.exported import exported_tensors
from support.forked_programs import run_forked
from support.lora_parity import adapter_backend, case_adapter
from support.model_checks import assert_within
from support.parity_matrix import family_matrix
from support.stacks import family_params, stack_marks

pytestmark = pytest.mark.usefixtures("megatron_imported")

ENGINES = Path(__file__).with_name("engine_steps.py")
STEPS = 3
IN_CI = (
    "deepseek_v2: single",
    "deepseek_v3: CP2",
    "deepseek_v32: TP2 x EP2 + SP",
    "glm_moe_dsa: CP2",
    "glm4_moe_lite: PP2",
    "gpt_oss: CP2",
    "hy_v3: EP2",
    "minimax_m2: TP2 + SP",
    "mistral: single",
    "mixtral: EP2",
    "nemotron_h: TP2 x EP2 + SP",
    "nemotron_h: CP2",
    "seed_oss: TP2 + SP",
)
"""Each particular of a family once, and each way in which a layout divides it; the others are nightly.

Covered elsewhere on every commit: deepseek_v3 and gpt_oss with TP2 x EP2 + SP by every gradient (test_gradients.py), gpt_oss and
ernie4_5_moe on one rank by the trained weights of their exports (below).
"""
ALL = [architecture.model_type for architecture in proven()]
NEW = [name for name in ALL if name not in ("llama", "qwen2", "qwen3", "qwen3_moe")]
CACHED = [name for name in NEW if name not in ("deepseek_v32", "glm_moe_dsa", "nemotron_h")]
"""Families for which the sampler keeps keys and values."""
CASES = family_matrix()


def nightly_but(names: list[str], in_ci: tuple[str, ...] = (), *, megatron: bool = True) -> list[Any]:
    def marks(name: str) -> list[pytest.MarkDecorator]:
        nightly = [] if name in in_ci else [pytest.mark.nightly]
        return nightly + (stack_marks(name) if megatron else [])

    return [pytest.param(name, marks=marks(name)) for name in names]


@pytest.mark.difference_cases(
    "nemotron_h: CP2",  # differs: HybridModel: packed samples joined over context ranks
    "nemotron_h: TP2 x EP2 + SP",  # differs: HybridModel: state spaces, latent experts
    "deepseek_v32: TP2 x EP2 + SP",  # differs: sparse attention
    "glm_moe_dsa: CP2",  # differs: sparse attention: gathered keys, layers that share a choice
)
@pytest.mark.parametrize("case", family_params(CASES, IN_CI))
def test_training_equals_hugging_face(case: Case, parity_folder: Path) -> None:
    checkpoint, tokens = case_checkpoint(parity_folder, case.arch), token_lists()
    reference = hf_reference(parity_folder, checkpoint, tokens, steps=STEPS)
    difference = differences(train_case(case, checkpoint, tokens, steps=STEPS), reference)
    loss_bound, norm_bound = case.loss_bound, case.norm_bound
    if difference.loss > loss_bound or difference.grad_norm > norm_bound:
        loss_bound, norm_bound = bounds(case, parity_folder, checkpoint, tokens, STEPS)
    assert_within(difference, loss=loss_bound, grad_norm=norm_bound)
    if case.precision == "fp32" and difference.logits is not None:
        assert difference.logits <= case.logits_bound, difference


@pytest.mark.difference_cases("nemotron_h")  # differs: HybridModel: conversion of weights
@pytest.mark.parametrize("arch", nightly_but(NEW, ("gpt_oss", "ernie4_5_moe", "minimax_m2")))
def test_export_is_the_source_and_after_training_transformers_weights(
    arch: str, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint, tokens = case_checkpoint(parity_folder, arch), token_lists()

    def on_rank() -> None:
        with case_backend(Case(arch, arch=arch), checkpoint) as backend:
            backend.export_hf(tmp_path / "before")
            for _ in range(STEPS):
                backend.forward_backward(causal_samples(tokens))
                backend.optimizer_step()
            backend.export_hf(tmp_path / "after")

    run_distributed(on_rank, 1, init=False, timeout_s=120)
    source, before, after = (
        exported_tensors(folder) for folder in (checkpoint, tmp_path / "before", tmp_path / "after")
    )
    assert before.keys() == source.keys()
    assert [name for name, tensor in source.items() if not torch.equal(before[name], tensor)] == []
    expected = hf_reference(parity_folder, checkpoint, tokens, steps=STEPS, weights=True).weights
    assert expected.keys() <= after.keys()
    # Adam moves a weight whose gradient is near 0 by up to a learning rate either way.
    distances = [(after[name] - tensor).abs().mean() for name, tensor in expected.items()]
    assert max(distances) < 2e-5
    without_gradient = ("correction_bias", *architecture_named(arch).without_gradient)
    trained = [name for name in expected if not any(part in name for part in without_gradient)]
    assert [name for name in trained if torch.equal(after[name], source[name])] == []
    assert all(torch.equal(after[name], source[name]) for name in expected if name not in trained)


@pytest.mark.parametrize("arch", nightly_but(NEW, ("gpt_oss", "minimax_m2")))
def test_merged_export_computes_in_transformers_what_the_adapter_does_here(
    arch: str, parity_folder: Path, tmp_path: Path
) -> None:
    case, checkpoint, tokens = Case("single", arch=arch), case_checkpoint(parity_folder, arch), token_lists()
    adapter = case_adapter(checkpoint, case)

    def on_rank() -> list[torch.Tensor]:
        with adapter_backend(case, checkpoint) as backend:
            backend.load_adapter("tenant", adapter)
            backend.export_hf(tmp_path / "merged", adapter="tenant")
            return backend.forward(causal_samples(tokens), logits=True, adapter="tenant").logits

    def in_transformers() -> list[torch.Tensor]:
        from transformers import AutoModelForCausalLM

        make_known_to_transformers(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            return [model(torch.tensor([ids[:-1]])).logits[0] for ids in tokens]

    (logits,) = run_distributed(on_rank, 1, init=False, timeout_s=120)
    (expected,) = run_distributed(in_transformers, 1, init=False, timeout_s=120)
    assert max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True)) < 5e-5
    source, merged = exported_tensors(checkpoint), exported_tensors(tmp_path / "merged")
    fixed = architecture_named(arch).without_adapters
    adapted = [name for name in source if not name.removesuffix(".weight").endswith(fixed)] if fixed else source
    attention = [name for name in adapted if ".self_attn." in name and name.endswith("proj.weight")]
    assert all(not torch.equal(source[name], merged[name]) for name in attention)


@pytest.mark.parametrize("arch", nightly_but(NEW))
def test_self_check_compares_a_slice_with_transformers(arch: str, parity_folder: Path) -> None:
    def on_rank() -> Any:
        with case_backend(Case(arch, arch=arch), case_checkpoint(parity_folder, arch), self_check=True) as backend:
            return backend.self_check.status, backend.self_check.reason, backend.self_check.not_shown

    assert run_distributed(on_rank, 1, init=False, timeout_s=240) == [("agrees", "", "")]


@pytest.mark.parametrize("arch", nightly_but(CACHED, ("deepseek_v3", "gpt_oss")))
def test_sampler_decodes_with_a_cache_what_transformers_scores(arch: str, parity_folder: Path) -> None:
    from megascend.apps.sampling.sampler import Sampler

    checkpoint, prompts = case_checkpoint(parity_folder, arch), ([5, 6, 7, 8, 9], [40], list(range(11, 41)))
    requests = [SampleRequest(prompt, SamplingParams(12, temperature=0.0)) for prompt in prompts]

    def on_rank() -> Any:
        with case_backend(Case(arch, arch=arch), checkpoint) as backend:
            sampler = Sampler(backend)
            return sampler.generate(requests), sampler.cache_unsupported_reason

    def scores(sequences: list[list[int]]) -> list[torch.Tensor]:
        from transformers import AutoModelForCausalLM

        make_known_to_transformers(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            return [model(torch.tensor([tokens])).logits[0].log_softmax(-1) for tokens in sequences]

    ((results, cache_unsupported_reason),) = run_distributed(on_rank, 1, init=False, timeout_s=120)
    assert cache_unsupported_reason is None
    responses = [result.samples[0] for result in results]
    sequences = [[*prompt, *response.tokens] for prompt, response in zip(prompts, responses, strict=True)]
    (references,) = run_distributed(scores, 1, sequences, init=False)
    for prompt, response, logprobs in zip(prompts, responses, references, strict=True):
        positions = logprobs[len(prompt) - 1 : -1]
        expected = positions.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        assert response.logprobs == pytest.approx(expected.tolist(), abs=2e-5)
        assert bool((expected >= positions.max(-1).values - 2e-5).all())


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("single", marks=pytest.mark.nightly)])  # covered: fsdp
@pytest.mark.parametrize("arch", nightly_but(NEW, ("gpt_oss", "deepseek_v32"), megatron=False))
def test_engines_without_megatron_train_it_too(arch: str, engine: str, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint, result = case_checkpoint(parity_folder, arch), tmp_path / "result.json"
    completed = run_forked(ENGINES, engine, checkpoint, STEPS, result, timeout_s=240)
    assert completed.returncode == 0, completed.stderr[-3000:]
    run = TrainingCurve(**json.loads(result.read_text(encoding="utf-8")), logits=[])
    difference = differences(run, hf_reference(parity_folder, checkpoint, token_lists(), steps=STEPS))
    loss_bound, norm_bound = bounds(Case(engine, arch=arch), parity_folder, checkpoint, token_lists(), STEPS)
    assert_within(difference, loss=loss_bound, grad_norm=norm_bound)


@pytest.mark.parametrize("arch", ALL)
def test_checkpoint_is_counted_by_its_headers(arch: str, parity_folder: Path) -> None:
    from megascend.models.checkpoint_files.info import inspect_checkpoint, linear_layers

    checkpoint = case_checkpoint(parity_folder, arch)
    info = inspect_checkpoint(checkpoint)
    tensors = exported_tensors(checkpoint)
    built = [tensor for name, tensor in tensors.items() if not info.architecture.copies(name, {})]
    assert info.parameter_count == sum(tensor.numel() for tensor in built)
    assert not [name for name in linear_layers(info) if "norm" in name or name.endswith(("gate", "router", "bias"))]
