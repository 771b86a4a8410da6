"""Checks of a model on Megatron's engine that tests of several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend, causal_samples


def assert_within(difference: Any, **bounds: float) -> None:
    """Assert that differences from a reference, attributes of ``difference``, were computed and are within their bounds."""
    measured = {name: getattr(difference, name) for name in bounds}
    assert all(measured[name] is not None and measured[name] <= bounds[name] for name in bounds), (measured, bounds)


def saved_bytes(
    backend: Any, module_of: Callable[[Any], Any], lengths: Sequence[int], adapter: str | None = None
) -> int:
    """Return the bytes that one layer of a chunk saves for the backward pass, without weights, in a step on random samples."""
    chunk = backend.engine.bare_chunks[0]
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    module, saved = module_of(chunk), {}
    forward = module.forward

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Kept, so that no later tensor has its address.
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def watched(hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(hidden.detach().requires_grad_(), *arguments, **options)

    module.forward = watched
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 300, (length + 1,), generator=generator).tolist() for length in lengths]
    backend.forward_backward(causal_samples(ids), adapter=adapter)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in weights)


def assert_sampled_without_cache(checkpoint: Path, reason: str) -> None:
    """Assert that the sampler has no cache for ``reason``, and that its greedy tokens are those of transformers."""
    prompt = list(range(11, 31))

    def on_rank() -> tuple[list[int], str | None]:
        from megascend.apps.sampling.request import SampleRequest, SamplingParams
        from megascend.apps.sampling.sampler import Sampler

        with case_backend(Case("single"), checkpoint) as backend:
            sampler = Sampler(backend)
            (result,) = sampler.generate([SampleRequest(prompt, SamplingParams(6, temperature=0.0))])
            return list(result.samples[0].tokens), sampler.cache_unsupported_reason

    def in_transformers(tokens: list[int]) -> torch.Tensor:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            return model(torch.tensor([tokens]), use_cache=False).logits[0]

    ((tokens, actual),) = run_distributed(on_rank, 1, init=False, timeout_s=60)
    assert actual == reason
    (logits,) = run_distributed(in_transformers, 1, [*prompt, *tokens], init=False, timeout_s=60)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
