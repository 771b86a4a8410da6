"""Adapters on a frozen model, whatever applies them: what is the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megascend.batch.results import StepResult
from megascend.batch.sample import Sample
from megascend.config import Adam, Lora
from megascend.distributed.memory import with_room, with_room_everywhere
from megascend.distributed.objects import raise_on_all_ranks
from megascend.distributed.process_groups import ProcessGroups
from megascend.errors import CheckpointError, ConfigError, DataError, OutOfDeviceMemoryError
from megascend.lora import peft_format
from megascend.lora.adapter import Adapter
from megascend.lora.adapter_io import COUNTERS, STATE, SavedAdapter, read, write
from megascend.lora.base_weights import check_base_weights
from megascend.lora.factors import Factors
from megascend.lora.optimizer import AdapterOptimizer, loss_scales
from megascend.lora.peft_settings import to_config
from megascend.lora.peft_tensors import to_tensors
from megascend.lora.registry import AdapterRegistry
from megascend.lora.target_modules import matches
from megascend.lora.transfer import gather, scatter
from megascend.topology.topology import Topology


class AdapterSet:
    """The adapters of a model, their optimizer, and how they are saved and loaded. Applying them is the subclass's business.

    Attributes:
        registry: the adapters.
        optimizer: steps them.
    """

    def __init__(self, registry: AdapterRegistry, topology: Topology, groups: ProcessGroups, model_dir: Path) -> None:
        self.registry, self._shape_groups = registry, registry.shape_groups
        self._topology, self._groups, self._model_dir = topology, groups, model_dir
        self.optimizer = AdapterOptimizer(topology, groups)
        self.step_count = 0

    @property
    def frozen(self) -> bool:
        return True

    @property
    def adapters(self) -> AdapterRegistry:
        return self.registry

    @property
    def projections(self) -> tuple[str, ...]:
        return self.registry.projections

    def describe(self) -> str:
        known = sorted(
            f"{name} with gradients" if adapter.accumulated else name for name, adapter in self.registry.items()
        )
        return f" with adapters {', '.join(known) or 'none'}"

    def require_open(self) -> None:
        """Adapters' gradients add up until their next step."""

    def names(self, samples: Sequence[Sample], default: str | None, *, training: bool) -> list[str]:
        names = [sample.adapter or default or "" for sample in samples]
        for index, name in enumerate(names):
            if name and name not in self.registry:
                known = ", ".join(sorted(self.registry)) or "none"
                raise DataError(f"sample {index} is for adapter {name!r}; there are: {known}")
            if training and not name:
                raise DataError(
                    f"sample {index} names no adapter, and the model is frozen: pass adapter=... or set Sample.adapter"
                )
        return names

    def loss_scales(self, names: Sequence[str]) -> list[float]:
        return loss_scales(names, self.registry)

    def choose(self, names: str | Sequence[str] | None) -> list[str]:
        chosen = (
            [adapter for adapter in self.registry.values() if adapter.accumulated]
            if names is None
            else self.named(names)
        )
        idle = [adapter.name for adapter in chosen if not adapter.accumulated]
        if idle or not chosen:
            which = f"adapter {idle[0]!r}" if idle else "no adapter"
            raise ConfigError(f"optimizer_step: {which} has gradients; call forward_backward first")
        return [adapter.name for adapter in chosen]

    def step(
        self, names: Sequence[str], adam: Mapping[str, Adam] | None = None, *, lr: float | None = None
    ) -> StepResult:
        chosen = self.named(names)
        if lr is not None:
            adam = {adapter.name: adapter.adam.model_copy(update={"lr": lr}) for adapter in chosen}
        result = StepResult.of(self.optimizer.step(chosen, adam or {}))
        self.step_count += 1
        return result

    def with_gradients(self) -> list[str]:
        return [name for name, adapter in self.registry.items() if adapter.accumulated]

    def counters(self) -> None:
        """Each adapter carries its own."""

    def restore(self, step: int, counters: dict[str, Any] | None) -> None:
        assert counters is None, "the manifest was checked: a checkpoint of adapters has no counters of a model"
        self.step_count = step

    def saved_adapters(self) -> dict[str, SavedAdapter]:
        whole = {name: self.collect_whole(name, optimizer=True) for name in sorted(self.registry)}
        return {name: saved for name, saved in whole.items() if saved is not None}

    def load_adapters(self, directories: Mapping[str, Path]) -> None:
        before = dict(self.registry)
        for name in before:
            self.forget(name)
        try:
            for name, directory in directories.items():
                self.load(name, directory, optimizer=True)
        except BaseException:
            for name in list(self.registry):
                self.forget(name)
            for adapter in before.values():
                self.registry.add(adapter)
            raise

    def check(self, name: str, lora: Lora) -> None:
        self.registry.check(name, lora)

    def require(self, names: str | Sequence[str]) -> None:
        self.named(names)

    def make_room(self, names: Sequence[str]) -> None:
        chosen = self.named(names)

        def make() -> None:
            for adapter in chosen:
                adapter.moments()
            max(chosen, key=lambda adapter: adapter.layout.size).make_room()  # the step works on one after the other

        with_room(make, self._groups.rank)

    def discard(self, names: str | Sequence[str]) -> None:
        for adapter in self.named(names):
            adapter.clear()

    def named(self, names: str | Sequence[str]) -> list[Adapter]:
        """The adapters of one name or several, each once."""
        return [self.registry[name] for name in dict.fromkeys([names] if isinstance(names, str) else names)]

    def add(self, name: str, lora: Lora) -> None:
        """A new adapter, as :meth:`AdapterRegistry.create` makes it, with all that it needs to train. Collective."""

        def make() -> Adapter:
            adapter = self.registry.create(name, lora)
            adapter.make_room()
            return adapter

        self.registry.add(with_room_everywhere(make, self._groups, f"adapter {name!r}"))

    def collect_whole(self, name: str, *, optimizer: bool) -> SavedAdapter | None:
        """An adapter, whole and on the CPU, on rank 0; None on the others. Collective.

        Args:
            optimizer: with its optimizer's state and counters.
        """
        adapter = self.registry[name]
        vectors = [adapter.values.detach(), *(adapter.moments() if optimizer else ())]
        whole = gather(vectors, adapter, self._shape_groups, self._groups)
        if whole is None:
            return None
        if not optimizer:
            return SavedAdapter(adapter.lora, whole[0])
        counters = {counter: getattr(adapter, counter) for counter in COUNTERS}
        return SavedAdapter(adapter.lora, whole[0], (whole[1], whole[2]), **counters)

    def save(self, name: str, path: Path, base_model: str, *, optimizer: bool) -> None:
        """Write an adapter; see ``MegatronBackend.save_adapter``. Collective."""
        saved = self.collect_whole(name, optimizer=optimizer)
        problem = None
        if saved is not None:
            try:
                write(path, saved, base_model, list(self.registry.adaptable))
            except CheckpointError as error:
                problem = CheckpointError(f"{error} (rank 0)")
        raise_on_all_ranks(problem, self._groups, f"whether {path} could be written")

    def load(self, name: str, path: Path, *, optimizer: bool, lora: Lora | None = None, replace: bool = False) -> None:
        """Add an adapter from a directory; see ``MegatronBackend.load_adapter``. Collective."""
        before = self.registry.get(name) if replace else None
        if before is not None:
            self.forget(name)
        try:
            self.registry.add(self._read(name, path, optimizer, lora))
        except BaseException:
            if before is not None:
                self.registry.add(before)
            raise

    def _read(self, name: str, path: Path, optimizer: bool, lora: Lora | None) -> Adapter:
        problem = saved = None
        try:
            saved = read(path, optimizer=optimizer)
            if self._groups.rank == 0:
                check_base_weights(path, self._model_dir)
            missing = [name for name in saved.values if name not in self.registry.projections]
            if missing:
                raise CheckpointError(
                    f"{path} adapts {missing[0]}, which adapters.targets does not allow in this model"
                )
            if not (path / STATE).is_file():  # ours is known by its digest
                peft_format.check_complete(path, saved.values, self.registry.adaptable)
        except (CheckpointError, OSError) as error:
            problem = CheckpointError(f"{error} (rank {self._groups.rank})")
        raise_on_all_ranks(problem, self._groups, f"whether {path} can be read")
        assert saved is not None
        settings = settings_of(saved, lora, self.registry.projections, path)
        adapter = None
        self.registry.check(name, settings)
        try:
            adapter = with_room(lambda: self._restored(name, settings, saved), self._groups.rank)
        except CheckpointError as error:
            problem = CheckpointError(f"{path}: {error} (rank {self._groups.rank})")
        except OutOfDeviceMemoryError as error:
            problem = error
        raise_on_all_ranks(problem, self._groups, f"whether {path} fits")
        assert adapter is not None
        return adapter

    def _restored(self, name: str, settings: Lora, saved: SavedAdapter) -> Adapter:
        """A new adapter as it was saved. Without an optimizer's state, its moments wait for a step: a sampler's need none."""
        adapter = self.registry.create(name, settings)
        scatter(saved.values, adapter, adapter.values, self._shape_groups)
        if saved.moments is not None:
            moments = adapter.moments()
            for moment, values in zip(moments, saved.moments, strict=True):
                scatter(values, adapter, moment, self._shape_groups)
            adapter.restore(*moments, saved)
        return adapter

    def factors(self, name: str, *, everywhere: bool = False) -> tuple[Lora, dict[str, Factors]] | None:
        """An adapter's settings and whole factors on rank 0 (or ``everywhere``), None on the others. Collective."""
        adapter = self.registry[name]
        whole = gather([adapter.values.detach()], adapter, self._shape_groups, self._groups, everywhere=everywhere)
        return None if whole is None else (adapter.lora, whole[0])

    def named_weights(self, name: str, *, everywhere: bool = False) -> dict[str, Tensor]:
        """An adapter alone, under peft's names, in float32 on the CPU: what :meth:`save` writes. Collective.

        On rank 0 (or ``everywhere``); the other ranks get no tensors.
        """
        found = self.factors(name, everywhere=everywhere)
        return {} if found is None else to_tensors(found[1], found[0].rank)

    def as_peft(self, name: str, base_model: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """(``adapter_config.json``, its tensors in float32 on the CPU) of an adapter on rank 0, None on others. Collective."""
        found = self.factors(name)
        if found is None:
            return None
        lora, factors = found
        return to_config(lora, factors, base_model, list(self.registry.adaptable)), to_tensors(factors, lora.rank)

    def forget(self, name: str) -> None:
        """Remove an adapter with all that belongs to it."""
        self.registry.remove(name)


def settings_of(saved: SavedAdapter, lora: Lora | None, projections: Sequence[str], path: Path) -> Lora:
    """The settings to go on with: ``lora``, or by default the saved ones. They target exactly what was saved. Pure.

    Raises:
        ConfigError: ``lora`` differs in what the factors depend on.
    """
    settings = lora or saved.lora
    if settings.rank != saved.lora.rank or settings.scaling != saved.lora.scaling:
        raise ConfigError(
            f"{path} has rank {saved.lora.rank} and scaling {saved.lora.scaling:g}; the settings given have "
            f"{settings.rank} and {settings.scaling:g}"
        )
    different = sorted({name for name in projections if matches(name, settings.targets)} ^ saved.values.keys())
    if different and lora is not None:
        has = "adapts" if different[0] in saved.values else "does not adapt"
        raise ConfigError(f"{path} {has} {different[0]}, unlike the targets given, {lora.targets}")
    # A layer that gets no factors would start with A = 0 and B = 0, and never learn.
    return settings.model_copy(update={"targets": tuple(sorted(saved.values))}) if different else settings
