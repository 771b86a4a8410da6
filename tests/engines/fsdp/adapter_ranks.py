"""Programs of the FSDP engine's ranks with adapters for tests. A script like ranks.py, in the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from adapter_cases import DROPPING, samples_of, steps
from ranks import do_jobs, equal, make, on_ranks, refused  # noqa: F401 - a job

from megascend import Adapters, Lora
from megascend.testing.parity import (
    STEPS,
    causal_samples,
    first_of_equals,
    token_lists,
)
from support.lora_parity import ALL, PeftTrajectory, train_mixed, train_one, write_adapter


def written(checkpoint: str, adapters: dict[str, Lora], targets: Any = "all-linear") -> None:
    """Write adapters that have no zero factor, each to its folder."""

    def on_rank() -> None:
        with make(checkpoint, adapters=Adapters(targets=targets)) as backend:
            for path, lora in adapters.items():
                write_adapter(backend, Path(path), lora)

    on_ranks(on_rank, 1)


def memory(model: Any) -> dict[str, int]:
    """Return the bytes and the number of gradients of the frozen model on this rank."""
    local = [parameter.to_local() for parameter in model.parameters()]
    return {
        "bytes": sum(part.numel() * part.element_size() for part in local),
        "gradients": sum(parameter.grad is not None for parameter in model.parameters()),
    }


def trained(
    checkpoint: str, world_size: int, starts: list[str], out: str, targets: Any = "all-linear", **options: Any
) -> tuple[list[PeftTrajectory], list[torch.Tensor], list[dict[str, int]]]:
    """Train one adapter, or several in the same batches; return trajectories, logits of the last one, and each rank's memory."""

    def on_rank() -> Any:
        with make(checkpoint, adapters=Adapters(targets=targets), **options) as backend:
            paths = [Path(start) for start in starts]
            names = [f"tenant-{number}" for number in range(len(starts))] if len(starts) > 1 else ["tenant"]
            if len(starts) == 1:
                trajectories = [train_one(backend, paths[0], STEPS, Path(out) / "tenant")]
            else:
                trajectories = train_mixed(backend, paths, STEPS, Path(out))
            samples = causal_samples(token_lists())
            logits = backend.forward(samples, logits=True, adapter=names[-1]).logits
            last = backend.next_token_logits(samples, adapter=names[-1])
            for full, row in zip(logits, last, strict=True):
                torch.testing.assert_close(row, full[-1])
            return trajectories, logits, memory(backend.engine.model)  # type: ignore[attr-defined]

    ranks = on_ranks(on_rank, world_size)
    same = [first_of_equals(starts[number], [rank[0][number] for rank in ranks]) for number in range(len(starts))]
    return same, ranks[0][1], [rank[2] for rank in ranks]


def vectors(backend: Any, *names: str) -> list[torch.Tensor]:
    """Return copies of values and moments of adapters."""
    adapters = [backend.adapters[name] for name in names]
    return [part.detach().clone() for adapter in adapters for part in (adapter.values, *adapter.moments())]


def resumed(checkpoint: str, folder: str) -> dict[str, Any]:
    """Train two adapters on two ranks for two steps, save, and train two more; repeat from the checkpoint, also on one rank."""

    def first() -> dict[str, Any]:
        with make(checkpoint, adapters=Adapters(targets=ALL)) as backend:
            for name, lora in DROPPING.items():
                backend.add_adapter(name, lora)
            samples = samples_of("ab")
            steps(backend, samples, 2)
            backend.save(folder, progress={"at": 2}, wait=True)
            figures = steps(backend, samples, 2)
            expected = vectors(backend, "a", "b")
        with make(checkpoint, adapters=Adapters(targets=ALL), seed=99) as backend:
            assert backend.load(folder) == {"at": 2}
            repeated = steps(backend, samples, 2)
            return {"figures": figures, "again": repeated, "same": equal(expected, vectors(backend, "a", "b"))}

    def on_one() -> list[tuple[float, float]]:
        with make(checkpoint, adapters=Adapters(targets=ALL)) as backend:
            backend.load(folder)
            return steps(backend, samples_of("ab"), 2)

    return on_ranks(first, 2)[0] | {"on one": on_ranks(on_one, 1)[0]}


def kept_apart(checkpoint: str) -> dict[str, bool]:
    """Train two adapters in the same batches on two ranks; return whether one is unaffected by the other."""

    def on_rank() -> dict[str, bool]:
        samples = samples_of("ab")

        def run(change: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            with make(checkpoint, adapters=Adapters()) as backend:
                for name, lora in DROPPING.items():
                    backend.add_adapter(name, lora.model_copy(update={"targets": "all-linear"}))
                steps(backend, samples, 1)
                if change == "nan":
                    backend.adapters["b"].values.detach().fill_(torch.nan)
                backend.forward_backward(backend.shard(samples))
                if change == "one by one":
                    backend.optimizer_step("b")
                    assert backend.adapters["a"].accumulated
                    backend.optimizer_step("a")
                else:
                    step = backend.optimizer_step()
                    assert (step.adapters["a"].skipped, step.adapters["b"].skipped) == (False, change == "nan")
                values = vectors(backend, "a"), vectors(backend, "b")
                if change == "removed":
                    backend.remove_adapter("b")
                    before = backend.forward(samples[:2], adapter="a", reference=True).logprobs
                    backend.remove_adapter("a")
                    after = backend.forward(causal_samples(token_lists())[:2]).logprobs
                    assert equal(before, after), "the model itself has changed"
                return values

        (a, b), with_nan, in_turn = run("removed"), run("nan"), run("one by one")
        return {
            "not a number": equal(a, with_nan[0]),
            "one step after the other": equal(a + b, in_turn[0] + in_turn[1]),
        }

    return on_ranks(on_rank, 2)[0]


def exported(
    checkpoint: str, adapter: str, folder: str, world_size: int, targets: Any, **options: Any
) -> dict[str, Any]:
    """Export an adapter merged and unmerged, as files and as streams; return how they and the merged model's logits agree."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    def on_rank() -> Any:
        with make(checkpoint, adapters=Adapters(targets=targets), **options) as backend:
            backend.load_adapter("it", adapter)
            samples = causal_samples(token_lists())
            backend.export_hf(Path(folder) / "merged", adapter="it")
            backend.save_adapter("it", Path(folder) / "saved")
            streams = [
                {
                    name: tensor.clone()
                    for name, tensor in backend.named_weights("it", adapter_only=unmerged, receivers="main")
                }
                for unmerged in (False, True)
            ]
            return backend.forward(samples, logits=True, adapter="it").logits, *streams

    logits, merged, factors = on_ranks(on_rank, world_size)[0]
    files = [load_file(Path(folder) / path) for path in ("merged/model.safetensors", "saved/adapter_model.safetensors")]
    model: Any = AutoModelForCausalLM.from_pretrained(Path(folder) / "merged", dtype=torch.float32)
    furthest = 0.0
    with torch.no_grad():
        for ids, expected in zip(token_lists(), logits, strict=True):
            furthest = max(furthest, float((model(torch.tensor(ids)[None, :-1]).logits[0] - expected).abs().max()))
    same = [
        stream.keys() == file.keys() and all(torch.equal(stream[name], file[name]) for name in file)
        for stream, file in zip((merged, factors), files, strict=True)
    ]
    return {"furthest": furthest, "same": same, "counts": [len(file) for file in files]}


def in_bf16(checkpoint: str) -> list[dict[str, int]]:
    """Return each of two ranks' memory of a frozen bf16 model after a step."""

    def on_rank() -> dict[str, int]:
        with make(checkpoint, adapters=Adapters(), precision="bf16") as backend:
            backend.add_adapter("a")
            steps(backend, samples_of("a"), 1)
            assert backend.adapters["a"].values.dtype == torch.float32
            return memory(backend.engine.model)  # type: ignore[attr-defined]

    return on_ranks(on_rank, 2)


if __name__ == "__main__":
    do_jobs(globals())
