"""Commit by copying into the parameters in use, where the engine keeps weights as its loaders have copied them.

vLLM's loaders fuse tensors (query, key and value; gate and up; experts) and slice them (tensor and expert parallelism) by
copying parts of tensors into parts of parameters. :func:`learn` runs them once on parameters without memory and records these
copies. A commit then makes the copies itself: no loader, no allocation, and the addresses that kernels and captured graphs use
stay valid.

Each part of a parameter is exchanged with its source in the staging memory, which holds the old weights afterwards. So a commit
can be undone without another copy of the model.

:func:`learn` refuses a model whose weights in use are anything else than such copies: quantised or repacked weights, tensors
computed from weights. Such models are reloaded (:mod:`weightwire.vllm.model`). What was recorded is compared with the weights
that vLLM's own reload of the same tensors has left, bit for bit, before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weightwire.manifest import Manifest, TensorSpec, offsets
from weightwire.vllm.checkpoint import EMBEDDINGS, HEAD, tied_head_checked
from weightwire.vllm.model import parameters_on_meta, storage_id

SCRATCH_BYTES = 64 * 2**20
"""Memory through which parts are exchanged. It is allocated once."""
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
"""vLLM's quantisation methods that compute with the weights as they are loaded, on some devices and with some kernels."""
ATTENTION = ("Attention", "MMEncoderAttention", "EncoderOnlyAttention", "CrossAttention")
"""Attention layers whose step after loading computes nothing from weights, if they have no sinks."""


class NotInPlaceError(Exception):
    """The model's weights cannot be exchanged in place; the message says why."""


@dataclass(frozen=True)
class ExchangePart:
    """A copy that a loader makes: a part of a parameter and its source in the concatenated bytes of an update.

    Attributes:
        target: the part of the parameter, on the engine's device.
        dtype: of the source.
        offset: first byte of the source.
        shape, strides: of the source, in elements.
    """

    target: Tensor
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dense(self) -> bool:
        """Check whether both sides are ranges of bytes without gaps, in the same order."""
        return self.target.is_contiguous() and self.strides == torch.empty(self.shape, device="meta").stride()

    def source(self, staging: Tensor) -> Tensor:
        """View the source in an update's bytes."""
        width = self.dtype.itemsize
        typed = staging[: staging.numel() // width * width].view(self.dtype)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset() + self.offset // width)

    def saved(self, staging: Tensor) -> Tensor | None:
        """View the place for the old weights: the source's own bytes; None if they are too few, or have gaps."""
        width, source = self.target.dtype.itemsize, self.source(staging)
        if self.target.dtype == self.dtype:
            return source
        # A source of float32 has room for an old weight of bfloat16 at the beginning of its bytes.
        if width > self.dtype.itemsize or not self.dense or self.offset % width:
            return None
        length = self.target.numel() * width
        return staging[self.offset : self.offset + length].view(self.target.dtype).view(self.target.shape)


class Exchange:
    """Exchange of a model's weights with those in staging memory, in groups of at most :data:`SCRATCH_BYTES`.

    Args:
        parts: all copies.
        tensors: specs of the updates for which it holds.
        addresses: addresses of the parameters' memory (:func:`addresses`).
        tied: first byte and end, by name, of an output layer and an embedding that must be equal.
    """

    def __init__(
        self,
        parts: Sequence[ExchangePart],
        tensors: Sequence[TensorSpec],
        addresses: Mapping[str, int],
        tied: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._parts, self._tensors = split(merged(parts)), tuple(tensors)
        self._addresses, self._tied = addresses, tied or {}
        device = self._parts[0].target.device
        self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        # Of the parts whose old weights do not fit into their sources' bytes: few, or learn() would have refused.
        self._separate: dict[int, Tensor] = {}
        self._bound: tuple[int, list[_Group]] = 0, []
        self._changed_groups: list[_Group] = []

    def fits(self, manifest: Manifest, model: torch.nn.Module) -> bool:
        """Check whether an update has the tensors, and the model the memory, for which this exchange was recorded."""
        return manifest.tensors == self._tensors and addresses(model) == self._addresses

    @torch.no_grad()
    def run(self, staging: Tensor) -> None:
        """Write the new weights into the parameters, and the old ones into the staging memory."""
        self._changed_groups = []
        # Loaders drop an output layer that the model shares with its embedding; a different one must not be lost.
        for _ in tied_head_checked((name, staging[start:stop]) for name, (start, stop) in self._tied.items()):
            pass
        for group in self._groups(staging):
            # Noted first: a group that fails has changed some of its parameters.
            self._changed_groups.append(group)
            group.exchange()

    @torch.no_grad()
    def undo(self) -> None:
        """Write the old weights back after a run that succeeded or stopped at any group."""
        groups, self._changed_groups = self._changed_groups, []
        for group in groups:
            group.restore()

    def unbind(self) -> None:
        """Release the views of staging memory that were made for the last update."""
        self._bound, self._changed_groups = (0, []), []

    def _groups(self, staging: Tensor) -> list[_Group]:
        # Views are made once: the receiver keeps its memory from one update to the next.
        if self._bound[0] != staging.data_ptr():
            self._bound = staging.data_ptr(), list(self._bind(staging))
        return self._bound[1]

    def _bind(self, staging: Tensor) -> Iterator[_Group]:
        group, used = _Group(), 0
        kind: tuple[torch.dtype, torch.dtype] | None = None
        for index, part in enumerate(self._parts):
            size = part.target.numel() * part.target.dtype.itemsize
            if group.targets and (used + size > SCRATCH_BYTES or kind != (part.target.dtype, part.dtype)):
                yield group
                group, used = _Group(), 0
            kind = part.target.dtype, part.dtype
            saved = part.saved(staging)
            if saved is None:
                saved = self._separate.setdefault(index, torch.empty_like(part.target))
            scratch = self._scratch[used : used + size].view(part.target.dtype).view(part.target.shape)
            group.add(part.target, part.source(staging), saved, scratch)
            used += -(-size // 16) * 16  # aligned for any dtype
        if group.targets:
            yield group


class _Group:
    """Parts that are exchanged together, in four lists of equal length."""

    def __init__(self) -> None:
        self.targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._scratch: list[Tensor] = []
        self._steps = 0

    def add(self, target: Tensor, source: Tensor, saved: Tensor, scratch: Tensor) -> None:
        self.targets.append(target)
        self._sources.append(source)
        self._saved.append(saved)
        self._scratch.append(scratch)

    def exchange(self) -> None:
        self._steps = 0
        for to, origin in (
            (self._scratch, self.targets),
            (self.targets, self._sources),
            (self._saved, self._scratch),
        ):
            torch._foreach_copy_(to, origin)
            self._steps += 1

    def restore(self) -> None:
        """Write the old weights back: from their place or, of a group that has stopped, from the scratch memory."""
        if self._steps == 3:
            torch._foreach_copy_(self.targets, self._saved)
        elif self._steps:  # the last group alone: the next one would have overwritten the scratch memory
            torch._foreach_copy_(self.targets, self._scratch)


def merged(parts: Iterable[ExchangePart]) -> list[ExchangePart]:
    """Merge parts that are adjacent in a parameter and in the update: gate and up of an expert, layers of one tensor."""
    result: list[ExchangePart] = []
    for part in parts:
        last = result[-1] if result else None
        if part.dense:
            part = ExchangePart(part.target.reshape(-1), part.dtype, part.offset, (part.target.numel(),), (1,))
            if (
                last is not None
                and last.dense
                and last.dtype == part.dtype
                and last.target.dim() == 1
                and last.target.dtype == part.target.dtype
                and last.offset + last.target.numel() * part.dtype.itemsize == part.offset
                and last.target.data_ptr() + last.target.nbytes == part.target.data_ptr()
                and last.target.untyped_storage().data_ptr() == part.target.untyped_storage().data_ptr()
            ):
                count = last.target.numel() + part.target.numel()
                union = last.target.as_strided((count,), (1,))
                result[-1] = ExchangePart(union, part.dtype, last.offset, (count,), (1,))
                continue
        result.append(part)
    return result


def split(parts: Iterable[ExchangePart]) -> list[ExchangePart]:
    """Split parts that exceed the scratch memory."""
    result: list[ExchangePart] = []
    for part in parts:
        if part.target.nbytes <= SCRATCH_BYTES:
            result.append(part)
        elif part.target.dim() == 1:
            step = SCRATCH_BYTES // part.target.dtype.itemsize
            for first in range(0, part.target.numel(), step):
                target = part.target[first : first + step]
                offset = part.offset + first * part.strides[0] * part.dtype.itemsize
                result.append(ExchangePart(target, part.dtype, offset, tuple(target.shape), part.strides))
        else:
            # By rows: a row of any parameter is smaller than the scratch memory, or is split again.
            rows = max(1, SCRATCH_BYTES // max(1, part.target[0].nbytes))
            for first in range(0, part.shape[0], rows):
                target = part.target[first : first + rows]
                offset = part.offset + first * part.strides[0] * part.dtype.itemsize
                shape, strides = tuple(target.shape), part.strides
                if shape[0] == 1 and target.nbytes > SCRATCH_BYTES:
                    target, shape, strides = target[0], shape[1:], strides[1:]
                result += split([ExchangePart(target, part.dtype, offset, shape, strides)])
    return result


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Return the addresses of all parameters: another one invalidates what was recorded."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}


# --- recording ---


class _Recorder(TorchDispatchMode):
    """Records copies from staging memory into parameters instead of making them. Refuses any other use of either.

    Args:
        targets: tensors with which loaders work, by their module and name, and the tensors in use in whose place they stand.
        staging: the update's bytes.
    """

    def __init__(self, targets: Mapping[tuple[str, str], tuple[Tensor, Tensor]], staging: Tensor) -> None:
        super().__init__()
        self.parts: list[ExchangePart] = []
        self.constants: list[Tensor] = []
        self._staging, self._staging_id = staging, storage_id(staging)
        self._targets = {storage_id(loaded): (name, loaded, live) for name, (loaded, live) in targets.items()}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if function is torch.ops.aten._local_scalar_dense.default and storage_id(first) == self._staging_id:
            raise NotInPlaceError("a loader reads the value of a tensor")
        if first is not None and function._schema.is_mutable and storage_id(first) in self._targets:
            name, _, live = self._targets[storage_id(first)]
            if function is torch.ops.aten.copy_.default:
                self._record(name, first, args[1], live)
            elif function in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
                # The padding of a vocabulary: it stays as it is.
                if function is torch.ops.aten.fill_.Scalar and args[1] != 0:
                    raise NotInPlaceError(f"the loader of {'.'.join(name)} fills it with {args[1]}")
                self.constants.append(_same_part(first, live))
            else:
                raise NotInPlaceError(f"the loader of {'.'.join(name)} calls {function}")
            return first
        return function(*args, **kwargs)

    def _record(self, name: tuple[str, str], target: Tensor, source: Tensor, live: Tensor) -> None:
        if storage_id(source) != self._staging_id:
            raise NotInPlaceError(f"the loader of {'.'.join(name)} computes what it copies")
        width = source.dtype.itemsize
        source = source.expand(target.shape)
        offset = int(source.storage_offset() * width - self._staging.storage_offset())
        self.parts.append(
            ExchangePart(_same_part(target, live), source.dtype, offset, tuple(source.shape), source.stride())
        )


def learn(
    model: torch.nn.Module,
    vllm_config: Any,
    manifest: Manifest,
    staging: Tensor,
    tensors: Sequence[tuple[str, Tensor]],
    changed_apart: Callable[[set[int]], str | None],
) -> Exchange:
    """Record how the model's loaders distribute an update that vLLM's reload has just loaded. The engine must be paused.

    Args:
        staging: the update's bytes, which ``tensors`` are views of.
        changed_apart: returns the name of a tensor that the reload has changed and that is in none of the storages with these
            addresses; None if there is none.

    Raises:
        NotInPlaceError: the weights in use are not copies of parts of the update.
    """
    _require_plain(model, vllm_config)
    tied = _tied(vllm_config, manifest)
    if len(tied) > 1:
        # Equal to the embedding, as Exchange.run checks, and loaded into the same memory or not at all.
        tensors = [(name, tensor) for name, tensor in tensors if name != HEAD]
    parts, constants = _recorded(model, staging, tensors)
    parts = _distinct([part for part in parts if part.target.numel()])
    storages = {part.target.untyped_storage().data_ptr() for part in parts}
    _require_complete(model, parts, constants)
    if (name := changed_apart(storages)) is not None:
        raise NotInPlaceError(f"{name} is computed from weights")
    for part in parts:
        # What the kernels use may have been reordered or padded after loading; then it differs from what the loader copied.
        if not torch.equal(part.target, part.source(staging).to(part.target.dtype)):
            raise NotInPlaceError("the weights in use are not in the order of the checkpoint")
    outside = sum(part.target.nbytes for part in parts if part.saved(staging) is None)
    if outside > SCRATCH_BYTES:
        raise NotInPlaceError(f"{outside} bytes of old weights do not fit into the update's own memory")
    return Exchange(parts, manifest.tensors, addresses(model), tied)


def _require_plain(model: torch.nn.Module, vllm_config: Any) -> None:
    if vllm_config.model_config.quantization is not None:
        raise NotInPlaceError(f"the engine quantises weights ({vllm_config.model_config.quantization})")
    # Experts then move between workers at any time.
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise NotInPlaceError("the engine balances experts between its workers")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kinds = [kind.__name__ for kind in type(method).__mro__]
        if method is not None and not any(kind in PLAIN_METHODS for kind in kinds):
            raise NotInPlaceError(f"{name} has the method {type(method).__name__}")
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if any(kind in PLAIN_METHODS for kind in kinds):
            continue  # a method that is a module itself
        if callable(getattr(module, "process_weights_after_loading", None)) and (
            not any(kind in ATTENTION for kind in kinds)
            or "MLAAttention" in kinds
            or getattr(getattr(module, "impl", None), "sinks", None) is not None
        ):
            raise NotInPlaceError(f"{name} ({type(module).__name__}) computes tensors after loading")


def _recorded(
    model: torch.nn.Module, staging: Tensor, tensors: Sequence[tuple[str, Tensor]]
) -> tuple[list[ExchangePart], list[Tensor]]:
    """Run the loaders on parameters without memory; return the copies that they make, and the parts that they fill with zeros."""
    if any(storage_id(tensor) != storage_id(staging) for _, tensor in tensors if tensor.numel()):
        raise NotInPlaceError("a tensor of the update is not aligned to its dtype")

    def parameters() -> dict[tuple[str, str], Tensor]:
        modules = model.named_modules()
        return {(prefix, name): value for prefix, module in modules for name, value in _parameters(module)}

    in_use = parameters()
    try:
        with parameters_on_meta(model):
            targets = {key: (loaded, in_use[key]) for key, loaded in parameters().items() if key in in_use}
            for (prefix, name), (loaded, live) in targets.items():
                if (loaded.shape, loaded.dtype, loaded.stride()) != (live.shape, live.dtype, live.stride()):
                    raise NotInPlaceError(
                        f"{prefix}.{name} has another layout in use: {live.dtype} {list(live.shape)}, "
                        f"loaded {list(loaded.shape)}"
                    )
            with torch.no_grad(), _Recorder(targets, staging) as recorder:
                model.load_weights(iter(tensors))  # type: ignore[operator]
    except NotInPlaceError:
        raise
    except Exception as error:
        # Whatever a loader cannot do without memory: the reload can load this model, and this cannot.
        raise NotInPlaceError(f"{type(error).__name__}: {error}") from error
    return recorder.parts, recorder.constants


def _distinct(parts: Sequence[ExchangePart]) -> list[ExchangePart]:
    """Drop repeated copies; raise NotInPlaceError if two copies share bytes of a parameter or of the update."""
    unique: dict[tuple[Any, ...], ExchangePart] = {}
    for part in parts:
        target = part.target
        region = (target.data_ptr(), *target.shape, *target.stride(), part.dtype, part.offset, *part.strides)
        # Tied parameters are loaded twice from one tensor.
        unique.setdefault(region, part)
    # Exchanged twice, an old weight would be taken for a new one.
    targets = sorted(
        (part.target.data_ptr(), _span(part.target.shape, part.target.stride(), part.target.dtype))
        for part in unique.values()
    )
    sources = sorted((part.offset, _span(part.shape, part.strides, part.dtype)) for part in unique.values())
    for spans in (targets, sources):
        if any(start + length > following for (start, length), (following, _) in pairwise(spans)):
            raise NotInPlaceError("a tensor is loaded into two parameters, or two tensors into one")
    return list(unique.values())


def _span(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes from the first element to the end of the last one."""
    if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        raise NotInPlaceError("one value is loaded into several")
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * dtype.itemsize


def _require_complete(model: torch.nn.Module, parts: Sequence[ExchangePart], constants: Sequence[Tensor]) -> None:
    """Check that every element of every parameter has a source."""
    regions: dict[int, dict[tuple[int, ...], int]] = {}
    for target in (*(part.target for part in parts), *constants):
        region = (int(target.storage_offset()), *target.shape, *target.stride())
        regions.setdefault(target.untyped_storage().data_ptr(), {})[region] = target.numel()
    for name, parameter in model.named_parameters():
        if sum(regions.get(parameter.untyped_storage().data_ptr(), {}).values()) != parameter.numel():
            raise NotInPlaceError(f"{name} is not loaded from the update's tensors alone")


def _tied(vllm_config: Any, manifest: Manifest) -> dict[str, tuple[int, int]]:
    if not getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False):
        return {}
    starts = offsets(manifest.tensors)
    return {
        spec.name: (start, start + spec.nbytes)
        for spec, start in zip(manifest.tensors, starts[:-1], strict=True)
        if spec.name == HEAD or spec.name.endswith(EMBEDDINGS)
    }


def _parameters(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None:
            yield name, value


def _same_part(part: Tensor, live: Tensor) -> Tensor:
    """Return the part of ``live`` at the place of ``part`` in its own tensor, whose layout is the same."""
    return live.detach().as_strided(part.shape, part.stride(), live.storage_offset() + part.storage_offset())
