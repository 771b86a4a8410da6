"""Registry of a backend's adapters, by name and within limits."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megascend.config import Adam, Adapters, Lora, Schedule
from megascend.config.data import ProblemType, default_labels
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.exported import abbreviated
from megascend.training.lora.adapter import Adapter
from megascend.training.lora.layout import ShapeGroup, flat_layout, shape_groups
from megascend.training.lora.target_modules import HEAD, FusedSlice, RefusedTargets, TargetModule, matches, restrict

# Names become directories in checkpoints.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class AdapterSettings:
    """Settings that all adapters of a model share.

    Attributes:
        limits: number, ranks and targets that they may have.
        adam, schedule, seed: defaults of adapters whose ``Lora`` has none.
        dtype: dtype of the model; with float16 adapters scale their loss.
        device: device of the model and of the adapters' values.
        head: float32 [labels, h], the weight that the scalar head of every adapter starts with; None for language models.
        labels: labels of the head's rows; empty for language models.
        problem_type: kind of task of a classifier's head.
        unbuilt: names of modules in towers of the model that no engine builds.
    """

    limits: Adapters
    adam: Adam
    schedule: Schedule
    seed: int
    dtype: torch.dtype
    device: torch.device
    head: Tensor | None = None
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    unbuilt: tuple[str, ...] = ()

    def check_labels(self, labels: tuple[str, ...], problem_type: ProblemType | None) -> None:
        """Raise CheckpointError if a head with these labels does not fit this model."""
        # Default names fit any labels, on either side.
        unnamed = default_labels(len(labels))
        if len(labels) != len(self.labels) or (self.labels != labels and unnamed not in (self.labels, labels)):
            raise CheckpointError(
                f"the rows of its head are {abbreviated([*labels]) or 'none'}, and the model's labels are "
                f"{abbreviated([*self.labels]) or 'none'}: give the model the adapter's labels, in their order"
            )
        # A reward model's single output is that of a regression.
        if problem_type not in (None, self.problem_type or "regression"):
            raise CheckpointError(
                f"its head was trained for problem_type {problem_type}, and the model is for {self.problem_type or 'rewards'}"
            )


class AdapterRegistry(Mapping[str, Adapter]):
    """Mapping of names to adapters. Each adapter owns its memory, which is freed when it is removed.

    Attributes:
        shape_groups: this rank's layers that they act on.
        projections: names of all Hugging Face weights of the model that the limits allow as targets.
        adaptable: names of all weights that an adapter could target with other limits, or that peft could adapt.
        refused_targets: modules that peft could adapt and adapters here do not act on.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        shape_groups: Sequence[ShapeGroup],
        projections: Sequence[str],
        adaptable: Sequence[str] | None = None,
        refused_targets: RefusedTargets | None = None,
    ) -> None:
        self.settings, self.shape_groups, self.projections = settings, tuple(shape_groups), tuple(projections)
        self.adaptable = self.projections if adaptable is None else tuple(adaptable)
        self.refused_targets = refused_targets
        self._adapters: dict[str, Adapter] = {}

    @property
    def peft_names(self) -> list[str]:
        """Return the names of peft's model, among which a short name in ``adapter_config.json`` has to be exact."""
        return [*self.adaptable, *self.settings.unbuilt]

    @classmethod
    def for_model(
        cls,
        targets: Sequence[TargetModule],
        all_names: Sequence[str],
        settings: AdapterSettings,
        refused_targets: RefusedTargets | None = None,
    ) -> AdapterRegistry:
        """Build the registry of a model's adapters.

        Args:
            targets: possible targets on this rank.
            all_names: names of the weights in the targets of all ranks.
        """
        check_limits(settings.limits, all_names, refused_targets)
        allowed = settings.limits.targets
        return cls(
            settings,
            shape_groups([target for module in targets if (target := restrict(module, allowed)) is not None]),
            [name for name in all_names if matches(name, allowed)],
            [*all_names, *(refused_targets.names if refused_targets else ())],
            refused_targets,
        )

    def __getitem__(self, name: str) -> Adapter:
        if name not in self._adapters:
            adapters = ", ".join(sorted(self._adapters)) or "none"
            raise ConfigError(f"unknown adapter {name!r}; adapters: {adapters}")
        return self._adapters[name]

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def check(self, name: str, lora: Lora) -> None:
        """Raise ConfigError unless an adapter ``name`` with these settings can be added."""
        check_name(name)
        if name in self._adapters:
            raise ConfigError(f"adapter {name!r} exists; remove it first, or choose another name")
        limits = self.settings.limits
        if len(self._adapters) >= limits.max_count:
            raise ConfigError(
                f"adapter {name!r} exceeds adapters.max_count ({limits.max_count}); remove one or raise the limit"
            )
        if lora.rank > limits.max_rank:
            raise ConfigError(
                f"adapter {name!r}: rank {lora.rank} exceeds adapters.max_rank ({limits.max_rank}); lower the rank or "
                "raise the limit"
            )
        check_targets(name, lora, self.projections, self.refused_targets)

    def create(self, name: str, lora: Lora) -> Adapter:
        """Build an adapter with peft's initial values; see :func:`initialise`. Does not add it."""
        self.check(name, lora)
        settings = self.settings
        seed = settings.seed if lora.seed is None else lora.seed
        adapter = Adapter(
            name,
            lora,
            flat_layout(self.shape_groups, lora.rank),
            lora.optimizer or settings.adam,
            lora.schedule or settings.schedule,
            seed,
            scales_loss=settings.dtype == torch.float16,
            device=settings.device,
        )
        for span, values in adapter.views(adapter.values.detach()):
            # The product B A starts at 0, as in peft: B is 0, of an embedding A.
            target_modules = self.shape_groups[span.shape_group].target_modules
            if target_modules[0].is_head:
                if span.factor == "a":
                    assert settings.head is not None, "a model with a scalar head has a weight for it"
                    values[0, 0, 0, 0].copy_(settings.head.flatten())
                continue
            if span.factor == ("b" if target_modules[0].is_embedding else "a"):
                initialise(values, target_modules, lora, seed)
        return adapter

    def add(self, adapter: Adapter) -> None:
        """Add an adapter under its name."""
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Remove an adapter and free its memory."""
        del self._adapters[self[name].name]


def check_name(name: str) -> None:
    """Raise ConfigError unless ``name`` can be a file name everywhere: letters, digits, ``._-``, no path traversal."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name or name.endswith("."):
        raise ConfigError(
            f"adapter name {name!r} is not allowed: up to 100 letters, digits, '.', '_' and '-', starting with a letter or "
            "digit, without '..' and not ending with '.'"
        )


def check_limits(limits: Adapters, names: Sequence[str], refused_targets: RefusedTargets | None = None) -> None:
    """Raise ConfigError unless every target of ``limits`` is one of ``names``, the model's layers that can be adapted."""
    check_exist("adapters.targets names", "can be adapted", limits.targets, names, refused_targets)


def check_exist(
    subject: str,
    rule: str,
    targets: Literal["all-linear"] | Sequence[str],
    projections: Sequence[str],
    refused_targets: RefusedTargets | None = None,
) -> None:
    """Raise ConfigError unless every one of ``targets`` matches some of ``projections`` and none that is refused."""
    for target in () if refused_targets is None or targets == "all-linear" else targets:
        assert refused_targets is not None
        refused = next((name for name in refused_targets.names if matches(name, [target])), None)
        if refused is not None and (refused_targets.always or not any(matches(name, [target]) for name in projections)):
            raise ConfigError(f"{subject} {target!r}, which is {refused}, {refused_targets.reason}")
    projections = [projection for projection in projections if projection != HEAD]  # not a target: it is always trained
    unknown = [t for t in targets if not any(matches(p, [t]) for p in projections)] if targets != "all-linear" else []
    if unknown or not any(matches(projection, targets) for projection in projections):
        ends = sorted({projection.rsplit(".", 1)[-1] for projection in projections})
        wrong = unknown[0] if unknown else targets
        raise ConfigError(
            f"{subject} {wrong!r}, which is not a layer that {rule} in this model; those are {', '.join(ends) or 'none'}"
        )


def check_targets(
    name: str, lora: Lora, projections: Sequence[str], refused_targets: RefusedTargets | None = None
) -> None:
    """Raise ConfigError unless every target of ``lora`` is a layer that adapters may act on."""
    check_exist(f"adapter {name!r} targets", "adapters.targets allows", lora.targets, projections, refused_targets)
    if lora.dropout > 0 and any(".experts." in p and matches(p, lora.targets) for p in projections):
        raise ConfigError(
            f"adapter {name!r} has dropout {lora.dropout} on experts, whose weights transformers fuses and for which peft "
            "has no dropout; set dropout: 0, or targets without experts"
        )


def initialise(values: Tensor, target_modules: Sequence[TargetModule], lora: Lora, seed: int) -> None:
    """Draw the factor that does not start at zero: A [layers, experts, slices, rank, in], or an embedding's B [1, 1, rank, out].

    Every projection has its own generator, so all layouts draw the same values.
    """
    for layer, target in enumerate(target_modules):
        for number, fused_slice in enumerate(target.slices):
            # Slices that the adapter does not target stay 0.
            if not matches(fused_slice.name, lora.targets):
                continue
            if target.is_embedding:  # peft draws it as torch.nn.Embedding does
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{fused_slice.name}".encode()))
                values[layer, 0].copy_(torch.randn(lora.rank, target.out_features, generator=generator))
                continue
            for expert in range(target.experts):
                values[layer, expert, number].copy_(initial_a(target, fused_slice, expert, lora.rank, seed))


def initial_a(target: TargetModule, fused_slice: FusedSlice, expert: int, rank: int, seed: int) -> Tensor:
    """Draw this rank's columns of a projection's initial A: kaiming-uniform with a = sqrt(5), as in peft."""
    # Drawn in full and then cut, so that every layout has the same values.
    label = f"{seed}/{fused_slice.name}" + (f"/{target.expert_start + expert}" if target.is_expert else "")
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    # sqrt(6 / ((1 + a^2) * in)) with a = sqrt(5).
    bound = target.in_total**-0.5
    factor = torch.empty(rank, target.in_total).uniform_(-bound, bound, generator=generator)
    return factor[:, target.in_start : target.in_start + target.in_features]
