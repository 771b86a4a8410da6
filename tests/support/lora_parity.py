"""Are adapters right? Train them with megascend and with Hugging Face + peft, and compare.

The reference of the first is :mod:`support.peft_reference`, in a process of its own as in
:mod:`megascend.testing.parity`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megascend.config import Adapters, Lora
from megascend.errors import DistributedTestError
from megascend.runtime.io.shared import cached
from megascend.testing.parity import (
    LR,
    MAX_GRAD_NORM,
    PROMPT,
    STEPS,
    WEIGHT_DECAY,
    Case,
    case_backend,
    causal_samples,
    first_of_equals,
    reference,
    token_lists,
)
from megascend.training.lora.peft_format import CONFIG
from megascend.training.lora.peft_tensors import WEIGHTS, to_factors
from support.parity_matrix import matrix

if TYPE_CHECKING:
    from torch import Tensor

    from megascend.backend import Backend
    from megascend.backends import MegatronBackend
    from megascend.training.batch.sample import Sample
    from megascend.training.lora.factors import Factors

RANK, ALPHA, SEED = 8, 12.0, 7
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
"""All linear layers of a dense model, the output layer and the embedding."""
WITH_EMBEDDING_AND_HEAD = (
    *("single", "TP2", "TP2 + SP", "TP2 + SP, padded", "TP2, odd vocabulary", "PP2", "PP2 x VPP2", "CP2 packed"),
    *("DP2, distributed optimizer", "TP2 x PP2", "full recompute", "CP2, ring"),
)
"""Layouts in which an adapter of :data:`ALL` is compared as well. Not in 16 bits: with B of the embedding starting at 1, fp16's
first loss scale is too large, and a skipped step is no rounding."""


@dataclass(frozen=True)
class PeftTrajectory:
    """TrainingCurve of an adapter under peft.

    Attributes:
        losses, grad_norms: of every step, before clipping; empty without training.
        logits: of the initial adapter, one fp32 [length, vocabulary] a sample.
        factors: after the last step, by Hugging Face name.
        gradients: of the first step, after clipping, as ``factors``; empty where they were not kept.
    """

    losses: list[float]
    grad_norms: list[float]
    logits: list[Tensor]
    factors: dict[str, Factors]
    gradients: dict[str, Factors] = field(default_factory=dict)


def peft_reference(
    folder: Path,
    checkpoint: Path,
    adapter: Path,
    tokens: list[list[int]],
    steps: int = STEPS,
    lr: float = LR,
    weight_decay: float = WEIGHT_DECAY,
    max_grad_norm: float = MAX_GRAD_NORM,
    learning_rates: Sequence[float] | None = None,
    fields: Sequence[dict[str, Any]] = (),
    dtype: str = "float32",
) -> PeftTrajectory:
    """Train ``adapter`` with peft and torch AdamW. Kept in ``folder`` for the next caller with the same job.

    Args:
        folder: where jobs and results are kept.
        checkpoint: Hugging Face directory of the base model.
        adapter: PEFT directory; left as it is.
        tokens: token ids of the samples, the first PROMPT of which are not trained.
        steps: 0 trains nothing: logits and factors show what peft loaded.
        lr, weight_decay, max_grad_norm: of AdamW over all factors; a norm of 0 switches clipping off.
        learning_rates: of every step, in place of ``lr``.
        fields: of each sample beside its tokens: ``weights``, and of images ``image_token``, ``pixel_values`` and ``grids``.
        dtype: of all parameters.

    Raises:
        DistributedTestError: the reference failed; the message holds its output.
    """
    from safetensors.torch import load_file

    if learning_rates is not None and len(learning_rates) != steps:
        raise DistributedTestError(f"{len(learning_rates)} learning rates for {steps} steps")
    contents = b"".join((adapter / name).read_bytes() for name in (CONFIG, WEIGHTS))
    job = {
        "checkpoint": str(checkpoint),
        "adapter": str(adapter),
        "adapter_sha256": hashlib.sha256(contents).hexdigest(),  # the folder may hold other factors next time
        "samples": [
            {"token_ids": ids, "prompt_length": PROMPT, **extra}
            for ids, extra in zip(tokens, fields or [{}] * len(tokens), strict=True)
        ],
        "steps": steps,
        "lr": lr,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "learning_rates": None if learning_rates is None else list(learning_rates),
        "dtype": dtype,
    }
    tensors = load_file(reference(folder, Path(__file__).with_name("peft_reference.py"), job))
    config = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))

    def factors(prefix: str) -> dict[str, Factors]:
        factors_of_adapter = {
            key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
        }
        return to_factors(factors_of_adapter, config["r"], config.get("target_parameters") or [])

    return PeftTrajectory(
        tensors["losses"].tolist() if steps else [],
        tensors["grad_norms"].tolist() if steps else [],
        [tensors[f"logits.{index}"] for index in range(len(tokens))],
        factors("adapter."),
        factors("gradient.") if steps else {},
    )


def peft_gradients(folder: Path, checkpoint: Path, adapter: Path, tokens: list[list[int]]) -> dict[str, Factors]:
    """Return the gradients of ``adapter``'s factors in the first step under peft, before clipping, by Hugging Face name.

    Args: as :func:`peft_reference`.
    """
    from safetensors.torch import load_file

    contents = b"".join((adapter / name).read_bytes() for name in (CONFIG, WEIGHTS))
    job = {
        "checkpoint": str(checkpoint),
        "adapter": str(adapter),
        "adapter_sha256": hashlib.sha256(contents).hexdigest(),
        "samples": [{"token_ids": ids, "prompt_length": PROMPT} for ids in tokens],
        "steps": 0,
        "gradients": True,
    }
    tensors = load_file(reference(folder, Path(__file__).with_name("peft_reference.py"), job))
    config = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    gradients = {
        key.removeprefix("gradients."): value for key, value in tensors.items() if key.startswith("gradients.")
    }
    return to_factors(gradients, config["r"], config.get("target_parameters") or [])


# --- one adapter against peft ---


def lora_matrix(platform: str = "cpu") -> list[Case]:
    """Return the layouts of the full fine-tuning matrix that affect a single adapter.

    Left out are cases about the optimizer of the model's own parameters, and the auxiliary loss, which adapters refuse. Added
    are those in which the adapter acts on the embedding and the head as well.
    """
    cases = [case for case in matrix(platform) if not (case.optimizer or case.aux_loss or case.resumes)]
    selected = [case for case in cases if case.name in WITH_EMBEDDING_AND_HEAD]
    return cases + [replace(case, name=f"embedding and head, {case.name}", targets=ALL) for case in selected]


def case_adapter(checkpoint: Path, case: Case, seed: int = SEED) -> Path:
    """Return the adapter that all layouts of a checkpoint start from, created once for each choice of targets."""
    name = f"{checkpoint.name}-adapter{'' if case.targets == 'all-linear' else '-embedding-and-head'}-{seed}"

    def make(path: Path) -> None:
        from megascend.testing.distributed import run_distributed

        run_distributed(make_adapter, 1, checkpoint, path, seed, case.targets, init=False, timeout_s=120)

    return cached(checkpoint.parent / name, make)


def make_adapter(
    checkpoint: Path, path: Path, seed: int, targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
) -> None:
    """Write an adapter with :func:`write_adapter`."""
    backend = adapter_backend(Case("single", targets=targets), checkpoint)
    write_adapter(backend, path, Lora(rank=RANK, alpha=ALPHA, seed=seed, targets=targets))
    backend.close()


def write_adapter(backend: Backend, path: Path, lora: Lora) -> None:
    """Write an adapter whose factors are all not zero, so that each has a gradient in the first step. One process."""
    import torch

    backend.add_adapter("made", lora)
    adapter = backend.adapters["made"]
    generator = torch.Generator().manual_seed(lora.seed or 0)
    for _, values in adapter.views(adapter.values.detach()):
        if not values.any():
            values.copy_(0.02 * torch.randn(values.shape, generator=generator))
    backend.save_adapter("made", path)
    backend.remove_adapter("made")


def run_adapter(
    case: Case, checkpoint: Path, adapter: Path, steps: int, out: Path, prepared: list[Sample] | None = None
) -> PeftTrajectory:
    """Train ``adapter`` on one rank of ``case`` and save it to ``out``."""
    backend = adapter_backend(case, checkpoint)
    trajectory = train_one(backend, adapter, steps, out, prepared)
    backend.close()
    return trajectory


def train_one(
    backend: Backend, adapter: Path, steps: int, out: Path, prepared: list[Sample] | None = None
) -> PeftTrajectory:
    """Train ``adapter`` on one rank and save it to ``out``. ``prepared``: samples in place of :func:`token_lists`."""
    from megascend.training.lora import peft_format

    backend.load_adapter("tenant", adapter, optimizer=False)
    global_batch = causal_samples(token_lists()) if prepared is None else prepared
    samples = backend.shard(global_batch)
    unsharded = backend.topology.data == 1
    logits = backend.forward(global_batch, logits=True, adapter="tenant").logits if unsharded else None
    losses, norms = [], []
    for _ in range(steps):
        losses.append(backend.forward_backward(samples, adapter="tenant").loss)
        norms.append(backend.optimizer_step().grad_norm)
    backend.save_adapter("tenant", out)
    return PeftTrajectory(losses, norms, logits or [], peft_format.read(out)[1])


def train_adapter(
    case: Case,
    checkpoint: Path,
    adapter: Path,
    out: Path,
    steps: int = STEPS,
    prepared: list[Sample] | None = None,
) -> PeftTrajectory:
    """Run ``case`` on forked processes; return the trajectory, which must be equal on all ranks."""
    from megascend.testing.distributed import run_distributed

    arguments = (case, checkpoint, adapter, steps, out, prepared)
    ranks = run_distributed(run_adapter, case.world_size, *arguments, init=False, timeout_s=120)
    return first_of_equals(case.name, ranks)


def run_mixed(case: Case, checkpoint: Path, adapters: Sequence[Path], steps: int, out: Path) -> list[PeftTrajectory]:
    """Train several adapters on one rank of ``case``; see :func:`train_mixed`."""
    backend = adapter_backend(case, checkpoint)
    trajectories = train_mixed(backend, adapters, steps, out)
    backend.close()
    return trajectories


def train_mixed(backend: Backend, adapters: Sequence[Path], steps: int, out: Path) -> list[PeftTrajectory]:
    """Train several adapters in the same batches on one rank, each on its share of the tokens; return their trajectories.

    Adapters stay in the backend as ``tenant-0`` and so on. Gradients are read from Adam's first moments after the first step.
    """
    from megascend.training.lora import peft_format

    names = [f"tenant-{number}" for number in range(len(adapters))]
    batch: list[Sample] = []
    for number, (name, path) in enumerate(zip(names, adapters, strict=True)):
        backend.load_adapter(name, path, optimizer=False)
        for sample in causal_samples(share_of(number, len(adapters))):
            sample.adapter = name
            batch.append(sample)
    samples = backend.shard(batch)
    losses: dict[str, list[float]] = {name: [] for name in names}
    norms: dict[str, list[float]] = {name: [] for name in names}
    gradients: dict[str, dict[str, Factors]] = {}
    for number in range(steps):
        result, step = backend.forward_backward(samples), backend.optimizer_step()
        for name in names:
            losses[name].append(result.adapters[name].loss)
            norms[name].append(step.adapters[name].grad_norm)
            if number == 0:
                backend.save_adapter(name, out / f"{name}-first")
                gradients[name] = first_gradients(out / f"{name}-first")
    for name in names:
        backend.save_adapter(name, out / name)
    return [
        PeftTrajectory(losses[name], norms[name], [], peft_format.read(out / name)[1], gradients.get(name, {}))
        for name in names
    ]


def first_gradients(saved: Path) -> dict[str, Factors]:
    """Return the clipped gradients of an adapter that was saved after its first step with the default beta of 0.9."""
    from megascend.training.lora import adapter_io
    from megascend.training.lora.factors import Factors

    moments = adapter_io.read(saved, optimizer=True).moments
    if moments is None:
        raise DistributedTestError(f"{saved} has no optimizer state")
    return {name: Factors(first.a / 0.1, first.b / 0.1) for name, first in moments[0].items()}


def share_of(number: int, count: int) -> list[list[int]]:
    """Return the samples of :func:`token_lists` that one of ``count`` tenants trains on."""
    return token_lists()[number::count]


@dataclass(frozen=True)
class AdapterDifferences:
    """Largest absolute differences to peft; ``logits`` is None where the case does not compare them.

    ``factors`` is relative: the L2 norm of a trained factor's difference over the factor's. (Single elements whose gradient is
    near 0 get a step of Adam's in the direction of its rounding.) ``gradients`` likewise, of the first step's.
    """

    loss: float
    grad_norm: float
    factors: float
    logits: float | None
    gradients: float | None = None


def adapter_differences(trajectory: PeftTrajectory, reference: PeftTrajectory) -> AdapterDifferences:
    """Compare a trajectory with peft's."""
    if trajectory.factors.keys() != reference.factors.keys():
        raise DistributedTestError(
            f"adapted layers differ: {sorted(trajectory.factors.keys() ^ reference.factors.keys())}"
        )
    pairs_of_logits = zip(trajectory.logits, reference.logits, strict=True) if trajectory.logits else ()
    logits = [float((a - b).abs().max()) for a, b in pairs_of_logits]
    return AdapterDifferences(
        loss=max(abs(a - b) for a, b in zip(trajectory.losses, reference.losses, strict=True)),
        grad_norm=max(abs(a - b) for a, b in zip(trajectory.grad_norms, reference.grad_norms, strict=True)),
        factors=largest_difference(trajectory.factors, reference.factors),
        logits=max(logits) if logits else None,
        gradients=largest_difference(trajectory.gradients, reference.gradients) if trajectory.gradients else None,
    )


def largest_difference(values: dict[str, Factors], expected: dict[str, Factors]) -> float:
    """Return the largest L2 norm of a factor's difference over that of the expected factor."""
    return max(
        float((value - reference).norm() / reference.norm())
        for name, factors in expected.items()
        for value, reference in ((values[name].a, factors.a), (values[name].b, factors.b))
    )


def adapter_backend(case: Case, checkpoint: Path) -> MegatronBackend:
    return case_backend(case, checkpoint, adapters=Adapters(targets=case.targets))
