"""Attention with q, k and v from one function, including norms and rotary embedding, equals Megatron's.

The kernels themselves are tested in tests/gpu/test_qkv_rope.py; plain torch replaces them here.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascend import Adam, Adapters, Batching, CudaGraphs, Lora, Parallel, Recompute, Sample
from megascend.apps.sampling.request import SampleRequest, SamplingParams
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from megascend.training.kernels.qkv_rope_plain import plain_qkv_rope
from support.graphed_steps import CaptureOnCpu, gradients_of

pytestmark = pytest.mark.usefixtures("megatron_imported")

BOUND = 1e-6
LAYERS = 2


class Plain:
    """Stand-in for the kernels.

    Attributes:
        calls: True for each call with packed sequences, False for others.
    """

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def __call__(self, mixed, angles, starts, norms, groups, width):
        self.calls.append(starts is not None)
        return plain_qkv_rope(mixed, angles, starts, norms, groups, width)


def make_backend(checkpoint, *, fused: bool, **options):
    """Build a backend that rotates as on a GPU, with the stand-in if ``fused``."""
    from megascend.backends import MegatronBackend
    from megascend.engines.megatron import fused_qkv

    options = {"batching": Batching(micro_batch_tokens=96)} | options
    backend = MegatronBackend(checkpoint, precision="fp32", timeout_s=60, self_check=False, **options)
    backend.engine.config.apply_rope_fusion = True
    plain = Plain()
    if fused:
        fused_qkv.install(backend.engine.bare_chunks, plain, "cpu")
    return backend, plain


def samples(*lengths: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    return [Sample.causal(torch.randint(0, 300, (length,), generator=generator)) for length in lengths]


UNEQUAL, EQUAL = (20, 33, 9, 28), (25, 25, 25)


def gradients(backend) -> list[torch.Tensor]:
    return [
        (parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad).clone()
        for chunk in backend.engine.bare_chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad
    ]


def trained(checkpoint, *, fused: bool, **options) -> tuple[list[torch.Tensor], list[bool]]:
    """Return losses, log-probabilities, all gradients and the gradient norm; and the calls of the stand-in."""
    backend, plain = make_backend(checkpoint, fused=fused, **options)
    results: list[Any] = []
    for lengths in (UNEQUAL, EQUAL):
        results += [backend.forward_backward(samples(*lengths)).loss, *backend.forward(samples(*lengths)).logprobs]
        results += gradients(backend)
        results.append(backend.optimizer_step().grad_norm)
    backend.close()
    return [torch.as_tensor(value, dtype=torch.float64) for value in results], plain.calls


def check(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected) > 10
    largest = max(
        float((tensor - reference).abs().max() / reference.abs().max().clamp(min=1e-3))
        for tensor, reference in zip(actual, expected, strict=True)
    )
    print(f"{largest:.1e}")
    assert largest < BOUND


@pytest.mark.parametrize(
    ("arch", "world_size", "options"),
    [
        ("qwen3", 1, {}),
        ("qwen3", 2, {"parallel": Parallel(tensor=2, sequence=True)}),
        ("qwen3", 2, {"optimizer": Adam(overlap_grad_reduce=True, overlap_param_gather=True)}),
        ("qwen3", 2, {"parallel": Parallel(pipeline=2), "recompute": Recompute(granularity="full")}),
        ("qwen2", 1, {"recompute": Recompute(granularity="selective", modules=("core_attn",))}),
        ("glm4_moe", 1, {}),
    ],
    ids=[
        "norms",
        "tensor parallel",
        "parameters gathered meanwhile",
        "pipeline, all recomputed",
        "biases and no norms, attention recomputed",
        "partly rotated",
    ],
)
def test_training_is_the_same(parity_folder, arch, world_size, options):
    checkpoint = case_checkpoint(parity_folder, arch, num_hidden_layers=LAYERS)

    def pair():
        return [trained(checkpoint, fused=fused, **options) for fused in (False, True)]

    for (expected, none), (actual, calls) in run_distributed(pair, world_size, init=False):
        assert not none
        assert set(calls) == {True, False}, "packed and plain micro batches"
        check(actual, expected)


ADAPTERS = {"a": Lora(rank=4, alpha=80.0, seed=1), "b": Lora(rank=6, seed=2, targets=("q_proj", "v_proj"))}


def tuned(checkpoint, *, fused: bool, graphs: bool = False) -> tuple[list[torch.Tensor], list[bool]]:
    """Train adapters, one after another and mixed, and sample; return the results and the calls of the stand-in."""
    from megascend.apps.sampling.sampler import Sampler

    backend, plain = make_backend(checkpoint, fused=fused, adapters=Adapters(max_count=2))
    for name, lora in ADAPTERS.items():
        backend.add_adapter(name, lora)
    if graphs:
        backend.engine.use_cuda_graphs(CudaGraphs(), CaptureOnCpu(lambda: gradients_of(backend), strict=True))
    results: list[Any] = []
    for length in (30, 41, 41, 41):
        results.append(backend.forward_backward(samples(length), adapter="a").loss)
        results += [backend.adapters["a"].grads.clone(), backend.optimizer_step("a").grad_norm]
    if graphs:
        assert backend.cuda_graphs.replayed
    else:
        mixed = samples(*UNEQUAL)
        for sample, name in zip(mixed, "aabb", strict=True):
            sample.adapter = name
        results.append(backend.forward_backward(mixed).loss)
        results += [backend.adapters[name].grads.clone() for name in ADAPTERS]
        sampler = Sampler(backend)
        params = SamplingParams(6, temperature=0.0)
        requests = [SampleRequest([5, 6, 7], params, "a"), SampleRequest([40] * 9, params, "b")]
        for result in sampler.generate(requests):
            for sequence in result.samples:
                results += [torch.tensor(sequence.tokens), torch.tensor(sequence.logprobs)]
        assert sampler.cache_unsupported_reason is None
    backend.close()
    return [torch.as_tensor(value, dtype=torch.float64) for value in results], plain.calls


@pytest.mark.parametrize("graphs", [False, True], ids=["mixed and sampled with a cache", "captured"])
def test_adapters_are_the_same(parity_folder, graphs):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=LAYERS)

    def pair():
        return [tuned(checkpoint, fused=fused, graphs=graphs) for fused in (False, True)]

    ((expected, none), (actual, calls)) = run_distributed(pair, 1, init=False)[0]
    assert not none
    assert calls
    check(actual, expected)


def test_unsupported_layers_are_not_fused(parity_folder):
    """Detect each reason separately."""
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=LAYERS)
    own_way = case_checkpoint(parity_folder, "glm4", num_hidden_layers=LAYERS)
    context = {"parallel": Parallel(context=2)}

    def in_two():
        from megascend.engines.megatron.fused_qkv import unsupported_reason

        backend, plain = make_backend(checkpoint, fused=True, **context)
        backend.forward(samples(*UNEQUAL))
        reason = unsupported_reason(backend.engine.bare_chunks[0].decoder.layers[0].self_attention, "cpu")
        backend.close()
        return reason, plain.calls

    def on_one_rank():
        from megascend.engines.megatron.fused_qkv import unsupported_reason

        backend, plain = make_backend(own_way, fused=True)
        backend.forward(samples(*UNEQUAL))
        reasons = {"own way": unsupported_reason(backend.engine.bare_chunks[0].decoder.layers[0].self_attention, "cpu")}
        assert not plain.calls
        backend.close()
        backend, _ = make_backend(checkpoint, fused=False)
        attention = backend.engine.bare_chunks[0].decoder.layers[0].self_attention
        assert unsupported_reason(attention, "cpu") is None
        reasons["device"] = unsupported_reason(attention, "cuda")
        config = attention.config
        for name, value in (
            ("apply_rope_fusion", False),
            ("position_embedding_type", "mrope"),
            ("rotary_interleaved", True),
            ("multi_latent_attention", True),
            ("attention_output_gate", True),
            ("yarn_rotary_scaling_factor", 4.0),
            ("attention_scaling", 1.2),
            ("no_rope_freq", [1, 0]),
            ("num_query_groups", 0),
            ("fused_single_qkv_rope", True),
            ("test_mode", True),
            ("fp8", "hybrid"),
            ("fine_grained_activation_offloading", True),
        ):
            attention.config = copy.copy(config)
            if name.startswith("yarn"):  # 0.15 asks for all three
                attention.config.yarn_mscale, attention.config.yarn_mscale_all_dim = 1.0, 0.0
            setattr(attention.config, name, value)
            reasons[name] = unsupported_reason(attention, "cpu")
        attention.config = config
        attention.q_layernorm.zero_centered_gamma = True
        reasons["norm"] = unsupported_reason(attention, "cpu")
        attention.q_layernorm.zero_centered_gamma = False
        attention.hidden_size_per_attention_head = 96
        reasons["width"] = unsupported_reason(attention, "cpu")
        backend.close()
        return reasons

    assert run_distributed(in_two, 2, init=False) == [("context parallelism", [])] * 2
    reasons = run_distributed(on_one_rank, 1, init=False)[0]
    print(reasons)
    assert None not in reasons.values(), reasons
    assert len(set(reasons.values())) > 9


def test_calls_that_bring_something_else_go_megatrons_way(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=LAYERS)

    def calls():
        backend, _ = make_backend(checkpoint, fused=True)
        attention = backend.engine.bare_chunks[0].decoder.layers[0].self_attention
        fused = vars(attention)["forward"].__self__
        hidden, angles = torch.randn(12, 1, 64), backend.engine.bare_chunks[0].rotary_pos_emb(12)
        starts = torch.tensor([0, 5, 12], dtype=torch.int32)

        def packed(**changes):
            settings = {
                "qkv_format": "thd",
                "cu_seqlens_q": starts,
                "cu_seqlens_kv": starts,
                "cu_seqlens_q_padded": None,
                "cu_seqlens_kv_padded": None,
                "max_seqlen_q": 12,
            }
            return SimpleNamespace(**settings | changes)

        fitting = {
            "plain": {"rotary_pos_emb": angles},
            "packed": {"rotary_pos_emb": angles, "packed_seq_params": packed()},
        }
        strange = {
            "no angles": {},
            "another table of keys": {"rotary_pos_emb": (angles, angles.clone())},
            "longer table": {"rotary_pos_emb": backend.engine.bare_chunks[0].rotary_pos_emb(13)},
            "a row for each sample": {"rotary_pos_emb": angles.expand(-1, 2, -1, -1)},
            "another dtype": {"rotary_pos_emb": angles.double()},
            "wider than a head": {"rotary_pos_emb": torch.cat([angles, angles], -1)},
            "inference": {"rotary_pos_emb": angles, "inference_context": object()},
            "another format": {"rotary_pos_emb": angles, "packed_seq_params": packed(qkv_format="bshd")},
            "other sequences of keys": {
                "rotary_pos_emb": angles,
                "packed_seq_params": packed(cu_seqlens_kv=starts + 0),
            },
            "padded of queries alone": {
                "rotary_pos_emb": angles,
                "packed_seq_params": packed(cu_seqlens_q_padded=starts + 0),
            },
            "longer than the table": {"rotary_pos_emb": angles, "packed_seq_params": packed(max_seqlen_q=13)},
            "unknown length": {"rotary_pos_emb": angles, "packed_seq_params": packed(max_seqlen_q=None)},
        }
        fused_calls = {
            name: fused._rotation(hidden, (None,), arguments) is not None
            for name, arguments in (fitting | strange).items()
        }
        fused_calls["all by position"] = fused._rotation(hidden, (None, None, None, angles), {}) is not None
        handle = attention.k_layernorm.register_forward_hook(lambda *values: None)
        fused_calls["somebody listens to the norm"] = fused._rotation(hidden, (None,), fitting["plain"]) is not None
        handle.remove()
        backend.close()
        return fused_calls, list(fitting)

    fused_calls, fitting = run_distributed(calls, 1, init=False)[0]
    assert [name for name, used in fused_calls.items() if used] == fitting
