"""Weights of another model of the policy's architecture, which take the policy's place on the device for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megascend.config import Mtp
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.architectures import transformers_config
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.info import ModelInfo, inspect_checkpoint
from megascend.models.checkpoint_files.quantised import read_tensor
from megascend.reference.reductions import out_of_range
from megascend.runtime.distributed.objects import raise_on_all_ranks
from megascend.training.checkpoint.hf_slices import HfSlices, held_weights
from megascend.training.checkpoint.slices import TensorSlices
from megascend.training.checkpoint.staging import Staging

if TYPE_CHECKING:
    from megascend.backend import Backend

FREE_KEYS = {
    *(
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "tie_word_embeddings"),
}
"""Keys of ``config.json`` that change no log-probability, or show in the names of the weights."""


class SwappedWeights:
    """A rank's weights of another model in host memory, with a buffer for the policy's while they are in use.

    Initially a copy of the policy's weights, which for a new backend are those that the run begins with. Collective.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, page_locked = backend, backend.platform.page_locks_memory
        self._staging, self._policy_staging = Staging(page_locked=page_locked), Staging(page_locked=page_locked)
        self._weights: dict[str, TensorSlices] = self._staging.copy(backend.engine.weights())

    def read(self, directory: Path, setting: str) -> None:
        """Read the weights from a directory of the policy's architecture. Collective.

        Raises:
            CheckpointError: on every rank: they cannot be read; the message begins with ``setting``.
        """
        engine, problem = self._backend.engine, None
        try:
            # Raises on every rank or on none.
            slices = engine.hf_slices()
            headers = inspect_checkpoint(directory, mtp=engine.info.mtp).tensors
            read_weights(self._weights, slices, headers, engine.dtype)
        except CheckpointError as error:
            problem = CheckpointError(f"{setting}: {directory}: {error}")
        raise_on_all_ranks(problem, self._backend.groups, f"the read of {directory}")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the engine compute the other model within the context."""
        live = self._backend.engine.weights()
        policy = self._policy_staging.copy(live)
        try:
            _write(live, self._weights)
            yield
        finally:
            _write(live, policy)


@torch.no_grad()
def _write(targets: Mapping[str, TensorSlices], sources: Mapping[str, TensorSlices]) -> None:
    for name, tensor in targets.items():
        for (_, target), (_, source) in zip(tensor.slices, sources[name].slices, strict=True):
            target.copy_(source)


def read_weights(
    weights: Mapping[str, TensorSlices], slices: HfSlices, headers: Mapping[str, TensorHeader], dtype: torch.dtype
) -> None:
    """Fill tensors in host memory from a checkpoint's files; rows that pad a vocabulary are unchanged.

    Args:
        slices: Hugging Face slices that an engine's tensors consist of.
    """
    files: dict[Path, Any] = {}
    for name, tensor in weights.items():
        read = 0
        for weight, offsets, target in held_weights({name: tensor}, slices):
            if weight not in headers:
                raise CheckpointError(f"it has no {weight}")
            index = tuple(slice(start, start + size) for start, size in zip(offsets, target.shape, strict=True))
            try:
                values = read_tensor(weight, headers[weight], files, index)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"{weight} cannot be read: {error}") from error
            if problem := out_of_range(weight, values, dtype):
                raise CheckpointError(problem)
            if values.is_floating_point() and bool(values.isnan().any()):
                raise CheckpointError(f"{weight} contains NaN")
            target.copy_(values.view(target.shape))
            read += target.numel()
        size = sum(values.numel() for _, values in tensor.slices)
        if read != size and not tensor.may_differ:
            raise CheckpointError(f"it has only {read} of the {size} values of {name} that this rank needs")


def difference_of_models(directory: Path, model: Path, info: ModelInfo, mtp: Mtp) -> str | None:
    """Return a sentence on how a directory differs from one that the policy's engine can compute; None if it can.

    Args:
        model: the policy's checkpoint, which ``info`` describes.
    """
    shapes, expected = (
        {name: tuple(header.shape) for name, header in tensors.items()}
        for tensors in (inspect_checkpoint(directory, mtp=mtp).tensors, info.tensors)
    )
    if different := sorted(name for name, _ in shapes.items() ^ expected.items()):
        return (
            f"{directory} is not a model like {model}: {different[0]} has shape {shapes.get(different[0], 'none')}, there "
            f"{expected.get(different[0], 'none')}"
        )
    # Shapes do not show how a model computes, and the policy's configuration computes both.
    values, policy = (transformers_config(path).to_dict() for path in (directory, model))
    for key in sorted((values.keys() | policy.keys()) - FREE_KEYS):
        if values.get(key) != policy.get(key):
            return (
                f"{directory} has {key}: {values.get(key)!r} in config.json and {model} has {policy.get(key)!r}: the engine of "
                "the policy would compute another model"
            )
    return None
