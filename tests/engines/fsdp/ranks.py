"""Programs of the FSDP engine's ranks for tests: run as a script, so that no Megatron is imported in their process.

    python ranks.py JOB RESULT

JOB and RESULT are files of ``torch.save``: functions' names and arguments, and their results. Ranks are forks of the script.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from legs import run_leg, weights_of

import megascend
import megascend.engines.fsdp.engine  # ranks find it imported
from megascend.engines.common.checkpoints import engine_state
from megascend.engines.fsdp import recomputation, transformers_api
from megascend.errors import MegascendError
from megascend.testing import run_distributed
from megascend.testing.parity import (
    LR,
    MAX_GRAD_NORM,
    STEPS,
    WEIGHT_DECAY,
    causal_samples,
    first_of_equals,
    token_lists,
)

FOREIGN = ("megatron", "mcore_bridge", "transformer_engine", "mindspeed", "megascend.reference.te")


def make(checkpoint: str, engine: str = "fsdp", **options: Any) -> megascend.Backend:
    adam = megascend.Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM)
    settings: dict[str, Any] = {"precision": "fp32", "optimizer": adam, "platform": "cpu", "timeout_s": 60}
    settings["batching"] = megascend.Batching(micro_batch_tokens=64)
    return megascend.make_backend(engine, model=checkpoint, **settings | options)


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    return run_distributed(function, world_size, *args, init=False, timeout_s=120, **options)


class RankResults(dict[str, Any]):
    """A rank's results; those that all ranks must report alike are attributes too."""

    @property
    def losses(self) -> list[float]:
        return self["losses"]

    @property
    def grad_norms(self) -> list[float]:
        return self["norms"]


def trajectory(
    checkpoint: str, world_size: int, steps: int = STEPS, weights: bool = False, **options: Any
) -> dict[str, Any]:
    """Return losses and norms of rank 0, equal on all ranks; optionally the trained weights; each rank's bytes read and
    imported modules.
    """

    def on_rank() -> RankResults:
        backend = make(checkpoint, **options)
        samples = backend.shard(causal_samples(token_lists()))
        results = RankResults(losses=[], norms=[], read=backend.engine.bytes_read)  # type: ignore[attr-defined]
        for _ in range(steps):
            results["told"] = []
            backend.on_micro_batch = lambda index, count: results["told"].append((index, count))
            with all_reduces(backend.groups.device_group("world")) as reductions:
                result = backend.forward_backward(samples)
            results["reductions"] = len(reductions)
            results["micro_batches"] = result.micro_batches
            results["losses"].append(result.loss)
            results["norms"].append(backend.optimizer_step().grad_norm)
        if weights:
            results["weights"] = weights_of(backend, None)
        backend.close()
        results["foreign"] = sorted(name for name in sys.modules if name.startswith(FOREIGN))
        results["patched"] = torch.cuda.get_rng_state.__module__
        return results

    ranks = on_ranks(on_rank, world_size)
    first = first_of_equals(f"{checkpoint} on {world_size}", ranks)
    return dict(first) | {"read": [rank["read"] for rank in ranks]}


@contextlib.contextmanager
def all_reduces(group: Any) -> Iterator[list[Any]]:
    """Record the tensors that are all-reduced over ``group`` within the context."""
    plain, tensors = dist.all_reduce, []

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if options.get("group") is group:
            tensors.append(tensor)
        return plain(tensor, *args, **options)

    dist.all_reduce = counted
    try:
        yield tensors
    finally:
        dist.all_reduce = plain


def one_step(
    checkpoint: str, world_size: int, samples: list[Any], losses: list[str], **options: Any
) -> dict[str, tuple[float, float]]:
    """Return loss and norm of one step for every built-in loss, with learning rate 0."""

    def on_rank() -> dict[str, tuple[float, float]]:
        with make(checkpoint, optimizer=megascend.Adam(lr=0.0), **options) as backend:
            shard = backend.shard(samples)
            return {
                loss: (backend.forward_backward(shard, loss).loss, backend.optimizer_step().grad_norm)
                for loss in losses
            }

    return on_ranks(on_rank, world_size)[0]


def drifting(checkpoint: str) -> dict[str, float]:
    """Return the norm of one step with routers that choose other experts when called again: without recomputation, with it, and
    with torch's plain recomputation.
    """
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    plain = qwen.Qwen3MoeTopKRouter.forward
    calls: dict[int, int] = {}

    def drift(self: Any, hidden: torch.Tensor) -> Any:
        logits, weights, index = plain(self, hidden)
        calls[id(self)] = calls.get(id(self), -1) + 1
        return logits, weights, (index + calls[id(self)] % 2) % self.num_experts

    def norm(granularity: str, saves_routing: bool) -> float:
        def on_rank() -> float:
            if granularity == "full":
                qwen.Qwen3MoeTopKRouter.forward = drift  # type: ignore[method-assign]
            if not saves_routing:
                recomputation.contexts = lambda granularity: torch.utils.checkpoint.noop_context_fn
            recompute = megascend.Recompute(granularity=granularity)  # type: ignore[arg-type]
            with make(checkpoint, recompute=recompute) as backend:
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                return backend.optimizer_step().grad_norm

        return on_ranks(on_rank, 2)[0]

    return {"plain": norm("none", True), "saved": norm("full", True), "torch": norm("full", False)}


def resumed(checkpoint: str, folder: str, world_size: int = 2, **options: Any) -> dict[str, Any]:
    """Train four steps, and two steps, a checkpoint and two more; return whether both agree to the bit.

    A skipped step before the checkpoint counts in the schedule, and not in the optimizer.
    """
    schedule = megascend.Schedule(kind="linear", total_steps=9)

    def steps(backend: Any, samples: Any, count: int) -> list[tuple[float, float]]:
        return [(backend.forward_backward(samples).loss, backend.optimizer_step().grad_norm) for _ in range(count)]

    def on_rank() -> dict[str, Any]:
        with make(checkpoint, schedule=schedule, **options) as backend:
            samples = backend.shard(causal_samples(token_lists()))
            figures = steps(backend, samples, 2)
            backend.forward_backward(samples, lambda logprobs, inputs: logprobs * math.nan)
            assert backend.optimizer_step().skipped
            at_save = backend.forward(samples).logprobs
            backend.save(folder, progress={"at": 2}, wait=True)
            figures += steps(backend, samples, 2)
            weights = {name: tensor.clone() for name, tensor in backend.named_weights()}
            backend.forward(samples)  # gathers what must not be used after the load
            assert backend.load(folder) == {"at": 2}
            loaded_in_place = equal(at_save, backend.forward(samples).logprobs)
        with make(checkpoint, schedule=schedule, seed=99, **options) as backend:
            backend.load(folder)
            loaded = equal(at_save, backend.forward(samples).logprobs)
            repeated = steps(backend, samples, 2)
            same = all(torch.equal(weights[name], tensor) for name, tensor in backend.named_weights())
        return {
            "figures": figures,
            "same": (loaded_in_place, loaded, repeated == figures[2:], same),
            "count": len(weights),
        }

    return on_ranks(on_rank, world_size)[0]


def moved(checkpoint: str, folder: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Train two steps, save, and train two more: in one layout, and the last two in another. ``ranks`` and options of each."""

    def first() -> Any:
        with make(checkpoint, **{k: v for k, v in before.items() if k != "ranks"}) as backend:
            samples = backend.shard(causal_samples(token_lists()))
            for _ in range(2):
                backend.forward_backward(samples)
                backend.optimizer_step()
            backend.save(folder, wait=True)
            weights = {name: tensor.clone() for name, tensor in backend.named_weights(receivers="main")}
            return weights, [
                (backend.forward_backward(samples).loss, backend.optimizer_step().grad_norm) for _ in range(2)
            ]

    def second() -> Any:
        with make(checkpoint, **{k: v for k, v in after.items() if k != "ranks"}) as backend:
            backend.load(folder)
            weights = {name: tensor.clone() for name, tensor in backend.named_weights(receivers="main")}
            samples = backend.shard(causal_samples(token_lists()))
            return weights, [
                (backend.forward_backward(samples).loss, backend.optimizer_step().grad_norm) for _ in range(2)
            ]

    (saved, figures), *_ = on_ranks(first, before["ranks"])
    (loaded, continued), *_ = on_ranks(second, after["ranks"])
    same = saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    return {"same": same, "count": len(saved), "figures": figures, "continued": continued}


def leg(
    checkpoint: str,
    world_size: int,
    steps: int,
    load: str | None = None,
    save: tuple[int, str] | None = None,
    adapter: str | None = None,
    engine: str = "fsdp",
    **options: Any,
) -> dict[str, Any]:
    """Run a part of a run on this engine or on the single one: see :func:`legs.run_leg`."""
    return on_ranks(run_leg, world_size, lambda: make(checkpoint, engine, **options), steps, load, save, adapter)[0]


def exported(checkpoint: str, folder: str, world_size: int, **options: Any) -> tuple[list[str], float]:
    """Return the names in which an export of the untrained model differs from its source, and transformers' largest difference
    from the engine on a trained export.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    def on_rank() -> Any:
        with make(checkpoint, **options) as backend:
            backend.export_hf(Path(folder) / "plain")
            samples = causal_samples(token_lists())
            backend.forward_backward(backend.shard(samples))
            backend.optimizer_step()
            backend.export_hf(Path(folder) / "trained")
            return backend.forward(samples).logprobs

    logprobs = on_ranks(on_rank, world_size)[0]
    source, exported_weights = (
        load_file(path / "model.safetensors") for path in (Path(checkpoint), Path(folder) / "plain")
    )
    tied = {"lm_head.weight"} - exported_weights.keys()
    different = [
        name
        for name in (source.keys() | exported_weights.keys()) - tied
        if name not in source or name not in exported_weights or not torch.equal(source[name], exported_weights[name])
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(Path(folder) / "trained", dtype=torch.float32)
    furthest = 0.0
    with torch.no_grad():
        for ids, actual in zip(token_lists(), logprobs, strict=True):
            tokens = torch.tensor(ids)
            expected = model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            furthest = max(furthest, float((expected - actual).abs().max()))
    return different, furthest


def state_of(backend: megascend.Backend) -> list[torch.Tensor]:
    """Return copies of this rank's parameters and optimizer state."""
    return [part.clone() for c in engine_state(backend.engine, loading=True).values() for _, part in c.slices]


def not_finite(checkpoint: str, world_size: int = 2, **options: Any) -> list[tuple[Any, bool, float]]:
    """Make a step with a NaN on the last rank only; return it, whether nothing changed, and the loss of a next step."""

    def on_rank() -> Any:
        with make(checkpoint, **options) as backend:
            samples = backend.shard(causal_samples(token_lists()))
            backend.forward_backward(samples)
            backend.optimizer_step()
            before = state_of(backend)
            poison = backend.rank == world_size - 1
            for sample in samples:
                sample.advantages = torch.full((len(sample),), torch.nan if poison else 1.0)
                sample.old_logprobs = torch.full((len(sample),), -6.0)
            backend.forward_backward(samples, "importance_sampling")
            step = backend.optimizer_step()
            return step, equal(before, state_of(backend)), backend.forward_backward(samples).loss

    return on_ranks(on_rank, world_size)


def without_gradients(checkpoint: str, world_size: int, **options: Any) -> list[tuple[list[str], bool]]:
    """Call optimizer_step after a step and after discarded gradients; return the errors, and whether nothing has changed."""

    def on_rank() -> tuple[list[str], bool]:
        with make(checkpoint, **options) as backend:
            samples, messages = backend.shard(causal_samples(token_lists())), []
            backend.forward_backward(samples)
            assert backend.optimizer_step(lr=0.25).lr == 0.25  # in place of the schedule's
            before = state_of(backend)
            for discarded in (False, True):
                if discarded:
                    backend.forward_backward(samples)
                    backend.discard_gradients()
                try:
                    backend.optimizer_step()
                except MegascendError as error:
                    messages.append(str(error))
            return messages, equal(before, state_of(backend)) and backend.step_count == 1

    return on_ranks(on_rank, world_size)


def left_early(checkpoint: str) -> list[str]:
    """Return each of two ranks' error for a stream of weights that rank 1 leaves after one tensor."""

    def on_rank() -> str:
        with make(checkpoint) as backend:
            stream = backend.named_weights()
            if backend.rank == 1:
                next(stream)
                stream.close()  # type: ignore[attr-defined]
                return "left"
            try:
                return str(len(list(stream)))
            except MegascendError as error:
                return str(error)

    return on_ranks(on_rank, 2)


def refused(checkpoint: str, world_size: int, **options: Any) -> list[str]:
    """Return each rank's error for settings that the engine does not support."""

    def on_rank() -> str:
        try:
            make(checkpoint, **options).close()
        except MegascendError as error:
            return str(error)
        return "it was not refused"

    return on_ranks(on_rank, world_size)


def balanced(
    checkpoint: str, world_size: int, lengths: tuple[int, ...], steps: int, **options: Any
) -> tuple[list[float], list[float], list[list[int]]]:
    """Return losses and norms under an auxiliary loss, and the samples of each micro batch of all ranks."""

    def on_rank() -> Any:
        with make(checkpoint, **options) as backend:
            global_batch = causal_samples(token_lists(lengths=lengths))
            number = {id(sample): index for index, sample in enumerate(global_batch)}
            shard = backend.shard(global_batch)
            members: list[list[int]] = []
            run = backend.engine.run

            def watched(batches: Any, *args: Any, **kwargs: Any) -> Any:
                members[:] = [
                    [number[id(shard[member])] for member in batch.members] for batch in batches if not batch.dummy
                ]
                return run(batches, *args, **kwargs)

            figures = []
            with patch.object(backend.engine, "run", watched):
                for _ in range(steps):
                    figures.append((backend.forward_backward(shard).loss, backend.optimizer_step().grad_norm))
            return figures, members if backend.groups.coordinates.context == 0 else []

    ranks = on_ranks(on_rank, world_size)
    losses, norms = (list(values) for values in zip(*ranks[0][0], strict=True))
    return losses, norms, [group for _, members in ranks for group in members]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def do_jobs(functions: dict[str, Any]) -> None:
    """Run JOB's calls of ``functions``, one after the other, and write their results."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    transformers_api.check_version()
    results = [functions[name](*args, **options) for name, args, options in torch.load(sys.argv[1], weights_only=False)]
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    do_jobs(globals())
