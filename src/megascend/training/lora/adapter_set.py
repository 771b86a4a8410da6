"""Adapters in the layers of a frozen model, for every engine: optimizer, saving, loading, and many adapters in one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascend.config import Adam, Lora
from megascend.config.rules import enforce
from megascend.config.training import optimizer_of_adapters
from megascend.errors import CheckpointError, ConfigError, DataError, OutOfDeviceMemoryError
from megascend.runtime.distributed.memory import catch_oom, catch_oom_on_all_ranks
from megascend.runtime.distributed.objects import raise_on_all_ranks
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.training.batch.images import SampleImages
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.batch.results import StepResult
from megascend.training.batch.sample import Sample
from megascend.training.kernels.host_copy import to_device
from megascend.training.lora import peft_format
from megascend.training.lora.adapter import Adapter
from megascend.training.lora.adapter_io import COUNTERS, STATE, check_base_weights, read, write
from megascend.training.lora.adapter_layers import AdapterLayers, token_keys
from megascend.training.lora.factors import UnshardedAdapter
from megascend.training.lora.optimizer import step_adapters
from megascend.training.lora.registry import AdapterRegistry
from megascend.training.lora.segments import TokenSegments, token_segments, tokens_per_adapter
from megascend.training.lora.stacked_adapters import StackedAdapters, StackPool
from megascend.training.lora.target_modules import HEAD, matches
from megascend.training.lora.transfer import gather, scatter


class AdapterSet:
    """The adapters of a model, as its :class:`megascend.engines.base.Trainable`.

    An engine finds the targets in its model, builds the registry from them, and adds hooks to the layers.

    Args:
        merge: side of the square of patches that makes one feature of an image, if adapters act on a vision tower.

    Attributes:
        registry: the adapters by name, and the limits for further ones.
        layers: the layers, which apply adapters.
    """

    frozen = True

    def __init__(
        self,
        registry: AdapterRegistry,
        groups: ProcessGroups,
        model_dir: Path,
        layers: AdapterLayers,
        merge: int | None = None,
    ) -> None:
        self.registry = self.adapters = registry
        self.projections, self._shape_groups = registry.projections, registry.shape_groups
        self.layers, self._merge = layers, merge
        self._dtype, self._device = registry.settings.dtype, registry.settings.device
        self._pool = StackPool(self._shape_groups, self._dtype, self._device)
        self._groups, self._model_dir = groups, model_dir
        self.step_count = 0

    def describe(self) -> str:
        labels = sorted(
            f"{name} with gradients" if adapter.accumulated else name for name, adapter in self.registry.items()
        )
        return f" with adapters {', '.join(labels) or 'none'}"

    def require_open(self) -> None:
        """Do nothing: adapters' gradients accumulate until their next step."""

    def names(self, samples: Sequence[Sample], default: str | None, *, training: bool) -> list[str]:
        names = [sample.adapter or default or "" for sample in samples]
        for index, name in enumerate(names):
            if name and name not in self.registry:
                adapters = ", ".join(sorted(self.registry)) or "none"
                raise DataError(f"sample {index} is for unknown adapter {name!r}; adapters: {adapters}")
            # Without a gradient anywhere, the sample would count in the loss and train nothing.
            if training and not name:
                raise DataError(
                    f"sample {index} names no adapter, and the model is frozen: pass adapter=... or set Sample.adapter"
                )
        return names

    def loss_scales(self, names: Sequence[str]) -> list[float]:
        return [self.registry[name].loss_scale if name else 1.0 for name in names]

    def choose(self, names: str | Sequence[str] | None) -> list[str]:
        chosen = (
            [adapter for adapter in self.registry.values() if adapter.accumulated]
            if names is None
            else self.require(names)
        )
        # A step without gradients would still decay the weights and age Adam's moments.
        idle = [adapter.name for adapter in chosen if not adapter.accumulated]
        if idle or not chosen:
            subject = f"adapter {idle[0]!r}" if idle else "no adapter"
            raise ConfigError(f"optimizer_step: {subject} has gradients; call forward_backward first")
        return [adapter.name for adapter in chosen]

    def step(
        self, names: Sequence[str], adam: Mapping[str, Adam] | None = None, *, lr: float | None = None
    ) -> StepResult:
        chosen = self.require(names)
        if lr is not None:
            adam = {adapter.name: adapter.adam.model_copy(update={"lr": lr}) for adapter in chosen}
        for settings in (adam or {}).values():
            enforce([optimizer_of_adapters("kind", lambda adam: adam)], settings)
        result = StepResult.of(step_adapters(chosen, adam or {}, self._groups))
        self.step_count += 1
        return result

    def with_gradients(self) -> list[str]:
        return [name for name, adapter in self.registry.items() if adapter.accumulated]

    def counters(self) -> None:
        """Return None: each adapter has its own counters."""

    def restore(self, step: int, counters: dict[str, Any] | None) -> None:
        assert counters is None, "a checkpoint of adapters has no counters of a model; the manifest was checked"
        self.step_count = step

    def saved_adapters(self) -> dict[str, UnshardedAdapter]:
        adapters = {name: self.unsharded(name, optimizer=True) for name in sorted(self.registry)}
        return {name: saved for name, saved in adapters.items() if saved is not None}

    def load_adapters(self, directories: Mapping[str, Path]) -> None:
        previous = dict(self.registry)
        for name in previous:
            # Out of the registry, so that names and max_count are free; ``previous`` keeps them for a failure.
            self.forget(name)
        try:
            for name, directory in directories.items():
                self.load(name, directory, optimizer=True)
        except BaseException:  # KeyboardInterrupt, too, must leave the previous adapters in place
            for name in list(self.registry):
                self.forget(name)
            for adapter in previous.values():
                self.registry.add(adapter)
            raise

    def require(self, names: str | Sequence[str]) -> list[Adapter]:
        """Return the adapters of one name or several, without duplicates; ConfigError for an unknown name."""
        return [self.registry[name] for name in dict.fromkeys([names] if isinstance(names, str) else names)]

    def make_room(self, names: Sequence[str]) -> None:
        chosen = self.require(names)

        def make() -> None:
            for adapter in chosen:
                adapter.moments()
            # A step updates them in turn, so the largest bounds its temporaries.
            max(chosen, key=lambda adapter: adapter.layout.size).make_room()

        catch_oom(make, self._groups.rank)

    def discard(self, names: str | Sequence[str]) -> None:
        for adapter in self.require(names):
            adapter.clear()

    def add(self, name: str, lora: Lora) -> None:
        """Add a new adapter and allocate the memory of its steps. Collective."""

        def make() -> Adapter:
            adapter = self.registry.create(name, lora)
            adapter.make_room()
            return adapter

        # On all ranks or none: a registry that differs between ranks would make the next collective hang.
        self.registry.add(catch_oom_on_all_ranks(make, self._groups, f"adapter {name!r}"))

    def unsharded(self, name: str, *, optimizer: bool = False, everywhere: bool = False) -> UnshardedAdapter | None:
        """Return an unsharded adapter on the CPU, on rank 0 or ``everywhere``; None on other ranks. Collective.

        Args:
            optimizer: include the optimizer's state.
        """
        adapter = self.registry[name]
        vectors = [adapter.values.detach(), *(adapter.moments() if optimizer else ())]
        factors = gather(vectors, adapter, self._shape_groups, self._groups, everywhere=everywhere)
        if factors is None:
            return None
        settings = self.registry.settings
        saved = UnshardedAdapter(
            adapter.lora, factors[0], labels=settings.labels or None, problem_type=settings.problem_type
        )
        if not optimizer:
            return saved
        counters = {counter: getattr(adapter, counter) for counter in COUNTERS}
        return replace(saved, moments=(factors[1], factors[2]), **counters)

    def save(self, name: str, path: Path, base_model: str, *, optimizer: bool) -> None:
        """Write an adapter; see ``MegatronBackend.save_adapter``. Collective."""
        saved = self.unsharded(name, optimizer=optimizer)
        problem = None
        if saved is not None:
            try:
                write(path, saved, base_model, self.registry.peft_names)
            except CheckpointError as error:
                problem = CheckpointError(f"{error} (rank 0)")
        raise_on_all_ranks(problem, self._groups, f"the write of {path}")

    def load(self, name: str, path: Path, *, optimizer: bool, lora: Lora | None = None, replace: bool = False) -> None:
        """Add an adapter from a directory; see ``MegatronBackend.load_adapter``. Collective."""
        previous = self.registry.get(name) if replace else None
        if previous is not None:
            # As in load_adapters: frees the name, and ``previous`` keeps the adapter.
            self.forget(name)
        try:
            self.registry.add(self._read(name, path, optimizer, lora))
        except BaseException:
            if previous is not None:
                self.registry.add(previous)
            raise

    def _read(self, name: str, path: Path, optimizer: bool, lora: Lora | None) -> Adapter:
        problem = saved = None
        try:
            saved = read(path, optimizer=optimizer)
            if self._groups.rank == 0:  # it reads base weights from disk, once is enough
                check_base_weights(path, self._model_dir)
            if saved.labels is not None:
                try:
                    self.registry.settings.check_labels(saved.labels, saved.problem_type)
                except CheckpointError as error:
                    raise CheckpointError(f"adapter {path}: {error}") from None
            missing = [name for name in saved.values if name not in self.registry.projections]
            if missing:
                raise CheckpointError(
                    f"{path} adapts {missing[0]}, which adapters.targets does not allow in this model"
                )
            if not (path / STATE).is_file():  # files with our state were compared with their digests
                peft_format.check_complete(path, saved.values, self.registry.adaptable)
        except (CheckpointError, OSError) as error:
            problem = CheckpointError(f"{error} (rank {self._groups.rank})")
        raise_on_all_ranks(problem, self._groups, f"the read of {path}")
        assert saved is not None
        settings = loaded_settings(saved, lora, self.registry.projections, path)
        adapter = None
        # Not in the try block: the registry is the same on all ranks, so all raise the same error.
        self.registry.check(name, settings)
        try:
            adapter = catch_oom(lambda: self._restored(name, settings, saved), self._groups.rank)
        except CheckpointError as error:
            problem = CheckpointError(f"{path}: {error} (rank {self._groups.rank})")
        except OutOfDeviceMemoryError as error:
            problem = error
        # Only now: until all ranks have reported, none may raise, or the others would wait in the next collective.
        raise_on_all_ranks(problem, self._groups, f"the check of {path}")
        assert adapter is not None
        return adapter

    def _restored(self, name: str, settings: Lora, saved: UnshardedAdapter) -> Adapter:
        """Build an adapter from a saved one. If no moments were saved, its first step allocates them."""
        adapter = self.registry.create(name, settings)
        scatter(saved.values, adapter, adapter.values, self._shape_groups)
        if saved.moments is not None:
            moments = adapter.moments()
            for moment, values in zip(moments, saved.moments, strict=True):
                scatter(values, adapter, moment, self._shape_groups)
            adapter.restore(*moments, saved)
        return adapter

    # --- in the layers ---

    def keep_stacks(self, limit: int, on_drop: Callable[[StackedAdapters], None]) -> StackPool:
        """Create a pool to take stacks from, so that they keep their addresses; see :class:`StackPool`."""
        self._pool = StackPool(self._shape_groups, self._dtype, self._device, limit, on_drop)
        return self._pool

    def abandon(self) -> None:
        """Do nothing: only :meth:`collect` adds a call's gradients to the adapters'."""

    @contextlib.contextmanager
    def applying(self, names: Sequence[str]) -> Iterator[None]:
        """Apply adapters (``""``: the base model) by their indices in ``names`` within the context."""
        adapters = [self.registry[name] if name else None for name in names]
        self.layers.stacked = self._pool.fill(adapters) if any(names) else None
        try:
            yield
        finally:
            self.layers.stacked = self.layers.segments = None

    def collect(self) -> None:
        self._pool.collect()

    def forget(self, name: str) -> None:
        """Remove an adapter and its copies in stacks."""
        self._pool.forget(self.registry[name])
        self.registry.remove(name)

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Set the batch's segments: the adapter of each token, by its index in ``names``."""
        topology = self._groups.topology
        # A context parallel rank holds the same share of every sample, so its tokens stay sorted by adapter.
        lengths = [length // topology.context for length in batch.padded_lengths]
        # Stacks of a pool have empty slots, for which segments must exist as well.
        count = self._pool.slots(len(names))
        counts = tokens_per_adapter(batch.adapter_index, lengths, count)
        ranks = topology.sequence_shards
        batch.segments = token_segments(
            batch.token_adapter_index,
            counts,
            self._keys(batch, samples, names),
            (self._groups.coordinates.tensor if ranks > 1 else 0, ranks),
            self._device,
        )
        if batch.images is not None and self._merge is not None:
            patches, features = (
                self._image_segments(batch, samples, names, count, size) for size in (1, self._merge**2)
            )
            batch.segments = replace(batch.segments, patches=patches, features=features)

    def _image_segments(
        self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str], count: int, size: int
    ) -> TokenSegments:
        """Return the segments of a vision tower's rows, each of ``size`` patches, among ``count`` adapters."""
        images = [samples[member].images for member in batch.members]
        rows = [int(item.grids.prod(1).sum()) // size if isinstance(item, SampleImages) else 0 for item in images]
        index = torch.repeat_interleave(torch.tensor(batch.adapter_index), torch.tensor(rows))
        positions = [torch.arange(number) for number in rows]
        keys = self._row_keys(batch, samples, names, positions)
        return token_segments(
            to_device(index, self._device),
            tokens_per_adapter(batch.adapter_index, rows, count),
            None if keys is None else to_device(torch.cat(keys), self._device),
            (0, 1),
            self._device,
        )

    def _keys(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> Tensor | None:
        """Return the tokens' dropout keys in the order in which layers see the tokens."""
        parts = self._row_keys(batch, samples, names, batch.positions)
        if parts is None:
            return None
        # Megatron's layers see a plain batch as [sequence, batch]: samples alternate.
        interleaved = self.layers.sequence_first and batch.packed is None
        keys = torch.stack(parts, dim=1).flatten() if interleaved else torch.cat(parts)
        return to_device(keys, self._device)

    def _row_keys(
        self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str], positions: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Return the dropout keys of each sample's rows at ``positions``; None without dropout."""
        adapters = [self.registry[name] if name else None for name in names]
        if not any(adapter is not None and adapter.lora.dropout for adapter in adapters):
            return None
        parts = []
        for member, index, rows in zip(batch.members, batch.adapter_index, positions, strict=True):
            adapter, sample = adapters[index], samples[member].input_ids
            parts.append(
                torch.zeros_like(rows)
                if adapter is None
                else token_keys(adapter.seed, adapter.step_count, sample, rows)
            )
        return parts


def loaded_settings(saved: UnshardedAdapter, lora: Lora | None, projections: Sequence[str], path: Path) -> Lora:
    """Return the settings of a loaded adapter: ``lora``, or the saved ones; they target exactly what was saved."""
    settings = lora or saved.lora
    if settings.rank != saved.lora.rank or settings.scaling != saved.lora.scaling:
        raise ConfigError(
            f"{path} has rank {saved.lora.rank} and scaling {saved.lora.scaling:g}; the settings passed have "
            f"{settings.rank} and {settings.scaling:g}"
        )
    different = sorted({name for name in projections if matches(name, settings.targets)} ^ saved.values.keys())
    if different and lora is not None:
        has = "adapts" if different[0] in saved.values else "does not adapt"
        raise ConfigError(f"{path} {has} {different[0]}, unlike the targets passed, {lora.targets}")
    # A targeted layer without saved factors would start with A = 0 and B = 0, and never learn.
    names = tuple(sorted(saved.values.keys() - {HEAD}))
    return settings.model_copy(update={"targets": names}) if different else settings
