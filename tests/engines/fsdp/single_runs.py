"""Programs of engine single for tests: run as a script, so that no Megatron is imported in its process.

    python single_runs.py JOB RESULT

JOB and RESULT are files of ``torch.save``: functions' names and arguments, and their results.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

import megascend
from megascend.engines.common.checkpoints import engine_state
from megascend.testing.parity import STEPS, causal_samples, token_lists
from support.lora_parity import PeftTrajectory, train_one

FOREIGN = ("megatron", "mcore_bridge", "transformer_engine", "mindspeed", "megascend.reference.te")


def make(checkpoint: str, **options: Any) -> megascend.SingleBackend:
    settings: dict[str, Any] = {"precision": "fp32", "optimizer": megascend.Adam(lr=5e-3), "platform": "cpu"}
    settings["batching"] = megascend.Batching(micro_batch_tokens=200)
    return megascend.SingleBackend(checkpoint, **settings | options)


def trajectory(checkpoint: str, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    backend = make(checkpoint, **options)
    samples = causal_samples(token_lists())
    scores = backend.forward(samples, logits=True)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(backend.forward_backward(samples).loss)
        norms.append(backend.optimizer_step().grad_norm)
    after = backend.forward(samples).logprobs
    backend.close()
    foreign = sorted(name for name in sys.modules if name.startswith(FOREIGN))
    return {
        "losses": losses,
        "norms": norms,
        "logits": scores.logits,
        "logprobs": after,
        "foreign": foreign,
        "patched": torch.cuda.get_rng_state.__module__,
    }


def one_step(checkpoint: str, samples: list[Any], losses: list[str], **options: Any) -> dict[str, tuple[float, float]]:
    """Return loss and norm of one step for every built-in loss, with learning rate 0."""
    backend = make(checkpoint, optimizer=megascend.Adam(lr=0.0), **options)
    results = {
        loss: (backend.forward_backward(samples, loss).loss, backend.optimizer_step().grad_norm) for loss in losses
    }
    backend.close()
    return results


def adapters(checkpoint: str, loaded: str, saved: str, lora: dict[str, Any]) -> dict[str, Any]:
    """Return log-probabilities of a loaded adapter, and of one that is trained here and saved; and its losses and norms."""
    backend = make(checkpoint, adapters=megascend.Adapters())
    samples = causal_samples(token_lists())
    backend.load_adapter("theirs", loaded)
    loaded_logprobs = backend.forward(samples, adapter="theirs").logprobs
    projections = list(backend.engine.trainable.projections)
    backend.add_adapter("mine", megascend.Lora(**lora))
    figures = []
    for _ in range(3):
        result = backend.forward_backward(samples, adapter="mine")
        figures.append((result.loss, backend.optimizer_step().grad_norm))
    backend.save_adapter("mine", saved)
    trained_logprobs = backend.forward(samples, adapter="mine").logprobs
    mixed = [dataclasses.replace(sample, adapter=("mine", "theirs")[i % 2]) for i, sample in enumerate(samples)]
    mixed_logprobs = backend.forward(mixed).logprobs
    backend.close()
    return {
        "theirs": loaded_logprobs,
        "mine": trained_logprobs,
        "mixed": mixed_logprobs,
        "figures": figures,
        "projections": projections,
    }


def against_peft(checkpoint: str, adapter: str, steps: int, out: str) -> PeftTrajectory:
    """Train an adapter; see :func:`support.lora_parity.train_one`."""
    backend = make(checkpoint, adapters=megascend.Adapters())
    result = train_one(backend, Path(adapter), steps, Path(out))
    backend.close()
    return result


def resumed(checkpoint: str, saved: str, **options: Any) -> tuple[bool, int]:
    """Save a run half way and load it into a new backend; return whether both end with the same bits, and the tensor count."""
    samples = causal_samples(token_lists())

    def train(backend: megascend.SingleBackend, steps: int) -> None:
        for _ in range(steps):
            backend.forward_backward(samples)
            backend.optimizer_step()

    first = make(checkpoint, **options)
    train(first, 2)
    first.save(saved, progress={"at": 2}, wait=True)
    train(first, 2)
    expected = bits(first)
    first.close()
    second = make(checkpoint, **options | {"seed": 7})
    assert second.load(saved) == {"at": 2}
    assert second.step_count == 2
    train(second, 2)
    actual = bits(second)
    second.close()
    return expected == actual, len(expected)


def bits(backend: megascend.SingleBackend) -> dict[str, bytes]:
    state = engine_state(backend.engine, loading=True)
    parts = {name: chunks.slices[0][1].flatten().view(torch.uint8) for name, chunks in state.items()}
    contents = {name: values.numpy().tobytes() for name, values in parts.items()}
    counters = repr(backend.engine.trainable.counters()).encode()
    return contents | {"torch": torch.get_rng_state().numpy().tobytes(), "counters": counters}


def exported(checkpoint: str, out: str) -> list[str]:
    """Return the names in which an export and transformers' save_pretrained differ."""
    from safetensors.torch import load_file

    backend = make(checkpoint)
    backend.forward_backward(causal_samples(token_lists()))
    backend.optimizer_step()
    backend.export_hf(Path(out) / "actual")
    backend.engine.model.save_pretrained(Path(out) / "expected")
    backend.close()
    actual, expected = (load_file(Path(out) / folder / "model.safetensors") for folder in ("actual", "expected"))
    assert actual.keys() == expected.keys()
    return [name for name in actual if not torch.equal(actual[name], expected[name])]


def merged(checkpoint: str, out: str) -> float:
    """Return the distance of log-probabilities of an export with a merged adapter from the adapter's."""
    backend = make(checkpoint, adapters=megascend.Adapters())
    samples = causal_samples(token_lists())
    backend.add_adapter("a", megascend.Lora(rank=4))
    for _ in range(2):
        backend.forward_backward(samples, adapter="a")
        backend.optimizer_step()
    expected = backend.forward(samples, adapter="a").logprobs
    backend.export_hf(out, adapter="a")
    reference = backend.forward(samples, adapter="a", reference=True).logprobs
    backend.close()
    merged_backend = make(out)
    actual = merged_backend.forward(samples).logprobs
    merged_backend.close()
    assert distance(expected, reference) > 1e-2
    return distance(expected, actual)


def distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def overflow(checkpoint: str) -> tuple[Any, bool]:
    """Make a step with non-finite gradients; return its result, and whether nothing has changed."""
    backend = make(checkpoint)
    samples = causal_samples(token_lists())
    backend.forward_backward(samples)
    backend.optimizer_step()
    before = {name: value for name, value in bits(backend).items() if name != "counters"}
    backend.forward_backward(samples)
    next(iter(backend.engine.model.parameters())).main_grad.view(-1)[0] = float("inf")
    step = backend.optimizer_step()
    after = bits(backend)
    backend.forward_backward(samples)
    assert backend.optimizer_step(lr=0.25).lr == 0.25  # in place of the schedule's
    backend.close()
    return step, all(after[name] == value for name, value in before.items())


def step_without_gradients(checkpoint: str, engine: str) -> tuple[list[str], bool]:
    """Call optimizer_step after a step and after discarded gradients; return the messages, and whether nothing has changed."""
    backend = getattr(megascend, f"{engine.capitalize()}Backend")(
        checkpoint,
        precision="fp32",
        optimizer=megascend.Adam(lr=5e-3, weight_decay=0.1),
        platform="cpu",
        batching=megascend.Batching(micro_batch_tokens=200),
    )
    samples, messages = causal_samples(token_lists()), []
    backend.forward_backward(samples)
    backend.optimizer_step()
    before = bits(backend)
    for discarded in (False, True):
        if discarded:
            backend.forward_backward(samples)
            backend.discard_gradients()
        try:
            backend.optimizer_step()
        except megascend.ConfigError as error:
            messages.append(str(error))
    unchanged = bits(backend) == before
    backend.forward_backward(samples)
    backend.optimizer_step()
    changed = bits(backend) != before
    backend.close()
    return messages, unchanged and changed and backend.step_count == 2


def refused(checkpoint: str) -> dict[str, str]:
    """Return the error message for each setting that this engine does not support."""
    from megascend.errors import ConfigError

    settings: dict[str, dict[str, Any]] = {
        "recompute.layers: 2 with engine single": {"recompute": megascend.Recompute(granularity="full", layers=2)},
        "transformers has no such loss": {"moe": megascend.Moe(aux_loss="transformers", aux_loss_coefficient=0.1)},
    }
    messages = {}
    for words, options in settings.items():
        try:
            make(checkpoint, **options).close()
        except ConfigError as error:
            messages[words] = str(error)
    return messages


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = torch.load(Path(sys.argv[1]), weights_only=False)
    torch.save([globals()[function](*arguments, **options) for function, arguments, options in jobs], sys.argv[2])
