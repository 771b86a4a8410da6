"""Distillation from a teacher's candidates: values and gradients of layouts and engines against float64 by transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend import Candidates, Loss, LossInputs, Sample
from megascend.config import Parallel
from megascend.errors import DataError
from megascend.testing import run_distributed
from megascend.testing.parity import PROMPT, TINY_VOCABULARY, Case, case_backend, case_checkpoint, token_lists
from megascend.training.batch.losses import BUILT_IN
from support.forked_programs import run_forked, run_launched
from support.gradients import Gradients, differences, reduced_gradients

pytestmark = [pytest.mark.usefixtures("megatron_imported")]
PROGRAM = Path(__file__).with_name("distilled_gradients.py")
BETA = 0.3
TEMPERATURE = 0.7


def policy(logprobs: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    assert inputs.entropy is not None
    return -logprobs - 0.1 * inputs.entropy


LOSSES = {
    "forward_kl": BUILT_IN["forward_kl"],
    "reverse_kl": BUILT_IN["reverse_kl"],
    "jsd": BUILT_IN["jsd"].with_settings(beta=BETA),
    "policy": Loss("policy", policy, entropy=True),
}
CASES = [
    Case("single"),
    Case("padded", packing=False, micro_batch_tokens=200),
    Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    Case("CP2", 2, Parallel(context=2), optimizer={"distributed": False}),
    Case("PP2, padded", 2, Parallel(pipeline=2), packing=False, micro_batch_tokens=200),
]


def samples(name: str = "forward_kl") -> list[Sample]:
    """Build samples for a loss."""
    return masked() if name == "policy" else distilled()


def masked() -> list[Sample]:
    """Build samples of a temperature, with 1 to 4 allowed tokens for most targets, the target among them, and all for others."""
    generator = torch.Generator().manual_seed(4)
    batch = []
    for number, tokens in enumerate(token_lists()):
        sample = Sample.causal(tokens, PROMPT)
        sample.weights[-1] = 0.5
        sample.temperature = TEMPERATURE
        if number % 4 != 3:
            scores = torch.rand(len(sample), TINY_VOCABULARY, generator=generator)
            scores.scatter_(1, sample.target_ids[:, None], 2.0)  # first
            allowed = scores.topk(1 + number % 4).indices.int()
            allowed[::3, 1:] = -1
            allowed[1::3] = -1
            sample.allowed = allowed.flip(1)
        batch.append(sample)
    return batch


def distilled() -> list[Sample]:
    """Build samples whose candidates are of 2 to 6 slots, some unused; prompts have none, and a token has the weight 0.5."""
    generator = torch.Generator().manual_seed(2)
    batch = []
    for number, tokens in enumerate(token_lists()):
        slots = 2 + number % 5
        teacher = (2 * torch.randn(len(tokens) - 1, TINY_VOCABULARY, generator=generator)).log_softmax(-1)
        # Of the whole vocabulary and not the likeliest ones only: also both halves of a divided vocabulary.
        ids = torch.rand(teacher.shape, generator=generator).topk(slots).indices
        targets = torch.tensor(tokens[1::2])
        ids[::2, 0] = torch.where((ids[::2] == targets[:, None]).any(1), ids[::2, 0], targets)
        ids[::3, 1:] = -1
        ids[: PROMPT - 1] = -1
        sample = Sample.causal(tokens, PROMPT)
        sample.weights[-1] = 0.5
        sample.candidates = Candidates(ids, teacher.gather(1, ids.clamp_min(0)))
        batch.append(sample)
    return batch


@pytest.fixture(scope="module")
def expected(parity_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("distillation")
    job, result = folder / "job.safetensors", folder / "result.safetensors"
    tensors = {}
    for index, (tokens, sample) in enumerate(zip(token_lists(), samples(), strict=True)):
        tensors |= {
            f"tokens.{index}": torch.tensor(tokens),
            f"weights.{index}": sample.weights,
            f"ids.{index}": sample.candidates.ids.long(),
            f"teacher.{index}": sample.candidates.logprobs,
        }
        sampled = masked()[index].allowed
        unmasked = torch.full((len(tokens) - 1, 1), -1)
        tensors[f"allowed.{index}"] = unmasked if sampled is None else sampled.long()
    save_file(tensors, job)
    arguments = (case_checkpoint(parity_folder, "qwen3"), job, BETA, TEMPERATURE, result)
    completed = run_forked(PROGRAM, *arguments, timeout_s=240)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return load_file(result)


def gradients_of(expected: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}/"): value for key, value in expected.items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.nightly_cases("single", "padded")  # covered: PP2, padded; TP2 + SP
def test_gradients_of_all_parameters_are_those_of_plain_float64(
    case: Case, expected: dict[str, torch.Tensor], parity_folder: Path
) -> None:
    checkpoint = case_checkpoint(parity_folder, case.arch)

    def on_rank() -> dict[str, tuple[Gradients, float]]:
        results = {}
        for name, loss in LOSSES.items():
            gradients = reduced_gradients(case, checkpoint, samples(name), loss)
            with case_backend(case, checkpoint) as backend:
                results[name] = gradients, backend.forward_backward(backend.shard(samples(name)), loss).loss
        return results

    ranks = run_distributed(on_rank, case.world_size, init=False, timeout_s=240)
    for name in LOSSES:
        assert differences([rank[name][0] for rank in ranks], gradients_of(expected, name), {}) == {}, name
        for rank in ranks:
            assert rank[name][1] == pytest.approx(float(expected[name]), rel=2e-6), name


@pytest.mark.nightly_cases("fsdp")  # covered: single
@pytest.mark.parametrize("engine", ["fsdp", "single"])
def test_engines_of_transformers_have_the_same_gradients(
    engine: str, expected: dict[str, torch.Tensor], parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint, ranks = case_checkpoint(parity_folder, "qwen3"), 2 if engine == "fsdp" else 1
    code = """
import sys
import torch
from torch.distributed.tensor import DTensor
import megascend
sys.path.insert(0, sys.argv[4])
from test_distillation import LOSSES, samples
engine, checkpoint, result = sys.argv[1:4]
batching = megascend.Batching(packing=engine == "fsdp", micro_batch_tokens=64 if engine == "fsdp" else 200)
gradients = {}
with megascend.make_backend(engine, model=checkpoint, precision="fp32", platform="cpu", batching=batching,
                            optimizer=megascend.Adam(lr=0.0, max_grad_norm=1e9), self_check=False) as backend:
    for name, loss in LOSSES.items():
        gradients[name] = backend.forward_backward(backend.shard(samples(name)), loss).loss
        for key, parameter in backend.engine.model.named_parameters():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradients[f"{name}/{key}"] = gradient.clone()
        backend.optimizer_step()
    if backend.rank == 0:
        torch.save(gradients, result)
"""
    program, result = tmp_path / "program.py", tmp_path / "result.pt"
    program.write_text(code, encoding="utf-8")
    completed = run_launched(program, ranks, engine, checkpoint, result, Path(__file__).parent)
    assert completed.returncode == 0, completed.stderr[-3000:]
    results = torch.load(result)
    for name in LOSSES:
        assert results[name] == pytest.approx(float(expected[name]), rel=2e-6), name
        for key, gradient in gradients_of(expected, name).items():
            difference = (results[f"{name}/{key}"].double() - gradient).norm() / gradient.norm()
            assert float(difference) < 1e-4, (name, key)


def test_forward_scores_the_policy_that_was_sampled(parity_folder: Path) -> None:
    """Log-probabilities and entropies equal those that plain PyTorch computes from the logits of another call."""
    checkpoint = case_checkpoint(parity_folder, "qwen3")

    def on_rank() -> None:
        batch = masked()
        plain = [replace(sample, temperature=1.0, allowed=None) for sample in batch]
        with case_backend(Case("single"), checkpoint) as backend:
            scores, logits = backend.forward(batch, entropy=True), backend.forward(plain, logits=True).logits
        assert scores.entropy is not None
        assert logits is not None
        for sample, logprobs, entropies, row_logits in zip(batch, scores.logprobs, scores.entropy, logits, strict=True):
            possible = torch.ones_like(row_logits, dtype=torch.bool)
            if sample.allowed is not None:
                possible = torch.zeros_like(possible).scatter(
                    1, sample.allowed.long().clamp_min(0), sample.allowed >= 0
                )
                possible |= (sample.allowed < 0).all(1)[:, None]
            policy = (row_logits.double() / TEMPERATURE).masked_fill(~possible, -1e30).log_softmax(-1)
            chosen = policy.gather(1, sample.target_ids[:, None])[:, 0].float()
            trained = sample.weights > 0
            torch.testing.assert_close(logprobs[trained], chosen[trained], atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(entropies.double(), -(policy.exp() * policy).sum(1), atol=5e-6, rtol=1e-5)

    run_distributed(on_rank, 1, init=False)


REFUSED: list[tuple[Any, Any, str]] = [
    (distilled, lambda s: setattr(s[1], "candidates", None), "'forward_kl' needs candidates, which sample 1 does not"),
    (
        distilled,
        lambda s: s[2].candidates.ids[PROMPT].fill_(-1),
        f"sample 2 has no candidate at position {PROMPT}, whose target has a weight",
    ),
    (
        distilled,
        lambda s: s[0].candidates.ids[PROMPT].fill_(5000),
        r"the candidate 5000, outside the vocabulary \[0, ",
    ),
    (
        masked,
        lambda s: setattr(s[1], "temperature", 1.0),
        "sample 1 has the temperature 1, and sample 0 0.7; one call has",
    ),
    (
        masked,
        lambda s: setattr(s[0], "candidates", distilled()[0].candidates),
        "sample 0 has candidates and allowed",
    ),
    (masked, lambda s: s[0].allowed.fill_(5000), "sample 0 allows the token 5000, outside the vocabulary"),
    (masked, lambda s: s[0].allowed.fill_(s[0].target_ids.max() + 1), "is not among its allowed tokens"),
]
"""Samples, a change of them, and words of the error."""


def test_samples_that_cannot_be_scored_are_refused(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3")

    def on_rank() -> None:
        with case_backend(Case("single"), checkpoint) as backend:
            for make, change, message in REFUSED:
                batch = make()
                change(batch)
                with pytest.raises(DataError, match=message):
                    backend.forward_backward(batch, "forward_kl" if make is distilled else LOSSES["policy"])

    run_distributed(on_rank, 1, init=False)


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([[1, 2], [3, 3]], [[-1.0, -1.0]] * 2, r"candidates.ids\[1\] has the token 3 twice"),
        ([[1, 2]], [[-1.0]], r"logprobs has shape \[1, 1\], and candidates.ids \[1, 2\]"),
        ([[1, -2]], [[-1.0, -1.0]], "-1 at unused slots"),
        ([[1.0, 2.0]], [[-1.0, -1.0]], "must be integers"),
        ([[1, 2]], [[0.25, 0.5]], "log-probabilities are finite and at most 0"),
        ([[1, 2]], [[-1.0, float("nan")]], "log-probabilities are finite and at most 0"),
        ([[1, 2]], [[-0.1, -0.2]], "probabilities that sum to 1.724, above 1"),
    ],
)
def test_candidates_are_checked(ids: Any, logprobs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Candidates(ids, logprobs)


def test_rows_of_candidates_may_have_different_lengths() -> None:
    candidates = Candidates.from_rows([[], [5], [7, 1]], [[], [-1.0], [-1.0, -2.0]])
    assert candidates.ids.tolist() == [[-1, -1], [5, -1], [7, 1]]
    assert candidates.logprobs.tolist() == [[0.0, 0.0], [-1.0, 0.0], [-1.0, -2.0]]
    sample = Sample.causal([3, 5, 7], candidates=candidates)
    assert sample.candidates.ids.tolist() == [[5, -1], [7, 1]]
