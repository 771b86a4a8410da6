"""Responses of Megatron's engine against transformers and peft, in layouts; requests of several adapters in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megascend import Adapters, Batching, Lora, Parallel, Sample
from megascend.apps.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.errors import EngineError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from support.forked_programs import run_forked
from support.lora_parity import write_adapter

pytestmark = pytest.mark.usefixtures("megatron_imported")

RANKS = Path(__file__).with_name("sampling_ranks.py")
LORAS = {
    "a": Lora(rank=4, alpha=80.0, seed=1),
    "b": Lora(rank=9, alpha=60.0, seed=2, targets=("q_proj", "v_proj", "down_proj", "lm_head", "embed_tokens")),
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
GREEDY, WARM = SamplingParams(7, temperature=0.0), SamplingParams(9, temperature=1.3, top_p=0.95, top_k=40, seed=11)
REQUESTS = [
    SampleRequest(
        [5, 6, 7, 8, 9],
        GREEDY,
        "a",
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        prompt_draws=1,
        target_tokens=((6, 300), (-1, -1), (0, -1), (9, 9)),
    ),
    SampleRequest([40], WARM, None, num_samples=3, topk_logprobs=2, prompt_logprobs=True),
    SampleRequest([11, 12, 13], GREEDY, "b"),
    SampleRequest([11, 12, 13], WARM, "b", num_samples=2, prompt_logprobs=True, prompt_draws=3),
    SampleRequest([20] * 60, SamplingParams(9), "a"),  # with its response longer than what is allowed
]
LAYOUTS = {
    "TP2": (2, Parallel(tensor=2)),
    "PP2": (2, Parallel(pipeline=2)),
    "DP2": (2, Parallel()),
    "CP2": (2, Parallel(context=2)),
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True)),
}


@pytest.fixture(scope="module")
def checkpoint(parity_folder: Path) -> Path:
    return case_checkpoint(parity_folder, "qwen3")


def make_backend(checkpoint: Path, parallel: Parallel, **options):
    from megascend.backends import MegatronBackend

    adapters = Adapters(max_count=4, max_rank=16, targets=TARGETS)
    batching = Batching(micro_batch_tokens=128, max_length=64)
    return MegatronBackend(
        model=checkpoint,
        parallel=parallel,
        precision="fp32",
        adapters=adapters,
        batching=batching,
        timeout_s=60,
        **options,
    )


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")

    def write() -> None:
        with make_backend(checkpoint, Parallel()) as backend:
            for name, lora in LORAS.items():
                write_adapter(backend, folder / name, lora)

    run_distributed(write, 1, init=False)
    return {name: folder / name for name in LORAS}


def letters(tokens: Sequence[int]) -> str:
    """Decode tokens to a text of one character each."""
    return "".join(chr(64 + token) for token in tokens)


def stopped(checkpoint: Path, adapters: dict[str, Path], parallel: Parallel):
    """Return responses that end early, on this rank: by stops, refused, cancelled; and the number of calls of ``cancelled``."""
    from megascend.apps.sampling.sampler import Sampler

    queries = []

    def cancelled() -> set[int]:
        queries.append(1)
        return {1} if len(queries) == 4 else set()

    with make_backend(checkpoint, parallel) as backend:
        backend.load_adapter("a", adapters["a"])
        sampler = Sampler(backend, decode=letters)
        plain = [SampleRequest(prompt, GREEDY, "a") for prompt in ([5, 6, 7, 8, 9], [40], [11, 12, 13])]
        tokens = [result.samples[0].tokens for result in sampler.generate(plain)]
        stops = [(tokens[0][2],), (letters(tokens[1][1:4]),), (tokens[2][3:5], 319)]
        stopping = [
            replace(request, params=replace(GREEDY, stop=stop)) for request, stop in zip(plain, stops, strict=True)
        ]
        by_stops = sampler.generate(stopping)
        by_end = Sampler(backend, end_tokens=[tokens[2][1]], max_rows=2).generate(plain)
        no_text = Sampler(backend).generate([stopping[1], stopping[0]])
        small = Sampler(backend, cache_tokens=20).generate([stopping[0], replace(plain[0], prompt=[9] * 14)])
        cancelled_results = sampler.generate(plain, cancelled)
        sliced = []
        backend.add_adapter("trained", Lora(rank=2))
        for finished in sampler.in_slices([replace(plain[0], adapter="of nobody"), *stopping], tokens=2):
            sliced.append(finished)
            data = [Sample([5, 6, 7, 8], [6, 7, 8, 9], [1.0] * 4, adapter="trained")]
            backend.forward_backward(data if backend.groups.coordinates.data == 0 else [])
            backend.optimizer_step("trained")
    return tokens, by_stops, by_end, no_text, small, cancelled_results, sliced, len(queries)


def in_trouble(checkpoint: Path, adapters: dict[str, Path], parallel: Parallel):
    """Return results with an adapter of NaN, and the errors of calls whose functions raise."""
    from megascend.apps.sampling.sampler import Sampler

    with make_backend(checkpoint, parallel) as backend:
        for name, path in adapters.items():
            backend.load_adapter(name, path)
        backend.adapters["a"].values.detach().fill_(math.nan)
        results = Sampler(backend).generate(REQUESTS)
        errors = []
        for functions, cancelled in (({"decode": lambda tokens: 1 / 0}, None), ({}, lambda: {}["nothing"])):
            stop = ("never",) if functions else ()
            request = SampleRequest([40], replace(GREEDY, stop=stop))
            with pytest.raises(EngineError) as caught:
                Sampler(backend, **functions).generate([request], cancelled)
            errors.append(str(caught.value))
        repeated = Sampler(backend).generate(REQUESTS[2:3])
    return results, errors, repeated


def sampled(
    checkpoint: Path,
    adapters: dict[str, Path],
    parallel: Parallel,
    calls: list[list[SampleRequest]],
    cache: bool = True,
):
    """Return the results of ``calls`` on this rank."""
    from megascend.apps.sampling.sampler import Sampler

    with make_backend(checkpoint, parallel) as backend:
        for name, path in adapters.items():
            backend.load_adapter(name, path)
        sampler = Sampler(backend, decode=letters, cache=cache)
        results = [sampler.generate(call) for call in calls]
        assert (sampler.cache_unsupported_reason is None) == (cache and parallel.context == 1)
        return results


def reference(
    checkpoint: Path, adapters: dict[str, Path], sequences: list[tuple[str | None, list[int]]]
) -> list[torch.Tensor]:
    """Compute log-probabilities [length, vocabulary] of each sequence with its adapter, by transformers and peft."""

    def compute() -> list[torch.Tensor]:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        logprobs: dict[int, torch.Tensor] = {}
        for name in {name for name, _ in sequences}:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
            if name is not None:
                model = PeftModel.from_pretrained(model, str(adapters[name]))
            with torch.no_grad():
                for number, (adapter, tokens) in enumerate(sequences):
                    if adapter == name:
                        logprobs[number] = model.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return [logprobs[number] for number in range(len(sequences))]

    return run_distributed(compute, 1, init=False)[0]


def check(checkpoint: Path, adapters: dict[str, Path], results: list[SampleResult]) -> None:
    """Compare log-probabilities and choices of ``results`` of REQUESTS with the reference."""
    pairs = [
        (request, result, sample)
        for request, result in zip(REQUESTS, results, strict=True)
        for sample in result.samples
    ]
    sequences = [(request.adapter, [*request.prompt, *sample.tokens]) for request, _, sample in pairs]
    for (request, result, sample), logprobs in zip(pairs, reference(checkpoint, adapters, sequences), strict=True):
        start, tokens = len(request.prompt), torch.tensor([*request.prompt, *sample.tokens])
        token_logprobs = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
        assert len(sample.tokens) == request.params.max_tokens
        assert sample.logprobs == pytest.approx(token_logprobs[start - 1 :].tolist(), abs=1e-5)
        positions = logprobs[start - 1 : -1]
        if request.params.temperature == 0:
            assert list(sample.tokens) == positions.argmax(-1).tolist()
        else:
            likely = positions.topk(40).indices.tolist()
            assert all(token in ids for token, ids in zip(sample.tokens, likely, strict=True))
        if request.topk_logprobs:
            assert sample.topk_logprobs is not None
            for actual, expected in zip(sample.topk_logprobs, positions, strict=True):
                assert [token for token, _ in actual] == expected.topk(2).indices.tolist()
                assert [value for _, value in actual] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-5)
        if request.prompt_logprobs:
            assert result.prompt_logprobs is not None
            assert result.prompt_logprobs[0] is None
            assert list(result.prompt_logprobs[1:]) == pytest.approx(token_logprobs[: start - 1].tolist(), abs=1e-5)
        if request.topk_prompt_logprobs:
            assert result.topk_prompt_logprobs is not None
            assert result.topk_prompt_logprobs[0] is None
            for actual, expected in zip(result.topk_prompt_logprobs[1:], logprobs[: start - 1], strict=True):
                assert actual is not None
                assert [token for token, _ in actual] == expected.topk(3).indices.tolist()
                assert [value for _, value in actual] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)
        if request.target_tokens is not None:
            assert result.target_logprobs is not None
            for row, actual, expected in zip(request.target_tokens, result.target_logprobs, logprobs, strict=False):
                expected_row = [0.0 if token < 0 else float(expected[token]) for token in row]
                assert list(actual) == pytest.approx(expected_row, abs=1e-5)
        if request.prompt_draws:
            assert result.prompt_draws is not None
            assert len(result.prompt_draws) == start - 1
            for actual, expected in zip(result.prompt_draws, logprobs, strict=False):
                assert len(actual) == request.prompt_draws
                assert [value for _, value in actual] == pytest.approx(
                    [float(expected[t]) for t, _ in actual], abs=1e-5
                )
                assert request.params.temperature > 0 or actual[0][0] == int(expected.argmax())


@pytest.fixture(scope="module")
def single_rank(checkpoint: Path, adapters: dict[str, Path]) -> list[list[SampleResult]]:
    """Return results on one rank: all requests at once, again, and in separate calls."""
    calls = [REQUESTS, REQUESTS, *([request] for request in REQUESTS)]
    return run_distributed(sampled, 1, checkpoint, adapters, Parallel(), calls, init=False)[0]


def test_responses_and_their_log_probabilities_are_those_of_transformers_and_peft(
    checkpoint, adapters, single_rank
) -> None:
    check(checkpoint, adapters, single_rank[0])
    *_, refused = single_rank[0]
    assert (
        refused.error
        == "60 prompt tokens and max_tokens=9 are together more than 64 (the model's context, or batching.max_length); "
        "lower max_tokens"
    )
    assert refused.samples == ()
    assert len({sample.tokens for sample in single_rank[0][1].samples}) == 3


def same(results: list[SampleResult], expected_results: list[SampleResult]) -> None:
    """Assert equal tokens and reasons, and log-probabilities up to rounding."""
    for result, expected in zip(results, expected_results, strict=True):
        assert result.error == expected.error
        for draws, expected_draws in zip(result.prompt_draws or (), expected.prompt_draws or (), strict=True):
            assert [token for token, _ in draws] == [token for token, _ in expected_draws]
        for sample, expected_sample in zip(result.samples, expected.samples, strict=True):
            assert (sample.tokens, sample.stop_reason) == (expected_sample.tokens, expected_sample.stop_reason)
            assert sample.logprobs == pytest.approx(expected_sample.logprobs, abs=5e-6)


def test_seeded_samples_do_not_depend_on_the_batch(single_rank) -> None:
    same(single_rank[1], single_rank[0])
    same([result for call in single_rank[2:] for result in call], single_rank[0])


@pytest.mark.nightly_cases("TP2")  # covered: TP2 + SP
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_sample_like_one_rank(layout, checkpoint, adapters, single_rank) -> None:
    ranks, parallel = LAYOUTS[layout]
    ranks_results = run_distributed(
        sampled, ranks, checkpoint, adapters, parallel, [REQUESTS, REQUESTS[2:3]], init=False
    )
    results, fewer = ranks_results[0]  # the second call has fewer rows than ranks
    assert ranks_results[1:] == [ranks_results[0]] * (ranks - 1)
    same(results, single_rank[0])
    same(fewer, single_rank[0][2:3])
    for request, result, expected in zip(REQUESTS, results, single_rank[0], strict=True):
        for name in ("prompt_logprobs", "topk_prompt_logprobs", "target_logprobs", "prompt_draws"):
            assert (getattr(result, name) is None) == (getattr(expected, name) is None)
        if request.prompt_logprobs:
            assert result.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=5e-6)
        for row, expected_row in zip(result.target_logprobs or (), expected.target_logprobs or (), strict=True):
            assert row == pytest.approx(expected_row, abs=5e-6)


def test_engines_without_megatron_sample_the_same(checkpoint, adapters, single_rank, tmp_path) -> None:
    """Sample on two ranks of FSDP, which share the rows, and on engine single, which adapts no output layer."""
    unadapted_output = [number for number, request in enumerate(REQUESTS) if request.adapter != "b"]
    parts = {"single": (1, unadapted_output, ["a"]), "fsdp": (2, list(range(len(REQUESTS))), ["a", "b"])}
    for engine, (ranks, numbers, names) in parts.items():
        paths = {name: str(adapters[name]) for name in names}
        requests = [REQUESTS[number] for number in numbers]
        torch.save((engine, ranks, str(checkpoint), paths, requests), tmp_path / "job")
        completed = run_forked(RANKS, tmp_path / "job", tmp_path / "result", timeout_s=120)
        assert completed.returncode == 0, completed.stderr[-4000:]
        ranks_results = torch.load(tmp_path / "result", weights_only=False)
        results, cache_unsupported_reason = ranks_results[0]
        assert cache_unsupported_reason is None
        same(results, [single_rank[0][number] for number in numbers])
        assert ranks_results == [ranks_results[0]] * ranks


def until(tokens: tuple[int, ...], run: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``tokens`` up to the first occurrence of ``run``, included."""
    ends = (end for end in range(len(run), len(tokens) + 1) if tokens[end - len(run) : end] == run)
    return tokens[: next(ends)]


def test_responses_end_at_stops_and_on_cancellation(checkpoint, adapters) -> None:
    ranks = run_distributed(stopped, 2, checkpoint, adapters, Parallel(pipeline=2), init=False)
    tokens, by_stops, by_end, no_text, small, cancelled_results, sliced, queries = ranks[0]
    assert [rank[:-1] for rank in ranks] == [ranks[0][:-1]] * 2
    assert (queries, ranks[1][-1]) == (7, 0)  # once a token, on rank 0
    ended = [until(tokens[0], tokens[0][2:3]), until(tokens[1], tokens[1][1:4]), until(tokens[2], tokens[2][3:5])]
    assert [(result.samples[0].tokens, result.samples[0].stop_reason) for result in by_stops] == [
        (response, "stop") for response in ended
    ]
    last = by_end[2].samples[0]
    assert (last.tokens, last.stop_reason) == (until(tokens[2], tokens[2][1:2]), "stop")
    assert "no tokenizer for texts" in no_text[0].error
    same(no_text[1:], by_stops[:1])
    same(small[:1], by_stops[:1])
    assert "more than 20 (the sampler's cache_tokens)" in small[1].error
    reasons = [result.samples[0].stop_reason for result in cancelled_results]
    assert reasons == ["length", "cancelled", "length"]
    assert [result.samples[0].tokens for result in cancelled_results] == [tokens[0], tokens[1][:4], tokens[2]]
    slices = [0, *(-(-len(result.samples[0].tokens) // 2) for result in by_stops)]  # an adapter is trained between them
    assert [number for ended in sliced for number in sorted(ended)] == sorted(
        range(4), key=lambda number: slices[number]
    )
    assert [len(sliced), list(sliced[0])] == [max(slices) + 2, [0]]
    same([ended[number] for number in (1, 2, 3) for ended in sliced if number in ended], by_stops)


def test_trouble_stays_where_it_is_and_all_ranks_hear_of_it(checkpoint, adapters, single_rank) -> None:
    ranks = run_distributed(in_trouble, 2, checkpoint, adapters, Parallel(), init=False)
    results, errors, repeated = ranks[0]
    assert repr(ranks[1]) == repr(ranks[0])
    assert results[0].error == "the model's logits are not finite (after 0 tokens)"
    same(results[1:], single_rank[0][1:])
    assert errors == ["sampling: rank 0: ZeroDivisionError: division by zero", "sampling: rank 0: KeyError: 'nothing'"]
    same(repeated, single_rank[0][2:3])
