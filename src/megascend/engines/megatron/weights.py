"""Moving weights between a Hugging Face directory and the model's shards, with nothing left out on the way."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mcore_bridge.bridge import gpt_bridge
from mcore_bridge.utils import StreamingSafetensorSaver
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megascend.changes import patched
from megascend.distributed.objects import all_reduce_numbers, raise_on_all_ranks
from megascend.distributed.process_groups import ProcessGroups
from megascend.errors import CheckpointError
from megascend.files import beside, replace_directory
from megascend.huggingface.exported import OUTPUT, differences, extra_tensors, fused_half, some
from megascend.huggingface.files import (
    TensorHeader,
    copy_companions,
    read_config,
    tensor_headers,
)

SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class _Tracked:
    """A lazy tensor of mcore-bridge that remembers having been read."""

    def __init__(self, lazy: Any, name: str, used: dict[str, None]) -> None:
        self._lazy, self._name, self._used = lazy, name, used

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("load", "load_slice"):
            self._used[self._name] = None
        return getattr(self._lazy, attribute)


def load(chunks: list[Any], bridge: Any, model_dir: Path, names: list[str], groups: ProcessGroups) -> None:
    """Fill ``chunks`` from ``model_dir``; every parameter is written and every tensor of the checkpoint used.

    mcore-bridge passes over what it does not find (an untied output layer keeps whatever was in memory), so parameters
    start out as NaN here, and any that is still NaN afterwards is an error on every rank.

    Raises:
        CheckpointError: on all ranks alike, naming what is missing, left over, or has the wrong shape.
    """
    used: dict[str, None] = {}  # a dict keeps the order of reading
    problem = None
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    try:
        with _no_progress_bars():
            bridge.load_weights(chunks, str(model_dir), converter=lambda name, lazy: (name, _Tracked(lazy, name, used)))
    except KeyError as error:
        problem = (
            f"the checkpoint has no tensor {error}, which the model that config.json describes needs{_after(used)}"
        )
    except (RuntimeError, ValueError, AssertionError) as error:
        problem = f"a tensor does not fit the model that config.json describes{_after(used)}: {error}"
    if problem is None:
        parameters = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        holes = {name: int(torch.isnan(p).sum()) for name, p in parameters.items()}
        empty = [name for name, count in holes.items() if count == parameters[name].numel()]
        damaged = [name for name, count in holes.items() if count and name not in empty]
        if empty:
            problem = f"the checkpoint has no tensor for {some(empty)} of the model that config.json describes"
        elif damaged:
            problem = f"the checkpoint holds NaN in what goes into {some(damaged)}"
    failed = None if problem is None else CheckpointError(f"{model_dir}: {problem} (rank {groups.rank})")
    raise_on_all_ranks(failed, groups, f"whether {model_dir} could be loaded")

    counts = all_reduce_numbers(
        [float(name in used) for name in names], "world", groups, "max", "tensors that were used"
    )
    left = [name for name, count in zip(names, counts, strict=True) if not count]
    left = [name for name in left if not (name == OUTPUT and _tied(chunks))]
    if left:
        raise CheckpointError(
            f"{model_dir} holds tensors that this architecture has no place for: {some(left)}. config.json and weights "
            "are of different models"
        )


def export(
    chunks: list[Any],
    bridge: Any,
    source: Path,
    target: Path,
    dtype: str,
    groups: ProcessGroups,
    merge: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Write ``chunks`` as a Hugging Face directory; ``target`` appears only when it is complete.

    It holds the tensors of ``source``, by name and shape; those that are not built here are copied from it.

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``: what the parameters have.
        merge: ``(name, tensor) -> tensor``, applied to everything that is written; used on rank 0.

    Raises:
        CheckpointError: on every rank, if ``target`` exists and is not a Hugging Face directory (it would be replaced),
            cannot be written, or would have other tensors than ``source``; what was there before is still there then.
    """
    temporary = beside(target)
    wanted: dict[str, TensorHeader] = {}

    def prepare() -> None:
        _prepare(target, temporary)
        wanted.update(tensor_headers(source))

    problem = _written(prepare, target) if groups.rank == 0 else None
    raise_on_all_ranks(problem, groups, f"whether there is room for {target}")
    saver = StreamingSafetensorSaver(save_dir=str(temporary))
    problem = _save(chunks, bridge, saver, wanted, target, merge)
    if groups.rank == 0:
        if problem is None:
            problem = _written(lambda: _copy_extra(source, wanted, saver), target)
        problem = problem or _written(saver.finalize, target)
        if problem is None:
            problem = _written(lambda: _hold_against(source, wanted, temporary, dtype, _tied(chunks)), target)
        if problem is None:
            problem = _written(lambda: copy_companions(source, temporary, dtype), target)
        if problem is None:
            problem = _written(lambda: replace_directory(temporary, target), target)
        shutil.rmtree(temporary, ignore_errors=True)
    raise_on_all_ranks(problem, groups, f"whether {target} could be written")


def _prepare(target: Path, temporary: Path) -> None:
    if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or (target / "config.json").is_file())):
        raise CheckpointError(f"export: {target} exists and is no Hugging Face checkpoint; choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _save(
    chunks: list[Any],
    bridge: Any,
    saver: StreamingSafetensorSaver,
    wanted: Mapping[str, TensorHeader],
    target: Path,
    merge: Callable[[str, Tensor], Tensor] | None,
) -> CheckpointError | None:
    """What mcore-bridge's ``save_weights`` does, but a rank that cannot write goes on taking part in collectives.

    It returns what went wrong instead; raising there and then would leave the other ranks waiting.
    """
    problem = None
    stream = bridge.export_weights(
        chunks, target_device="cpu", only_master_rank=True, disable_tqdm=True, _is_saving=True
    )
    for name, tensor in joined(stream, wanted):
        if problem is None and tensor is not None:
            problem = _written(
                partial(saver.add_tensor, name, tensor if merge is None else merge(name, tensor)), target
            )
    return problem


def joined(stream: Iterable[tuple[str, Tensor | None]], wanted: Collection[str]) -> Iterator[tuple[str, Tensor | None]]:
    """``stream`` with gate and up as one tensor where the source has them so (GLM-4): mcore-bridge reads it, but writes two.

    Ranks that do not write have None for tensors.
    """
    halves: dict[str, dict[str, Tensor | None]] = {}
    for name, tensor in stream:
        half = fused_half(name, wanted)
        if half is None:
            yield name, tensor
            continue
        whole, part = half
        found = halves.setdefault(whole, {})
        found[part] = tensor
        if len(found) == 2:
            gate, up = found["gate"], found["up"]
            yield whole, None if gate is None or up is None else torch.cat([gate, up])


def _copy_extra(source: Path, wanted: Mapping[str, TensorHeader], saver: StreamingSafetensorSaver) -> None:
    """Carry over what the source has and no model here: heads for multi-token prediction, unchanged."""
    for name in extra_tensors(read_config(source), wanted):
        with safe_open(wanted[name].file, framework="pt") as file:
            saver.add_tensor(name, file.get_tensor(name))


def _hold_against(source: Path, wanted: Mapping[str, TensorHeader], written: Path, dtype: str, tied: bool) -> None:
    """Raise CheckpointError unless what has been written is what the source has."""
    extra = set(extra_tensors(read_config(source), wanted))
    own = {name: header for name, header in wanted.items() if name not in extra}
    exported = {name: header for name, header in tensor_headers(written).items() if name not in extra}
    if found := differences(own, exported, SAFETENSORS_DTYPES[dtype], tied=tied):
        raise CheckpointError(
            f"export: not the tensors that {source} has, so transformers would not load it as the same model: "
            f"{'; '.join(found)}. Nothing has been written; please report the model's architecture"
        )


def _written(write: Callable[[], None], target: Path) -> CheckpointError | None:
    """Why ``write`` failed, or None."""
    try:
        write()
    except CheckpointError as error:
        return error
    except (OSError, SafetensorError) as error:
        return CheckpointError(f"export: {target} could not be written: {error}")
    return None


def _after(used: dict[str, None]) -> str:
    """Where mcore-bridge was: its own errors name no tensor, or only the last part of a name."""
    return f" (the last one read was {next(reversed(used))})" if used else ""


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """mcore-bridge draws one while it loads and has no setting for it."""
    original = gpt_bridge.tqdm

    def hidden(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "disable": True})

    with patched(gpt_bridge, "tqdm", hidden, "draws no progress bar while weights are loaded"):
        yield


def _tied(chunks: list[Any]) -> bool:
    return not chunks[0].config.untie_embeddings_and_output_weights
