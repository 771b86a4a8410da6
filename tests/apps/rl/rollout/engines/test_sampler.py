"""Sampling of the local engine, compared with the model's probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend.apps.rl.rollout.engines.local_model import load
from megascend.apps.rl.rollout.engines.sampler import draw, make_rows, sample, sequence_logprobs
from megascend.testing import write_tiny_checkpoint
from weightwire.engine import Sampling

PROMPTS = ([5, 6, 7, 8, 9], [40], [11, 12, 13])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("sampler") / "qwen3", "qwen3")
    return load(path, torch.float32, torch.device("cpu"))


@contextlib.contextmanager
def version_0() -> Iterator[int]:
    yield 0


def exact(model: Any, prompt: list[int], tokens: tuple[int, ...], temperature: float) -> list[float]:
    """Compute log p of each token with a forward pass of transformers over one sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(tokens)]


def test_logprobs_of_a_batch_match_single_sequences(model: Any) -> None:
    for temperature in (1.0, 0.7):
        sampling = Sampling(max_tokens=9, temperature=temperature, seed=3)
        rows = [row for prompt in PROMPTS for row in make_rows(prompt, sampling, 2, 0)]
        sample(model, rows, version_0)
        for row in rows:
            completion = row.completion()
            expected = exact(model, list(row.prompt), completion.tokens, temperature)
            assert completion.logprobs == pytest.approx(expected, abs=1e-5)
            assert len(completion.tokens) == 9


def test_response_says_from_which_tokens_each_was_drawn(model: Any) -> None:
    sampling = Sampling(max_tokens=9, temperature=0.7, seed=3, top_k=12, top_p=0.6)
    rows = make_rows(PROMPTS[0], sampling, 2, 0)
    sample(model, rows, version_0)
    for row in rows:
        completion = row.completion()
        with torch.no_grad():
            logits = model(torch.tensor([[*row.prompt, *completion.tokens]])).logits[0].double()
        assert completion.allowed is not None
        for index, (token, allowed) in enumerate(zip(completion.tokens, completion.allowed, strict=True)):
            logprobs = (logits[len(row.prompt) + index - 1] / 0.7).log_softmax(-1)
            top = logprobs.topk(12)
            mass = top.values.softmax(0).cumsum(0)
            count = int((mass < 0.6).sum()) + 1
            assert list(allowed) == sorted(top.indices[:count].tolist())
            expected = float(logprobs[token] - logprobs[list(allowed)].logsumexp(0))
            assert completion.logprobs[index] == pytest.approx(expected, abs=1e-5)
    plain = make_rows(PROMPTS[0], Sampling(max_tokens=2, seed=3), 1, 0)
    sample(model, plain, version_0)
    assert plain[0].completion().allowed is None


def test_samples_do_not_depend_on_other_rows_of_the_batch(model: Any) -> None:
    sampling = Sampling(max_tokens=8, seed=1)
    batch_rows = [row for prompt in PROMPTS for row in make_rows(prompt, sampling, 2, 0)]
    sample(model, batch_rows, version_0)
    single_rows = make_rows(PROMPTS[2], sampling, 2, 0)
    sample(model, single_rows, version_0)
    assert [row.tokens for row in single_rows] == [row.tokens for row in batch_rows[4:]]


def test_greedy_takes_the_likeliest_and_stop_tokens_stop(model: Any) -> None:
    rows = make_rows(PROMPTS[0], Sampling(max_tokens=6, temperature=0.0), 1, 0)
    sample(model, rows, version_0)
    reached = list(PROMPTS[0])
    for token in rows[0].tokens:
        with torch.no_grad():
            assert token == int(model(torch.tensor([reached])).logits[0, -1].argmax())
        reached.append(token)
    stop = rows[0].tokens[1]
    repeated = make_rows(PROMPTS[0], Sampling(max_tokens=6, temperature=0.0, stop_token_ids=(stop,)), 1, 0)
    sample(model, repeated, version_0)
    expected = rows[0].tokens[: rows[0].tokens.index(stop) + 1]
    assert (repeated[0].tokens, repeated[0].completion().finish_reason) == (expected, "stop")
    assert rows[0].completion().finish_reason == "length"


def test_token_frequencies_match_probabilities() -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3])
    rows = make_rows([1], Sampling(max_tokens=1, seed=11), 20_000, 0)
    choice = draw(probabilities.log().expand(len(rows), 4), rows)
    tokens, logprobs = choice.tokens, choice.drawn_logprobs
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / len(rows)
    # Four standard deviations of a share of 20 000 draws.
    assert float((shares - probabilities).abs().max()) < 4 * (0.25 / len(rows)) ** 0.5
    assert shares[1] == 0
    assert logprobs[tokens.index(2)] == pytest.approx(float(torch.tensor(0.6).log()), abs=1e-6)


def test_weight_change_between_tokens_shows_in_logprobs_and_versions(model: Any) -> None:
    passes = 0
    before = {name: parameter.data.clone() for name, parameter in model.named_parameters()}

    @contextlib.contextmanager
    def step() -> Iterator[int]:
        nonlocal passes
        passes += 1
        if passes == 4:
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.5
        yield int(passes >= 4)

    rows = make_rows(PROMPTS[0], Sampling(max_tokens=7, seed=2), 2, 0)
    try:
        sample(model, rows, step)
        for row in rows:
            new = sequence_logprobs(model, [*row.prompt, *row.tokens]).logprobs[len(row.prompt) - 1 :]
            assert row.logprobs[3:] == pytest.approx(new[3:], abs=3e-5)
            assert row.versions == [0, 0, 0, 1, 1, 1, 1]
            assert (row.completion().first_version, row.completion().last_version) == (0, 1)
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = before[name]
    for row in rows:
        old = sequence_logprobs(model, [*row.prompt, *row.tokens]).logprobs[len(row.prompt) - 1 :]
        assert row.logprobs[:3] == pytest.approx(old[:3], abs=3e-5)
        assert row.logprobs[3:] != pytest.approx(old[3:], abs=1e-3)
