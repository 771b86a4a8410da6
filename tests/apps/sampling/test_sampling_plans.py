"""Pure parts of sampling: choosing tokens, ends of responses, refusals, batches."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from megascend.apps.sampling.choice import Draw, choose, top_logprobs, truncated, uniform
from megascend.apps.sampling.prompts import prompt_fields, score_and_draw
from megascend.apps.sampling.request import SampleRequest, SamplingParams
from megascend.apps.sampling.rows import batches, ends, rows_of, shares

PROBABILITIES = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.15, 0.1])


def shares_of(draws: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> list[float]:
    """Return the frequency of each token in ``draws`` draws."""
    settings = [Draw(temperature, uniform(5, 0, position), top_p, top_k) for position in range(draws)]
    chosen = choose(PROBABILITIES.log().expand(draws, -1), settings)
    counts = Counter(chosen.tokens)
    return [counts[token] / draws for token in range(len(PROBABILITIES))]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2),
        ({"top_k": 2}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 0, 0])),
        ({"top_k": 99}, PROBABILITIES),
        ({"top_p": 0.7}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 0, 0])),
        ({"top_p": 0.71}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 1, 0])),
        # Of the three likeliest, 0.4 and 0.3 have 0.82 of what they have together.
        ({"top_k": 3, "top_p": 0.8}, PROBABILITIES * torch.tensor([0, 1, 0, 1, 0, 0])),
        ({"top_p": 1e-9}, PROBABILITIES * torch.tensor([0, 1, 0, 0, 0, 0])),
    ],
)
def test_token_frequencies_match_probabilities(settings: dict[str, float], expected: torch.Tensor) -> None:
    draws = 3_000
    frequencies = torch.tensor(shares_of(draws, **settings))  # type: ignore[arg-type]
    probabilities = expected / expected.sum()
    assert float((frequencies - probabilities).abs().max()) < 4 * (0.25 / draws) ** 0.5  # four standard deviations
    assert not frequencies[probabilities == 0].any()


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = PROBABILITIES.log().expand(3, -1)
    chosen = choose(logits, [Draw(0.0, 0.0), Draw(0.25, 0.999999), Draw(1.0, 0.0, top_k=1)])
    assert chosen.tokens[0] == chosen.tokens[2] == 1
    assert chosen.logprobs == pytest.approx([math.log(PROBABILITIES[token]) for token in chosen.tokens], abs=1e-6)
    assert (chosen.drawn_logprobs[0], chosen.drawn_logprobs[2]) == (0.0, 0.0)
    cold = (PROBABILITIES**4 / (PROBABILITIES**4).sum())[chosen.tokens[1]]
    assert chosen.drawn_logprobs[1] == pytest.approx(math.log(cold), abs=1e-5)


def test_equally_likely_tokens_are_cut_by_their_ids() -> None:
    left = truncated(torch.zeros(6).log_softmax(-1), 3, 1.0)
    assert left.isfinite().tolist() == [True, True, True, False, False, False]
    assert float(left.exp().sum()) == pytest.approx(1.0)


def test_top_logprobs_are_sorted() -> None:
    ids, values = top_logprobs(PROBABILITIES.log()[None], 3)
    assert ids.tolist() == [[1, 3, 4]]
    assert values.exp().tolist()[0] == pytest.approx([0.4, 0.3, 0.15])


def test_random_numbers_depend_on_seed_sample_and_position() -> None:
    numbers = [uniform(seed, sample, position) for seed in (1, 2) for sample in (0, 1) for position in range(500)]
    assert len(set(numbers)) == 2000
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / 2000 == pytest.approx(0.5, abs=4 * (1 / 12 / 2000) ** 0.5)
    assert uniform(1, 1, 3) == numbers[503]


PIECES = {1: "Hel", 2: "lo", 3: "\nUs", 4: "er:", 5: "é", 6: "."}


def decode(tokens) -> str:
    return "".join(PIECES[token] for token in tokens)


def test_stop_conditions_of_a_response() -> None:
    assert ends([1, 2, 6], (6,), None)
    assert not ends([6, 1], (6,), None)  # checked when it was the newest
    assert ends([1, 2, 6], ((2, 6),), None)
    assert not ends([6], ((2, 6),), None)
    assert not ends([], (6, (2, 6)), None)
    text = ("\nUser:",)
    assert [ends([1, 2, 3, 4][:count], text, decode) for count in range(5)] == [False] * 4 + [True]
    assert ends([2, 6], ("o.", "never"), decode)
    assert not ends([1, 5, 2], ("\u00e9.",), decode)
    assert ends([5] * 100 + [6], ("\u00e9\u00e9.",), decode)


def request(prompt: int = 3, max_tokens: int = 4, **settings: object) -> SampleRequest:
    return SampleRequest(range(prompt), SamplingParams(max_tokens), **settings)  # type: ignore[arg-type]


def test_invalid_request_is_refused_with_the_reason() -> None:
    def refusal(sample_request: SampleRequest) -> str | None:
        return sample_request.refusal({"alice"}, 100, 20, "the model's context")

    assert refusal(request(16, 4, adapter="alice")) is None
    assert "16 prompt tokens and max_tokens=5 are together more than 20 (the model's context)" in str(
        refusal(request(16, 5))
    )
    assert "unknown adapter 'bob'; adapters: alice" in str(refusal(request(adapter="bob")))
    assert "0 prompt tokens" in str(refusal(request(0)))
    assert "num_samples=0" in str(refusal(request(num_samples=0)))
    assert "token 100 is not in [0, 100)" in str(refusal(SampleRequest([3, 100], SamplingParams(1))))
    assert "101 of the likeliest" in str(refusal(request(topk_logprobs=101)))
    for wrong, name in (
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ("",)}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
    ):
        assert name in str(refusal(SampleRequest([1], SamplingParams(**{"max_tokens": 1, **wrong}))))  # type: ignore[arg-type]


def test_batches_keep_within_the_budget_and_every_row_is_in_one() -> None:
    requests = [(0, request(3, 4, num_samples=3)), (2, request(10, 10)), (3, request(1, 1, num_samples=2))]
    rows = rows_of(requests, [7, 8, 9, 10])
    expected = [(0, 0, 7), (0, 1, 7), (0, 2, 7), (2, 0, 9), (3, 0, 10), (3, 1, 10)]
    assert [(row.request_index, row.sample, row.seed) for row in rows] == expected
    assert [len(batch) for batch in batches(rows, 1000, 4)] == [4, 2]
    grouped = batches(rows, 21, 9)
    assert [[row.number for row in batch] for batch in grouped] == [[0, 1, 2], [3], [4, 5]]
    assert all(max(row.longest for row in batch) * len(batch) <= 21 for batch in grouped)
    assert [[row.number for row in share] for share in shares(rows, 4)] == [[0, 4], [1, 5], [2], [3]]


def test_tokens_are_drawn_at_the_requests_temperature_and_scored_by_the_model() -> None:
    draws = 4000
    uniforms = torch.rand(2, draws, generator=torch.Generator().manual_seed(3))
    logits = PROBABILITIES.log().expand(2, -1)
    target_scores, ids, values = score_and_draw(
        logits, torch.tensor([[1, 5], [3, 2]]), uniforms, torch.tensor([0.5, 0.0])
    )
    assert target_scores.exp().tolist() == [pytest.approx([0.4, 0.1]), pytest.approx([0.3, 0.0])]
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    shares = torch.bincount(ids[0], minlength=6) / draws
    assert shares.tolist() == pytest.approx(expected.tolist(), abs=0.03)
    assert set(ids[1].tolist()) == {1}
    assert values[0].exp().tolist() == pytest.approx(PROBABILITIES[ids[0]].tolist())


def test_prompt_draws_depend_only_on_the_seed() -> None:
    request = SampleRequest([1, 2, 3], SamplingParams(1), target_tokens=((7, -1), (8, 9)), prompt_draws=2)
    fields, wider, other = (prompt_fields(request, *args) for args in ((2, 2, 5), (3, 4, 5), (2, 2, 6)))
    assert all(torch.equal(fields[name], wider[name]) for name in fields)
    assert not torch.equal(fields["draw 0"], other["draw 0"])
    assert not torch.equal(fields["draw 0"], fields["draw 1"])
    assert (fields["target 0"].tolist(), fields["target 1"].tolist()) == ([7, 8], [0, 9])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target_tokens": ((1,),)}, "a row for each but the first"),
        ({"target_tokens": ((1,), (1, 2))}, "a row for each but the first"),
        ({"target_tokens": ((1,), (6,))}, "target token 6 is not in"),
        ({"target_tokens": ((0,) * 65,) * 2}, "at most 64"),
        ({"prompt_draws": 65}, "from 0 to 64"),
        ({"prompt_draws": -1}, "from 0 to 64"),
    ],
)
def test_invalid_target_tokens_are_refused(changes, why) -> None:
    request = SampleRequest([1, 2, 3], SamplingParams(1), **changes)
    assert why in request.refusal((), 6, 99, "x")
