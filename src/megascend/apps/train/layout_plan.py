"""Plan layouts of a run, have the engine check them, and write the run file of one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascend.apps.plan.hardware import Hardware
from megascend.apps.plan.rl import Split, splits
from megascend.apps.plan.search import Candidate, PlannedModel, PlanRequest, SearchResult, run_candidate, search
from megascend.apps.train.preflight import check_lora
from megascend.apps.train.run_backend import backend_settings, bootstrap
from megascend.config import RunConfig, parsed
from megascend.config.registry import ENGINES
from megascend.config.run_file import full_names, read_settings
from megascend.errors import CheckpointError, ConfigError, MegascendError, redacted
from megascend.models.checkpoint_files.files import read_config, read_config_file
from megascend.models.checkpoint_files.hub import snapshot
from megascend.models.checkpoint_files.info import ModelInfo, inspect_checkpoint
from megascend.runtime.topology.topology import Topology
from megascend.surroundings import announce

GAIN = 1.1
"""Factor by which a planned layout has to be faster than a run's before a dry run mentions it: twice the error of predictions for
measured steps (docs/planning.md)."""
CHOSEN = ("parallel", "recompute", "batching.micro_batch_tokens", "optimizer.overlap")
"""Beginnings of the settings that a plan chooses."""
LENGTH = 4096
"""Longest sample of a run file in tokens, unless the model's context is shorter."""
DATA = Path("data.jsonl")
"""Training data of a run file, where none was named."""


@dataclass(frozen=True)
class LayoutPlan:
    """Planned layouts of a run.

    Attributes:
        request: what was planned, and ``info``: the model.
        layouts: those that the engine accepts, fastest first.
        refused: layouts that it does not accept, with its reasons.
        unchecked: why the engine was not asked, or None.
    """

    request: PlanRequest
    info: ModelInfo
    hardware: Hardware
    plan: SearchResult
    layouts: list[Candidate]
    refused: list[tuple[Candidate, str]] = field(default_factory=list)
    unchecked: str | None = None

    @property
    def mfu(self) -> float:
        """Model FLOPs of the best layout, of the devices' peak."""
        best = self.layouts[0]
        flops = self.info.flops_per_token(self.request.length, frozen=best.config.lora is not None)
        return flops * best.tokens_per_second / self.hardware.peak


@contextlib.contextmanager
def model_checkpoint(model: Path) -> Iterator[Path]:
    """Yield a checkpoint directory for a model that may be only its ``config.json``: tensors are then named, and have no data."""
    model = snapshot(model, setting="MODEL", files=("config.json",))
    path = model / "config.json" if model.is_dir() else model
    if not path.is_file():
        raise ConfigError(f"{model}: no model is there; name a checkpoint's directory, its config.json or its Hub name")
    config = read_config_file(path)
    if model.is_dir() and any(model.glob("*.safetensors")):
        yield model
        return
    from megascend.models.checkpoint_files.sparse_checkpoint import write_sparse_checkpoint

    with tempfile.TemporaryDirectory(prefix="megascend-plan-") as folder:
        # An fp8 checkpoint is trained in 16 bits.
        values = {key: value for key, value in config.items() if key != "quantization_config"}
        try:
            try:
                checkpoint = write_sparse_checkpoint(Path(folder), values)
            except MegascendError:
                raise
            except Exception as error:  # transformers checks values with errors of several classes
                text = " ".join(str(error).split())
                raise ConfigError(f"{path}: transformers cannot describe this model: {text}") from error
            yield checkpoint
        except MegascendError as error:
            # The user knows nothing of this directory.
            text = str(error).replace(f"{folder}/config.json", str(path)).replace(folder, str(model))
            raise type(error)(text) from error


def default_length(checkpoint: Path) -> int:
    """Return the tokens of a sample where none are named: :data:`LENGTH`, or the model's context if it is shorter."""
    return min(LENGTH, inspect_checkpoint(checkpoint).shape.max_position or LENGTH)


def settings(model: Path, length: int, batch: int, data: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Return the run's settings before a layout is chosen: defaults, with ``a.b=value`` overrides."""
    overrides = full_names(overrides, {}, RunConfig)
    for name in (override.partition("=")[0] for override in overrides):
        if name != "parallel.context_algorithm" and name.startswith(CHOSEN):
            raise ConfigError(f"--set {name}: a plan chooses this setting: leave it out, and change it in the run file")
    values = read_settings(None, overrides)
    values = {"model": str(model), "output": "run", **values}
    values["data"] = {"path": str(data or DATA), "global_batch_size": batch, **values.get("data", {})}
    values["batching"] = {"micro_batch_tokens": length, "max_length": length, **values.get("batching", {})}
    config = parsed(RunConfig, values, "plan")
    if not has_layouts(config.engine):
        raise ConfigError(f"engine: {config.engine} has one layout for a world; plans are for engine megatron")
    if config.precision != "bf16":
        raise ConfigError(f"precision: {config.precision}: devices are described for bf16 only")
    return config


def has_layouts(engine: str) -> bool:
    """Check whether an engine has the layouts that are planned, those of Megatron-Core."""
    return engine in ENGINES and ENGINES[engine].memory == "stages"


def plan_layouts(
    checkpoint: Path, config: RunConfig, cards: int, length: int, hardware: Hardware, best: int
) -> LayoutPlan:
    """Search layouts of a run and have the engine check the ``best`` ones."""
    info = inspect_checkpoint(checkpoint, config.head, config.mtp)
    check_lora(config, info)
    request = PlanRequest(cards, length, config.data.global_batch_size, config)
    announce(f"searching the layouts of {cards} x {hardware.title}")
    plan = search(PlannedModel.from_checkpoint(info, read_config(checkpoint)), request, hardware, best=3 * best)
    layouts, refused, unchecked = checked(plan.candidates, checkpoint, info, best)
    return LayoutPlan(request, info, hardware, plan, layouts, refused, unchecked)


def plan_split(checkpoint: Path, config: RunConfig, cards: int, length: int, hardware: Hardware) -> list[Split]:
    """Divide devices between inference engines and the trainer, the fastest division first."""
    info = inspect_checkpoint(checkpoint, config.head, config.mtp)
    check_lora(config, info)
    request = PlanRequest(cards, length, config.data.global_batch_size, config)
    announce(f"searching the layouts of the trainer for each division of {cards} x {hardware.title}")
    divisions = splits(PlannedModel.from_checkpoint(info, read_config(checkpoint)), request, hardware)
    if not divisions:
        raise ConfigError(
            f"--rl --cards {cards}: engines and trainer do not fit on {cards} x {hardware.title}: use more devices, or LoRA"
        )
    return divisions


def checked(
    candidates: Sequence[Candidate], checkpoint: Path, info: ModelInfo, count: int
) -> tuple[list[Candidate], list[tuple[Candidate, str]], str | None]:
    """Return the first ``count`` layouts that the engine accepts, the refused ones before them, and why it was not asked.

    The engine's own checks of a run's start are run, with process groups that communicate nothing.
    """
    from megascend.backends import check_backend

    accepted: list[Candidate] = []
    refused: list[tuple[Candidate, str]] = []
    runtime: Any = None
    for candidate in candidates:
        if len(accepted) == count:
            break
        # The planning machine has other devices, or none.
        config = candidate.config.model_copy(update={"platform": "auto", "model": checkpoint})
        if runtime is None:
            try:
                runtime = bootstrap(config)
            except ImportError as error:  # also MegascendError's for a missing package or version
                return list(candidates[:count]), [], f"{type(error).__name__}: {error}"
        try:
            check_backend("megatron", runtime, candidate.topology, info, checkpoint, **backend_settings(config))
        except (ConfigError, CheckpointError) as error:
            refused.append((candidate, str(error)))
        else:
            accepted.append(candidate)
    return accepted, refused, None


def run_file(candidate: Candidate) -> str:
    """Return the YAML of a run with this layout: required settings, and those that differ from their defaults."""
    import yaml

    config = candidate.config
    assert isinstance(config, RunConfig), "plans are of run files"
    values = redacted(config.model_dump(mode="json", exclude_defaults=True))
    values["data"]["global_batch_size"] = config.data.global_batch_size
    header = f"# {candidate.describe()}\n# predicted: {candidate.time.seconds:.3g} s a step\n"
    return header + yaml.safe_dump(values, sort_keys=False)


@dataclass(frozen=True)
class Suggestion:
    """A layout that a plan would choose in place of a run's own, with both predictions."""

    current: Candidate
    better: Candidate
    hardware: Hardware

    @property
    def gain(self) -> float:
        return 1 - self.better.time.seconds / self.current.time.seconds


def suggestion(
    config: RunConfig, info: ModelInfo, topology: Topology, length: int, hardware: Hardware
) -> Suggestion | None:
    """Return the layout that a plan would choose, if it is predicted to be faster than the run's by :data:`GAIN`.

    Args:
        config: with a number for ``batching.micro_batch_tokens``.
        length: tokens that all samples are taken to have.
    """
    # Steps with further passes, or with two samples of a unit.
    unlike = config.head != "lm" or config.preference is not None or config.distillation is not None
    unlike = unlike or ":" in (config.loss or "")
    if not has_layouts(config.engine) or config.precision != "bf16" or topology.world_size == 1 or unlike:
        return None
    model = PlannedModel.from_checkpoint(info, read_config(config.model))
    # Lengths that are rounded up for context parallel ranks may exceed the model's context, for which a plan is refused.
    length = min(length, info.shape.max_position or length)
    request = PlanRequest(topology.world_size, length, config.data.global_batch_size, config)
    current = run_candidate(model, request, topology, hardware)
    planned = search(model, request, hardware, best=1).candidates
    if not planned or current.time.seconds < GAIN * planned[0].time.seconds:
        return None
    return Suggestion(current, planned[0], hardware)
