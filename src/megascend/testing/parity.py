"""Prove a parallel layout: train the same tiny model with megascend and with Hugging Face + torch AdamW, and compare.

The reference is :mod:`megascend.testing.hf_reference`, run in a process of its own: it shares no code with megascend, and
mcore-bridge changes transformers in the process that builds its models.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from megascend.config import Adam, Batching, Moe, Parallel, Precision, Recompute
from megascend.errors import DistributedTestError
from megascend.models import expert_count, registered
from megascend.models.checkpoint_files.architectures import architecture_in
from megascend.runtime.io.shared import cached
from megascend.testing.artifact_cache import copy_or_make, digest
from megascend.testing.reference import run_reference

if TYPE_CHECKING:
    from torch import Tensor

    from megascend.backends import MegatronBackend
    from megascend.training.batch.sample import Sample


class CaseResult(Protocol):
    """Results that must be equal on every rank of a case."""

    @property
    def losses(self) -> list[float]: ...
    @property
    def grad_norms(self) -> list[float]: ...


T = TypeVar("T", bound=CaseResult)

# Odd and even lengths, none of them equal, so that padding and packing differ.
LENGTHS = (20, 33, 9, 28, 17, 40, 25, 12)
PROMPT = 3
STEPS = int(os.environ.get("MEGASCEND_PARITY_STEPS", "10"))
"""Optimizer steps of a training curve."""
LR, WEIGHT_DECAY, MAX_GRAD_NORM = 5e-3, 0.01, 1.0
REFERENCE_TIMEOUT_S = 240.0
TINY_VOCABULARY = 300


@dataclass(frozen=True)
class Case:
    """One layout to prove.

    Attributes:
        name: label in the table.
        arch: as for :func:`megascend.testing.tiny_models.write_tiny_checkpoint`.
        overrides: settings that replace those of the tiny model's configuration.
        aux_loss: coefficient of the routers' load-balancing loss, by the formula ``aux_formula``.
        experts: ``moe.experts``.
        targets: layers that an adapter acts on, where one is trained.
        loss_bound, norm_bound: largest absolute difference allowed over all steps.
        logits_bound: largest absolute difference of any logit, in fp32.
        resumes: after half of the steps the run is saved, its backend closed, and a new one loads the checkpoint.
    """

    name: str
    world_size: int = 1
    parallel: Parallel = Parallel()
    arch: str = "qwen3"
    overrides: dict[str, Any] = field(default_factory=dict)
    precision: Precision = "fp32"
    optimizer: dict[str, Any] = field(default_factory=dict)
    recompute: Recompute = Recompute()
    packing: bool = True
    micro_batch_tokens: int = 64
    aux_loss: float = 0.0
    aux_formula: Literal["megatron", "transformers"] = "megatron"
    experts: Literal["upstream", "grouped"] = "upstream"
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    loss_bound: float = 1e-5
    norm_bound: float = 1e-4
    logits_bound: float = 1e-5
    resumes: bool = False

    @property
    def adam(self) -> Adam:
        """Return the reference's optimizer settings with this case's changes."""
        settings = {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM} | self.optimizer
        return Adam(**settings)


def case_checkpoint(folder: Path, arch: str, **overrides: Any) -> Path:
    """Return the tiny checkpoint of a recipe, in a subfolder of its own, made once."""
    from megascend.testing.tiny_models import write_tiny_checkpoint

    name = "-".join([arch, *(f"{key}-{value}" for key, value in sorted(overrides.items()))])
    return write_tiny_checkpoint(folder / name, arch, **overrides)


def token_lists(vocabulary: int = TINY_VOCABULARY, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return the token ids that every case trains on."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def causal_samples(tokens: list[list[int]]) -> list[Sample]:
    """Return ``tokens`` as samples whose first PROMPT tokens are not trained."""
    from megascend.training.batch.sample import Sample

    return [Sample.causal(ids, prompt_length=PROMPT) for ids in tokens]


@dataclass(frozen=True)
class TrainingCurve:
    """Losses, gradient norms, the untrained model's logits (one fp32 [length, vocabulary] a sample), and, where they were asked
    for, trained weights and the untrained model's gradients by the names of a checkpoint."""

    losses: list[float]
    grad_norms: list[float]
    logits: list[Tensor]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


def reference(folder: Path, script: str | Path, job: dict[str, Any]) -> Path:
    """Run a reference script, one of this package's by name or any by path, on ``job`` in a process of its own; return its file.

    Made once: this session finds it in ``folder``, a later one in the machine's cache (:mod:`artifact_cache`), as long
    as the files that ``job`` names have the same content.
    """
    program = Path(__file__).parent / script
    text = json.dumps(job)
    architecture = architecture_in(Path(job["checkpoint"]))
    modules = [architecture.transformers] if architecture.transformers else []
    result = folder / f"{program.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"

    def run(output: Path) -> None:
        path = result.with_suffix(".json")
        path.write_text(text, encoding="utf-8")
        completed = run_reference(program, path, output, timeout_s=REFERENCE_TIMEOUT_S, modules=modules)
        if completed.returncode:
            raise DistributedTestError(f"the reference {program.name} failed:\n{completed.stderr[-4000:]}")

    def make(output: Path) -> None:
        made_from = _by_content(job) | (
            {"architecture": architecture.code_digest()} if registered(architecture.model_type) else {}
        )
        copy_or_make(program.stem, made_from, program, output, run)

    return cached(result, make)


def _by_content(job: dict[str, Any]) -> dict[str, Any]:
    """Return ``job`` with digests in place of its directories, whose paths do not matter to a reference."""
    contents = {"checkpoint": digest(Path(job["checkpoint"]))}
    if "adapter" in job:  # its settings name the base model's path
        settings = json.loads((Path(job["adapter"]) / "adapter_config.json").read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = None
        contents["adapter"] = digest(Path(job["adapter"]) / "adapter_model.safetensors") + json.dumps(settings)
        contents["adapter_sha256"] = ""
    return job | contents


def first_of_equals(name: str, ranks: Sequence[T]) -> T:
    """Return rank 0's trajectory; an error if another rank reports other losses or gradient norms."""
    for rank, other in enumerate(ranks):
        if (other.losses, other.grad_norms) != (ranks[0].losses, ranks[0].grad_norms):
            raise DistributedTestError(f"{name}: rank {rank} reports other figures than rank 0")
    return ranks[0]


def hf_reference(
    folder: Path,
    checkpoint: Path,
    tokens: list[list[int]],
    steps: int = STEPS,
    aux_loss: float = 0.0,
    loss: str = "cross_entropy",
    fields: list[dict[str, Any]] | None = None,
    aux_formula: str = "megatron",
    micro_batches: list[list[int]] | None = None,
    dtype: str = "float32",
    weights: bool = False,
    gradients: bool = False,
    reduction: str = "mean",
    image_token: int | None = None,
    frozen: Sequence[str] = (),
) -> TrainingCurve:
    """Run the job with Hugging Face and torch AdamW; the result stays in ``folder`` for the next caller with the same job.

    Args:
        fields: per sample, what ``loss`` needs beside the tokens: ``old_logprobs``, ``advantages``, ``pair``...; and ``weights``
            of its targets, if not 0 for the prompt's and 1 for the others.
        micro_batches: samples over which the auxiliary loss is computed, each list by itself; default: all in one.
        dtype: dtype of the parameters and of all computation.
        weights: also return the trained ones.
        gradients: also return those of the first step, before clipping.
        reduction: ``sum``: the loss is not divided by the sum of weights.
        image_token: id of the token that stands for an image's features; ``fields`` may have
            ``pixel_values`` and ``grids``.
        frozen: beginnings of names of parameters that are not trained.
    """
    from safetensors.torch import load_file

    job = {
        "checkpoint": str(checkpoint),
        "samples": [
            {"token_ids": ids, "prompt_length": PROMPT, **extra}
            for ids, extra in zip(tokens, fields or [{}] * len(tokens), strict=True)
        ],
        "loss": loss,
        "steps": steps,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "aux_loss": aux_loss,
        "aux_formula": aux_formula,
        "micro_batches": micro_batches or [list(range(len(tokens)))],
    }
    job |= ({"dtype": dtype} if dtype != "float32" else {}) | ({"weights": True} if weights else {})
    job |= {"gradients": True} if gradients else {}
    job |= {"reduction": reduction} if reduction != "mean" else {}
    job |= {"image_token": image_token, "frozen": list(frozen)} if image_token is not None else {}
    tensors = load_file(reference(folder, "hf_reference.py", job))

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    return TrainingCurve(
        tensors["losses"].tolist() if steps else [],
        tensors["grad_norms"].tolist() if steps else [],
        [tensors[f"logits.{index}"] for index in range(len(tokens))],
        part("weights."),
        part("gradients."),
    )


def bounds(case: Case, folder: Path, checkpoint: Path, tokens: list[list[int]], steps: int) -> tuple[float, float]:
    """Return the bounds of a case's losses and gradient norms in a number of steps.

    Some models amplify rounding: there they are twice what transformers' own fp32 is away from fp64, if that is more. In bf16
    they are four times what transformers' own bf16 is away from its fp32 within ten steps, routing that flips included: the
    first three steps alone are too few to tell how far it strays. What is computed wrongly in 16 bits only shows in the gradients
    of one step (``tests/models/test_gradients.py``).
    """
    if case.precision == "fp16":
        return case.loss_bound, case.norm_bound
    dtypes = ("float32", "float64") if case.precision == "fp32" else ("bfloat16", "float32")
    steps = steps if case.precision == "fp32" else max(steps, 10)
    rounded, exact = (
        replace(hf_reference(folder, checkpoint, tokens, steps, dtype=dtype), logits=[]) for dtype in dtypes
    )
    rounding = differences(rounded, exact)
    if case.precision == "bf16":
        loss, norm = (0.05, 0.5) if expert_count(architecture_in(checkpoint).tiny) else (0.02, 0.1)
        return max(loss, 4 * rounding.loss), max(norm, 4 * rounding.grad_norm)
    return max(case.loss_bound, 2 * rounding.loss), max(case.norm_bound, 2 * rounding.grad_norm)


def run_case(
    case: Case,
    checkpoint: Path,
    tokens: list[list[int]],
    steps: int = STEPS,
    weights: bool = False,
    prepared: list[Sample] | None = None,
    **settings: Any,
) -> TrainingCurve:
    """Run one rank of ``case``; return its trajectory, with logits only where one data parallel rank has all samples.

    With ``weights`` rank 0's has the trained weights, as they are exported. ``prepared`` samples replace those of ``tokens``;
    ``settings`` are the backend's.
    """
    backend = case_backend(case, checkpoint, **settings)
    all_samples = causal_samples(tokens) if prepared is None else prepared
    samples = backend.shard(all_samples)
    logits = backend.forward(all_samples, logits=True).logits if backend.topology.data == 1 else None
    losses, norms = [], []
    for number in range(steps):
        if case.resumes and number == steps // 2:
            saved = checkpoint.with_name(f"{checkpoint.name}-{case.name}".replace(" ", "_"))
            backend.save(saved, wait=True)
            backend.close()
            backend = case_backend(case, checkpoint, **settings)
            backend.load(saved)
        result = backend.forward_backward(samples)
        step = backend.optimizer_step()
        losses.append(result.loss)
        norms.append(step.grad_norm)
    trained = (
        {name: tensor.cpu().clone() for name, tensor in backend.named_weights(receivers="main")} if weights else {}
    )
    backend.close()
    return TrainingCurve(losses, norms, logits or [], trained)


def case_backend(case: Case, checkpoint: Path, **settings: Any) -> MegatronBackend:
    """Return the backend that ``case`` describes, without the self-check; ``settings`` are further arguments, or other ones."""
    from megascend.backends import MegatronBackend

    arguments: dict[str, Any] = {
        "parallel": case.parallel,
        "precision": case.precision,
        "optimizer": case.adam,
        "recompute": case.recompute,
        "moe": Moe(
            aux_loss=case.aux_formula if case.aux_loss else "none",
            aux_loss_coefficient=case.aux_loss,
            experts=case.experts,
        ),
        "batching": Batching(packing=case.packing, micro_batch_tokens=case.micro_batch_tokens),
        "timeout_s": 60,
        "self_check": False,  # a trajectory is compared with Hugging Face
    }
    return MegatronBackend(model=checkpoint, **arguments | settings)


def train_case(case: Case, checkpoint: Path, tokens: list[list[int]], *options: Any, **settings: Any) -> TrainingCurve:
    """Call :func:`run_case` on forked processes; return rank 0's trajectory, equal on all ranks or an error."""
    from megascend.testing.distributed import run_distributed

    arguments = (case, checkpoint, tokens, *options)
    ranks = run_distributed(run_case, case.world_size, *arguments, init=False, timeout_s=120, **settings)
    return first_of_equals(case.name, ranks)


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences to the reference; ``logits`` is None where the case does not compare them."""

    loss: float
    grad_norm: float
    logits: float | None


def differences(trajectory: TrainingCurve, reference: TrainingCurve) -> Differences:
    """Compare a trajectory with the reference's."""
    pairs = list(zip(trajectory.logits, reference.logits, strict=True)) if trajectory.logits else []
    return Differences(
        loss=max(abs(a - b) for a, b in zip(trajectory.losses, reference.losses, strict=True)),
        grad_norm=max(abs(a - b) for a, b in zip(trajectory.grad_norms, reference.grad_norms, strict=True)),
        logits=max(float((a - b).abs().max()) for a, b in pairs) if pairs else None,
    )


@dataclass(frozen=True)
class RelativeDifferences:
    """Largest differences to the reference over the size of what is compared; None where the case does not compare it.

    Attributes:
        loss, grad_norm: largest difference in any step, over the reference's value.
        logits: largest difference of any logit of the untrained model, over its sample's largest logit.
        weights: L2 norm of the difference of any trained and exported tensor, over the tensor's.
    """

    loss: float
    grad_norm: float
    logits: float | None
    weights: float | None


def relative_differences(trajectory: TrainingCurve, reference: TrainingCurve) -> RelativeDifferences:
    """Compare a trajectory with the reference's."""
    logits = list(zip(trajectory.logits, reference.logits, strict=True)) if trajectory.logits else []
    missing = reference.weights.keys() - trajectory.weights.keys() if trajectory.weights else set()
    if missing:
        raise DistributedTestError(f"the export lacks {', '.join(sorted(missing))}")
    trained = trajectory.weights
    weights = [(trained[name].float(), tensor) for name, tensor in reference.weights.items()] if trained else []
    return RelativeDifferences(
        loss=max(abs(a / b - 1) for a, b in zip(trajectory.losses, reference.losses, strict=True)),
        grad_norm=max(abs(a / b - 1) for a, b in zip(trajectory.grad_norms, reference.grad_norms, strict=True)),
        logits=max((float((a - b).abs().max() / b.abs().max()) for a, b in logits), default=None),
        weights=max((float((a - b).norm() / b.norm()) for a, b in weights if b.any()), default=None),
    )
