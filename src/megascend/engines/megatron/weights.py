"""Load a Hugging Face directory into the model's shards, and check that no tensor or parameter was left out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from mcore_bridge.bridge import gpt_bridge
from mcore_bridge.utils import SafetensorLazyLoader
from torch import Tensor

from megascend.changes import patched
from megascend.distributed.objects import all_reduce_numbers, raise_on_all_ranks
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.megatron import scalar_head
from megascend.engines.megatron.quantised_base import QuantisedBase
from megascend.errors import CheckpointError
from megascend.huggingface.exported import abbreviated
from megascend.huggingface.files import TensorHeader
from megascend.huggingface.quantised import read_tensor
from megascend.kernels.reductions import names_with_nan, out_of_range

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
    """mcore-bridge's loader, restricted to given headers: it would prefer the index file, which transformers tries last."""

    def __init__(self, model_dir: str, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        super().__init__(model_dir)

    # Upstream reads model.safetensors.index.json here.
    def _load_index(self) -> None:
        self._weight_map = {name: str(header.file) for name, header in self._headers.items() if header.file is not None}

    def _load_tensor(self, key: str) -> Tensor:
        return read_tensor(key, self._headers[key], self._file_handles)

    def _load_tensor_slice(self, key: str, slices: Any) -> Tensor:
        index = slices if isinstance(slices, tuple) else (slices,)
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
        with _no_progress_bars(), _loads(tensors), quantising:
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
            f"{model_dir} holds tensors that this architecture has no place for: {abbreviated(unused)}. config.json and weights "
            "are of different models: correct config.json, or remove the tensors from the files"
        )


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
def _no_progress_bars() -> Iterator[None]:
    """Hide the progress bar that mcore-bridge draws while it loads; it has no setting for that."""
    original = gpt_bridge.tqdm

    def hidden(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "disable": True})

    with patched(gpt_bridge, "tqdm", hidden, "draws no progress bar while weights are loaded"):
        yield


@contextlib.contextmanager
def _loads(tensors: Mapping[str, TensorHeader]) -> Iterator[None]:
    """Make mcore-bridge read these tensors, from the files that hold them."""

    def loader(model_dir: str, **options: Any) -> _Loader:
        return _Loader(model_dir, tensors)

    with patched(gpt_bridge, "SafetensorLazyLoader", loader, "reads the tensors that the other engines would read"):
        yield
