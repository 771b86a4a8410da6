"""Ranks of the transformers engines with models of linear attention. A script, so that Megatron is not imported.

    python linear_attention_runs.py JOB RESULT

JOB and RESULT are files of ``torch.save``: functions' names and arguments, and their results.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from ranks import do_jobs, make, on_ranks

import megascend
import megascend.engines.fsdp.engine  # ranks find it imported
from megascend.apps.sampling.request import SampleRequest, SampleResult
from megascend.engines.fsdp import compilation
from megascend.models.selfcheck import in_process
from megascend.reference import fla as reference_fla
from megascend.testing.parity import causal_samples, token_lists
from support.lora_parity import write_adapter


def trained(
    engine: str, ranks: int, checkpoint: str, steps: int, folder: str, **options: Any
) -> tuple[list[float], list[float], str]:
    """Train and export to ``folder``; return the losses, the gradient norms, and the self-check's status."""
    compilation.BACKEND = "aot_eager"  # without code generation

    def on_rank() -> Any:
        with make(checkpoint, engine, **options) as backend:
            samples, losses, norms = backend.shard(causal_samples(token_lists())), [], []
            for _ in range(steps):
                losses.append(backend.forward_backward(samples).loss)
                norms.append(backend.optimizer_step().grad_norm)
            backend.export_hf(Path(folder))
            assert backend.self_check is not None
            return losses, norms, backend.self_check.status

    results = on_ranks(on_rank, ranks)
    assert results == [results[0]] * ranks
    return results[0]


def isolated(engine: str, checkpoint: str, *, packing: bool, borders: bool = True) -> dict[str, dict[str, float]]:
    """Change the tokens of one sample of a micro batch at a time; return what else changed and how far, by the change.

    Log-probabilities of the other samples and the gradients of their loss are compared bit by bit; distances are relative. The
    changed sample's tokens are, in turn, others of the vocabulary, and one whose embedding is 10,000 times as large.

    Args:
        borders: False: the engine does not pass the borders of samples to linear attention.
    """
    changes: dict[str, dict[str, float]] = {}
    if not borders:
        megascend.engines.fsdp.engine.pass_borders = lambda model: None
    batching = megascend.Batching(packing=packing, micro_batch_tokens=256)
    with make(checkpoint, engine, batching=batching, self_check=False) as backend:
        optimizer = backend.engine.optimizer  # type: ignore[attr-defined]
        loud = 299
        with torch.no_grad():
            next(main for name, (_, main) in optimizer._pairs.items() if "embed_tokens" in name)[loud] *= 1e4

        def outcome(rows: list[list[int]], changed: int) -> dict[str, torch.Tensor]:
            samples = [
                megascend.Sample(row[:-1], row[1:], [float(index != changed)] * (len(row) - 1))
                for index, row in enumerate(rows)
            ]
            logprobs = backend.forward_backward(samples, logprobs=True).logprobs
            assert logprobs is not None
            results = {f"log-probabilities {index}": values.clone() for index, values in enumerate(logprobs)}
            del results[f"log-probabilities {changed}"]
            assert len(optimizer.gradients()) == len(optimizer._pairs)
            results |= {name: main.grad.clone() for name, (_, main) in optimizer._pairs.items()}
            assert all(bool(values.isfinite().all() and values.any()) for values in results.values())
            optimizer.discard()
            return results

        # Odd lengths, and one longer than a chunk of the delta rule.
        generator = torch.Generator().manual_seed(4)
        tokens = [torch.randint(3, 290, (length,), generator=generator).tolist() for length in (33, 70, 9)]
        for changed, row in enumerate(tokens):
            before = outcome(tokens, changed)
            for label, other in (("other tokens", [292 - token for token in row]), ("loud tokens", [loud] * len(row))):
                after = outcome([other if index == changed else row for index, row in enumerate(tokens)], changed)
                changes[f"{changed}: {label}"] = {
                    name: float((after[name] - values).norm() / values.norm())
                    for name, values in before.items()
                    if not torch.equal(values, after[name])
                }
    return changes


def no_functions(*, state_spaces: bool = True) -> list[str]:
    """Stand in for :func:`megascend.reference.fla.install`, so that transformers has only its own functions."""
    return []


def refusal(checkpoint: str, *, packing: bool) -> str:
    """Return why engine fsdp refuses a model where transformers has only its own functions."""
    reference_fla.install = no_functions
    batching = megascend.Batching(packing=packing, micro_batch_tokens=256)
    try:
        with make(checkpoint, batching=batching) as backend:
            assert backend.self_check is not None
            return backend.self_check.status
    except megascend.ConfigError as error:
        return str(error)


def checked_beside_kernels(
    engine: str, checkpoint: str, cache: str, packages: list[str], **options: Any
) -> tuple[list[Any], str]:
    """Return the self-check's verdicts where ``fla`` and ``causal_conv1d`` do not run on the CPU, and the engine's error.

    Args:
        cache: empty folder, in place of one that may have the verdict.
        packages: those of the two that are installed.
    """

    def chunk_gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any = None) -> Any:
        raise AssertionError("a kernel was called on the CPU")

    def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None) -> Any:
        raise AssertionError("a kernel was called on the CPU")

    reference_fla.install = no_functions
    contents = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "fla.modules": {},
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d_fn},
        "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
    }
    for name, functions in contents.items():
        if name.partition(".")[0] not in packages:
            continue
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]  # a package
        for key, function in functions.items():
            function.__module__ = name
            setattr(module, key, function)
        sys.modules[name] = module
    os.environ["MEGASCEND_CACHE"] = cache
    verdicts = []
    compare = in_process.compare

    def recorded(*args: Any) -> Any:
        verdicts.append(compare(*args))
        return verdicts[-1]

    in_process.compare = recorded
    try:
        with make(checkpoint, engine, **options) as backend:
            backend.forward(causal_samples(token_lists()))
    except AssertionError as error:
        return verdicts, str(error)
    return verdicts, "no kernel was called"


def write_adapters(checkpoint: str, adapters: dict[str, megascend.Lora]) -> None:
    """Write adapters that have no zero factor, each to its folder."""
    with make(checkpoint, adapters=megascend.Adapters(), self_check=False) as backend:
        for path, lora in adapters.items():
            write_adapter(backend, Path(path), lora)


def sampled(
    engine: str,
    ranks: int,
    checkpoint: str,
    requests: list[SampleRequest],
    paths: dict[str, str],
    **options: Any,
) -> list[tuple[list[SampleResult], list[SampleResult], str | None]]:
    """Return on every rank the results with the cache and without it, and why no cache was used."""

    def on_rank() -> Any:
        with make(checkpoint, engine, **options) as backend:
            for name, path in paths.items():
                backend.load_adapter(name, path)
            sampler = megascend.Sampler(backend)
            results = sampler.generate(requests)
            return results, megascend.Sampler(backend, cache=False).generate(requests), sampler.cache_unsupported_reason

    megascend.bootstrap("cpu", engine=engine)
    return on_ranks(on_rank, ranks)


if __name__ == "__main__":
    do_jobs(globals())
