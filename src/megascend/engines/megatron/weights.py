"""Load a Hugging Face directory into the model's shards, and check that no tensor or parameter was left out."""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from mcore_bridge.bridge import gpt_bridge
from mcore_bridge.utils import SafetensorLazyLoader
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megascend.changes import patched
from megascend.engines.megatron import scalar_head
from megascend.engines.megatron.quantised_base import QuantisedBase
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.exported import abbreviated
from megascend.models.checkpoint_files.files import FLOATS, TensorHeader
from megascend.models.checkpoint_files.quantised import read_tensor
from megascend.reference.reductions import names_with_nan, out_of_range
from megascend.runtime.distributed.objects import all_reduce_numbers, raise_on_all_ranks
from megascend.runtime.distributed.process_groups import ProcessGroups

LAYER = re.compile(r"(.*?\.)(\d+)(\..*)")
"""Prefix, index and remainder of the name of a layer's tensor."""


class _TrackedTensor:
    """A lazy tensor of mcore-bridge that records being read, and raises for numbers beyond the range of the model's dtype."""

    def __init__(self, lazy: Any, name: str, used: dict[str, None], dtype: torch.dtype) -> None:
        self._lazy, self._name, self._used, self._dtype = lazy, name, used, dtype

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._lazy, attribute)
        if attribute not in ("load", "load_slice"):
            return value
        self._used[self._name] = None

        def load(*args: Any, **options: Any) -> Tensor:
            tensor = value(*args, **options)
            if problem := out_of_range(self._name, tensor, self._dtype):
                raise CheckpointError(problem)
            return tensor

        return load


class _Loader(SafetensorLazyLoader):
    """mcore-bridge's loader, restricted to given headers: it would prefer the index file, which transformers tries last.

    Tensors in ``unread`` are NaN, without memory.
    """

    def __init__(self, model_dir: str, headers: Mapping[str, TensorHeader], unread: Collection[str]) -> None:
        self._headers, self._unread = headers, unread
        super().__init__(model_dir)

    # Upstream reads model.safetensors.index.json here.
    def _load_index(self) -> None:
        self._weight_map = {name: str(header.file) for name, header in self._headers.items() if header.file is not None}

    def _load_tensor(self, key: str) -> Tensor:
        return self._load_tensor_slice(key, ())

    def _load_tensor_slice(self, key: str, slices: Any) -> Tensor:
        index = slices if isinstance(slices, tuple) else (slices,)
        if key in self._unread:
            return torch.full((), torch.nan).expand(self._headers[key].shape)[index]
        return read_tensor(key, self._headers[key], self._file_handles, index)


def load(
    chunks: list[Any],
    bridge: Any,
    model_dir: Path,
    tensors: Mapping[str, TensorHeader],
    groups: ProcessGroups,
    fresh: Mapping[str, Tensor] | None = None,
    quantised: QuantisedBase | None = None,
) -> None:
    """Fill ``chunks`` from ``model_dir``; every parameter is written and every tensor of the checkpoint used.

    mcore-bridge skips tensors that it does not find (an untied output layer keeps uninitialised memory), so parameters are set
    to NaN first, and any NaN afterwards is an error on every rank.

    Args:
        tensors: headers of all tensors of the model.
        fresh: newly initialised weights of a scalar head, which are not in the checkpoint.
        quantised: quantises layers as they are loaded.
    """
    used: dict[str, None] = {}  # a dict for the order of reading: _after() names the last one
    problem = None
    quantising = contextlib.nullcontext() if quantised is None else quantised.loading(bridge, chunks)
    try:
        with _reading(tensors), quantising:
            for parameter in _with_values(chunks, quantised).values():
                parameter.data.fill_(torch.nan)
            dtype = chunks[0].config.params_dtype
            bridge.load_weights(
                chunks, str(model_dir), converter=lambda name, lazy: (name, _TrackedTensor(lazy, name, used, dtype))
            )
    except CheckpointError as error:
        problem = str(error)
    # mcore-bridge's index into its lazy state dict: a weight that the files do not have.
    except KeyError as error:
        problem = (
            f"the checkpoint has no tensor {_absent(error.args[0], tensors)}, which the model that config.json describes "
            f"needs{_after(used)}; "
            "correct config.json, or fetch the files again"
        )
    # Copies, splits and reshapes raise these for shapes that do not fit.
    except (RuntimeError, ValueError, AssertionError) as error:
        problem = f"a tensor does not fit the model that config.json describes{_after(used)}: {error}"
    # After loading: a new head is in no file, and its parameters are NaN like any other that was not read.
    scalar_head.fill(chunks, fresh or {})
    # A tensor may load without an error and be incomplete: elements that were not written are NaN.
    if problem is None:
        parameters = _with_values(chunks, quantised)
        holes = names_with_nan(parameters)
        empty = [name for name in holes if bool(parameters[name].isnan().all())]
        damaged = [name for name in holes if name not in empty]
        if empty:
            problem = f"the checkpoint has no tensor for {abbreviated(empty)} of the model that config.json describes"
        elif damaged:
            problem = f"the checkpoint holds NaN in what goes into {abbreviated(damaged)}"
    failed = None if problem is None else CheckpointError(f"{model_dir}: {problem} (rank {groups.rank})")
    # First the ranks' own errors: a rank that has failed has not read its tensors, and the check below would name those.
    raise_on_all_ranks(failed, groups, f"the load of {model_dir}")

    names = list(tensors)
    # Each rank reads its own layers and experts, so a tensor counts as unused only if no rank has read it.
    counts = all_reduce_numbers(
        [float(name in used) for name in names], "world", groups, "max", "tensors that were used"
    )
    unused = [name for name, count in zip(names, counts, strict=True) if not count and name not in (fresh or {})]
    if unused:
        raise CheckpointError(
            f"{model_dir} holds tensors that the architecture of config.json has no place for: {abbreviated(unused)}: correct "
            "config.json, or remove the tensors"
        )


def load_mains(
    chunks: list[Any],
    bridge: Any,
    model_dir: Path,
    tensors: Mapping[str, TensorHeader],
    rounded: Collection[str],
    groups: ProcessGroups,
    mains: Iterable[tuple[torch.nn.Parameter, int, Tensor]],
    fresh: Mapping[str, Tensor],
) -> None:
    """Copy the numbers of the files, which 16-bit parameters have rounded, into the fp32 main parameters. Collective.

    The files are read again, since only the optimizer knows this rank's part of the main parameters. Beside the model, one
    parameter at a time is in memory in fp32.

    Args:
        tensors: as for :func:`load`; rounded: the names of those that the parameters have rounded; others are not read.
        mains: (16-bit parameter, start of a run, flat main parameter); each rank may have parts only.
        fresh: newly initialised weights of a scalar head.
    """
    if not rounded and not fresh:
        return
    problem = None
    writes = _MainWrites(chunks, mains)
    unread = {name for name, header in tensors.items() if header.dtype in FLOATS and name not in rounded}
    try:
        with writes:
            if rounded:
                with _reading(tensors, unread):
                    bridge.load_weights(chunks, str(model_dir))
            scalar_head.fill(chunks, fresh)
        if rounded:
            writes.require_all()
    except Exception as error:  # noqa: BLE001  files that have changed since the parameters were read fail in many ways
        problem = CheckpointError(f"{model_dir}: main parameters cannot be read (rank {groups.rank}): {error}")
    raise_on_all_ranks(problem, groups, f"the main parameters of {model_dir}")


class _MainWrites(TorchDispatchMode):
    """Redirects copies into 16-bit parameters to their main parameters; other writes to the model are dropped.

    NaN leaves a main parameter's number as it is.
    """

    def __init__(self, chunks: list[Any], mains: Iterable[tuple[torch.nn.Parameter, int, Tensor]]) -> None:
        super().__init__()
        self._runs: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for parameter, start, values in mains:
            self._runs[parameter.data_ptr()].append((start, values))
        live = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers()) if tensor.numel()]
        self._tensors = sorted(live, key=lambda tensor: tensor.data_ptr())
        self._starts = [tensor.data_ptr() for tensor in self._tensors]
        self._written: set[int] = set()

    def require_all(self) -> None:
        """Raise CheckpointError if a parameter was not written, as mcore-bridge must have done it in another way."""
        if left := len(self._runs.keys() - self._written):
            raise CheckpointError(f"mcore-bridge has not copied {left} of {len(self._runs)} parameters")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            number = bisect_right(self._starts, target.data_ptr()) - 1
            if number >= 0 and target.data_ptr() < self._starts[number] + self._tensors[number].nbytes:
                self._copy(self._tensors[number], target, source)
                return target
        return func(*args, **(kwargs or {}))

    def _copy(self, parameter: Tensor, target: Tensor, source: Tensor) -> None:
        start = parameter.data_ptr()
        if start not in self._runs:
            return
        self._written.add(start)
        values = torch.full((parameter.numel(),), torch.nan, device=source.device)
        offset = (target.data_ptr() - start) // target.element_size()
        values.as_strided(target.shape, target.stride(), offset).copy_(source)
        for first, main in self._runs[start]:
            part = values[first : first + main.numel()].to(main.device)
            main.copy_(torch.where(part.isnan(), main, part))


def _with_values(chunks: list[Any], quantised: QuantisedBase | None) -> dict[str, Tensor]:
    """Return all parameters by name, without quantised ones, which have been checked."""
    released = set() if quantised is None else quantised.released()
    return {name: p for chunk in chunks for name, p in chunk.named_parameters() if id(p) not in released}


def _absent(part: str, names: Iterable[str]) -> str:
    """Return the names ending with ``part``, all that mcore-bridge's KeyError has, that one layer has and another lacks."""
    present = set(names)
    layers: dict[str, set[str]] = {}
    for name in present:
        if match := LAYER.match(name):
            layers.setdefault(match[1], set()).add(match[2])
    endings = {match[3] for name in present if name.endswith(f".{part}") and (match := LAYER.match(name))}
    expected = [f"{prefix}{index}{end}" for prefix, indices in layers.items() for index in indices for end in endings]
    return abbreviated(sorted(set(expected) - present)) or repr(part)


def _after(used: dict[str, None]) -> str:
    """Return a note on the tensor that mcore-bridge read last: its errors name none, or only the last part of a name."""
    return f" (the last one read was {next(reversed(used))})" if used else ""


@contextlib.contextmanager
def _reading(tensors: Mapping[str, TensorHeader], unread: Collection[str] = ()) -> Iterator[None]:
    """Make mcore-bridge read these tensors, from the files that hold them, without a progress bar, for which it has no setting.

    Args:
        unread: see :class:`_Loader`.
    """
    progress_bar = gpt_bridge.tqdm

    def hidden(*args: Any, **options: Any) -> Any:
        return progress_bar(*args, **{**options, "disable": True})

    def loader(model_dir: str, **options: Any) -> _Loader:
        return _Loader(model_dir, tensors, unread)

    with (
        patched(gpt_bridge, "tqdm", hidden, "draws no progress bar while weights are loaded"),
        patched(gpt_bridge, "SafetensorLazyLoader", loader, "reads the tensors that the other engines would read"),
    ):
        yield
