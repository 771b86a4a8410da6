"""The states of linear attention while sampling: responses against transformers' ``generate``, adapters' against peft."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cached_responses import VARIED, assert_cached_equal, engine_results, make_backend, megatron_results, run_jobs

from megascend import Adapters, Batching, Lora, Parallel
from megascend.apps.sampling.request import SampleRequest, SampleResult
from megascend.engines.common import linear_attention
from megascend.engines.common.key_values import DecodeStep, KeyValues, Prefill
from megascend.engines.common.linear_attention import LayerState
from megascend.reference.fla.convolution import causal_conv1d
from megascend.reference.fla.delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from support.generated import GREEDY, assert_equal, generated, prompts
from support.stacks import FIRST_STACK

pytestmark = [
    pytest.mark.usefixtures("megatron_imported"),
    pytest.mark.skipif(not FIRST_STACK, reason="the second stack has no gated delta rule"),
]

CONDITIONED = {"rms_norm_eps": 1e-2}
"""The gated norm divides outputs of linear attention by their size, which is near 0 for some tokens of a tiny model."""
LAYOUTS = {
    "single": (1, Parallel()),
    "TP2": (2, Parallel(tensor=2, sequence=False)),
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True)),
    "TP2 x EP2 + SP": (2, Parallel(tensor=2, expert=2, expert_tensor=1)),
    "PP2": (2, Parallel(pipeline=2)),
}
CASES = [
    ("qwen3_next", "PP2", True),
    *(
        pytest.param(arch, layout, packing, marks=pytest.mark.nightly)
        for arch, layout, packing in (
            ("qwen3_5_text", "single", True),
            ("qwen3_5_text", "TP2", True),
            ("qwen3_5_text", "TP2 + SP", True),  # covered: the base model among adapters on tensor parallel ranks
            ("qwen3_5_text", "TP2 + SP", False),
            ("qwen3_next", "single", False),
            ("qwen3_next", "TP2 x EP2 + SP", True),
            ("qwen3_5_moe_text", "TP2 x EP2 + SP", True),
            ("qwen3_5_moe_text", "PP2", True),
        )
    ),
]
ENGINES: dict[str, tuple[str, int, str, bool]] = {
    "fsdp": ("fsdp", 2, "qwen3_next", True),
    "fsdp, padded": ("fsdp", 1, "qwen3_5_moe_text", False),
    "single": ("single", 1, "qwen3_5_text", False),
}


def requests() -> list[SampleRequest]:
    """Return greedy requests, and one whose responses share a prompt and end after different numbers of tokens."""
    group = SampleRequest(prompts()[0], VARIED, num_samples=3)
    return [*(SampleRequest(prompt, GREEDY) for prompt in prompts()), group]


@pytest.mark.parametrize(("arch", "layout", "packing"), CASES)
def test_responses_of_megatrons_engine_equal_transformers_generate(
    arch: str, layout: str, packing: bool, parity_folder: Path
) -> None:
    checkpoint = case_checkpoint(parity_folder, arch, **CONDITIONED)
    ranks = megatron_results(checkpoint, LAYOUTS[layout], packing, requests())
    assert_cached_equal(ranks, generated(checkpoint, [(prompt, None) for prompt in prompts()]))
    assert all(len({len(sample.tokens) for sample in results[-1].samples}) > 1 for results, *_ in ranks)


# Covered: single, padded too; fsdp by the adapters of one batch, its ranks by test_embedded_sampler.py.
@pytest.mark.nightly_cases("fsdp", "fsdp, padded")
@pytest.mark.parametrize("name", ENGINES)
def test_responses_of_engines_without_megatron_equal_transformers_generate(
    name: str, parity_folder: Path, tmp_path: Path
) -> None:
    engine, ranks, arch, packing = ENGINES[name]
    checkpoint = case_checkpoint(parity_folder, arch, **CONDITIONED)
    expected = generated(checkpoint, [(prompt, None) for prompt in prompts()])
    assert_cached_equal(engine_results(tmp_path, engine, ranks, checkpoint, packing, requests()), expected)


def test_adapters_of_one_batch_equal_peft(parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_5_text", **CONDITIONED)
    adapters = {"all": tmp_path / "all", "inputs": tmp_path / "inputs"}
    loras = {
        str(adapters["all"]): Lora(rank=4, alpha=40.0, seed=1),
        str(adapters["inputs"]): Lora(rank=8, alpha=60.0, seed=2, targets=("in_proj_qkv", "in_proj_a", "in_proj_b")),
    }
    first, second, third, _ = prompts()
    pairs = [(first, "all"), (second, None), (third, "inputs"), (first, "inputs"), (first, None)]
    adapted = [SampleRequest(prompt, GREEDY, name) for prompt, name in pairs]
    run_jobs(tmp_path, ("write_adapters", (str(checkpoint), loras), {}))
    names = {name: str(path) for name, path in adapters.items()}
    options = {"adapters": Adapters(max_count=4, max_rank=16), "batching": Batching(micro_batch_tokens=256)}
    jobs = [("sampled", (engine, 1, str(checkpoint), adapted, names), options) for engine in ("fsdp", "single")]
    expected = generated(checkpoint, [(prompt, name and adapters[name]) for prompt, name in pairs])
    assert len({tuple(expected[index][0]) for index in (0, 3, 4)}) == 3
    for ((results, _, reason),) in run_jobs(tmp_path, *jobs):
        assert reason is None
        assert_equal(results, expected)


@pytest.mark.parametrize(
    ("layout", "packing"),
    [("TP2 + SP", True), pytest.param("TP2", False, marks=pytest.mark.nightly)],
)
def test_adapters_on_tensor_parallel_ranks_equal_peft(
    layout: str, packing: bool, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_5_text", **CONDITIONED)
    adapters = {name: tmp_path / name for name in ("all", "other")}
    loras = {str(path): Lora(rank=4, alpha=40.0, seed=seed) for seed, path in enumerate(adapters.values())}
    run_jobs(tmp_path, ("write_adapters", (str(checkpoint), loras), {}))
    first, second, third, _ = prompts()
    pairs = [(first, "all"), (second, None), (third, "other"), (first, "other"), (first, None)]

    def on_rank() -> tuple[list[SampleResult], str | None]:
        from megascend.apps.sampling.sampler import Sampler

        limits = Adapters(max_count=4, max_rank=16)
        with make_backend(checkpoint, LAYOUTS[layout][1], packing=packing, adapters=limits) as backend:
            for name, path in adapters.items():
                backend.load_adapter(name, path)
            sampler = Sampler(backend)
            results = sampler.generate([SampleRequest(prompt, GREEDY, name) for prompt, name in pairs])
            return results, sampler.cache_unsupported_reason

    ranks = run_distributed(on_rank, LAYOUTS[layout][0], init=False, timeout_s=120)
    expected = generated(checkpoint, [(prompt, name and adapters[name]) for prompt, name in pairs])
    assert len({tuple(expected[index][0]) for index in (0, 3, 4)}) == 3
    for results, reason in ranks:
        assert reason is None
        assert_equal(results, expected)


def fla_of_cpu(calls: list[str]) -> dict[str, ModuleType]:
    """Return modules with ``fla``'s arguments and results, computed in plain PyTorch; ``calls`` lists the calls."""

    def update(
        x: torch.Tensor,
        cache: torch.Tensor,
        residual: Any = None,
        weight: Any = None,
        bias: Any = None,
        activation: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append("causal_conv1d_update")
        cache.copy_(torch.cat([cache[:, :, 1:], x.unsqueeze(-1)], dim=-1))
        out = (cache * weight).sum(-1) + (0 if bias is None else bias)
        return (out if activation is None else torch.nn.functional.silu(out)), cache

    def rule(
        q: Any, k: Any, v: Any, g: Any = None, gk: Any = None, gv: Any = None, beta: Any = None, **options: Any
    ) -> Any:
        calls.append("fused_recurrent_gated_delta_rule")
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta, **options)

    convolution, rules = ModuleType("fla.modules.convolution"), ModuleType("fla.ops.gated_delta_rule")
    vars(convolution)["causal_conv1d_update"] = update
    vars(rules)["fused_recurrent_gated_delta_rule"] = rule
    return {module.__name__: module for module in (convolution, rules)}


@pytest.mark.parametrize("kernels", [False, True])
def test_tokens_decoded_one_by_one_equal_whole_samples(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    if kernels:
        modules = fla_of_cpu(calls)
        monkeypatch.setattr(linear_attention.reference_fla, "is_installed", lambda: False)
        monkeypatch.setattr(linear_attention, "import_module", modules.__getitem__)
        functions = linear_attention.decoding_functions.__wrapped__("cuda")
        monkeypatch.setattr(linear_attention, "decoding_functions", lambda device_type: functions)
    generator = torch.Generator().manual_seed(1)
    prompts, tokens, channels = (5, 2, 1), 9, 12
    rows, longest = len(prompts), tokens
    x, weight = torch.randn(rows, tokens, channels, generator=generator), torch.randn(channels, 4, generator=generator)
    q, k = torch.randn(2, rows, tokens, 2, 3, generator=generator).unbind()
    v = torch.randn(rows, tokens, 4, 5, generator=generator)
    g, beta = -torch.rand(rows, tokens, 4, generator=generator), torch.rand(rows, tokens, 4, generator=generator)
    expected = causal_conv1d(x, weight, activation="silu")[0], chunk_gated_delta_rule(q, k, v, g, beta)[0]
    cache = KeyValues(rows, longest, torch.device("cpu"))
    filling = LayerState(Prefill(cache, tuple(range(rows)), prompts, (tokens,) * rows), 0)
    filling.convolve(x, weight, None, "silu", lambda x: x)
    filling.delta_rule(
        q,
        k,
        v,
        g,
        beta,
        lambda g, beta: chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True),
        normalise=False,
    )
    for _ in range(tokens - max(prompts)):
        positions = torch.tensor(cache.lengths)
        for first, last in ((0, 1), (1, rows)):  # two micro batches, the second with a token of padding
            index = [*range(first, last), last - 1] if first else [*range(first, last)]
            growing = LayerState(DecodeStep(cache, slice(first, last)), 0)
            inputs, *new = (part[index, positions[index]].unsqueeze(0) for part in (x, q, k, v, g, beta))
            mixed = growing.convolve(inputs, weight, None, "silu", lambda x: x)
            out = growing.delta_rule(*new, compute=lambda g, beta: (g, None), normalise=False)  # type: ignore[misc]
            for number, row in enumerate(range(first, last)):
                torch.testing.assert_close(mixed[0, number], expected[0][row, positions[row]])
                torch.testing.assert_close(out[0, number], expected[1][row, positions[row]])
        cache.advance()
    count = 2 * (tokens - max(prompts))
    assert calls == ["causal_conv1d_update", "fused_recurrent_gated_delta_rule"] * (count if kernels else 0)


def test_decoding_needs_no_kernels() -> None:
    # The reference functions are in the place of fla here.
    assert linear_attention.decoding_functions("cuda") == linear_attention.decoding_functions("cpu")


def test_states_of_padded_samples_are_those_after_their_last_token() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, taps = (5, 2), 4
    x, weight = torch.randn(2, 6, 8, generator=generator), torch.randn(8, taps, generator=generator)
    q, k = torch.randn(2, 2, 6, 2, 3, generator=generator).unbind()
    v = torch.randn(2, 6, 2, 5, generator=generator)
    g, beta = -torch.rand(2, 6, 2, generator=generator), torch.rand(2, 6, 2, generator=generator)
    cache = KeyValues(2, 16, torch.device("cpu"))
    layer = LayerState(Prefill(cache, (1, 0), lengths, (6, 6)), 3)
    layer.convolve(x, weight, None, None, lambda x: causal_conv1d(x, weight)[0])
    out = layer.delta_rule(
        q,
        k,
        v,
        g,
        beta,
        lambda g, beta: chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True),
        normalise=False,
    )
    assert cache.lengths == [2, 5]
    for sample, (row, length) in enumerate(((1, 5), (0, 2))):
        inputs = torch.cat([torch.zeros(taps, 8), x[sample, :length]])[-taps:]
        assert torch.equal(cache.state((3, "convolution"), slice(row, row + 1))[0], inputs.T)
        part: list[Any] = [values[sample : sample + 1, :length] for values in (q, k, v, g, beta)]
        expected, state = chunk_gated_delta_rule(*part, output_final_state=True)
        torch.testing.assert_close(cache.state((3, "delta rule"), slice(row, row + 1)), state)
        torch.testing.assert_close(out[sample : sample + 1, :length], expected)
    before = cache.bytes
    assert before == 2 * 4 * (8 * taps + 2 * 3 * 5)
    cache.take([1, 1, 0])
    assert cache.lengths == [5, 5, 2]
    assert torch.equal(*(cache.state((3, "delta rule"), slice(row, row + 1)) for row in (0, 1)))
    assert cache.bytes == before * 3 // 2
