"""Write a Hugging Face directory from a stream of named tensors; it appears when it is complete and matches its source.

Independent of the engine: tensors are added one at a time, in any order, under the source's names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megascend.errors import CheckpointError
from megascend.models.base import ALIASES
from megascend.models.checkpoint_files import scalar_head
from megascend.models.checkpoint_files.exported import OUTPUT, differences
from megascend.models.checkpoint_files.files import (
    TensorHeader,
    copy_companions,
    read_config,
    tensor_headers,
    with_dtype,
)
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.checkpoint_files.quantised import read_tensor
from megascend.models.checkpoint_files.safetensors_writer import DTYPES, SafetensorsWriter
from megascend.runtime.io.atomic import is_replaceable, replace_directory, stage, staging
from megascend.runtime.io.paths import followed, remove

if TYPE_CHECKING:
    from torch import Tensor


PREDICTION_COUNTS = {"num_nextn_predict_layers", *ALIASES["num_nextn_predict_layers"], "mtp_num_hidden_layers"}
"""Keys of configurations that count the heads for multi-token prediction."""


class CheckpointWriter:
    """Writer of ``target`` in a temporary directory that is moved into place; the previous content is kept until then.

    ::

        with CheckpointWriter(source, target, "bfloat16", inspect_checkpoint(source)) as writer:
            for name, tensor in weights:
                writer.add(name, tensor)
            writer.finish()

    If the block ends without :meth:`finish`, nothing is left behind. Only one process of a run writes.
    """

    def __init__(self, source: Path, target: Path, dtype: str, info: ModelInfo) -> None:
        """
        Args:
            source: checkpoint that the model was built from; may be ``target``.
            dtype: dtype of the tensors, for the configuration.
            info: description of the model.
        """
        self._source, self._target, self._dtype, self._info = source, target, dtype, info
        with self._converting_errors():
            self._final = followed(target)  # a link stays one
            self._temporary = staging(self._final)
            # Early, so that a configuration that cannot be exported fails before the weights are written.
            self._config = exported_config(source, info, dtype)
            # Before the weights are gathered and written.
            check_target(target)
            stage(self._final, self._temporary)
            self._tensors = SafetensorsWriter(self._temporary, [*info.export_tensors, *info.extra])
        self._unknown: dict[str, TensorHeader] = {}

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Also after finish(), when no file is open.
        self._tensors.abandon()
        remove(self._temporary)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Its memory is free afterwards."""
        if name not in self._info.export_tensors:
            self._unknown[name] = TensorHeader(DTYPES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))
            return  # reported by finish(), together with missing tensors
        with self._converting_errors():
            self._tensors.add(name, tensor)

    def finish(self) -> None:
        """Copy untrained tensors and the files other than weights, compare with the source, and move the result into place."""
        with self._converting_errors():
            self._copy_extra()
            self._tensors.finish()
            # From the files, not from memory: this proves that they can be read.
            self._compare_with_source()
            # Before the move, which may replace the source itself.
            copy_companions(self._source, self._temporary, self._config)
            replace_directory(self._temporary, self._final)

    def _copy_extra(self) -> None:
        """Copy tensors of the source that no engine builds, unchanged: heads for multi-token prediction."""
        files: dict[Path, Any] = {}
        for name, header in self._info.extra.items():
            self._tensors.add(name, read_tensor(name, header, files))

    def _compare_with_source(self) -> None:
        headers = {
            name: header for name, header in tensor_headers(self._temporary).items() if name not in self._info.extra
        }
        require_same_tensors(self._source, self._info, headers | self._unknown, self._dtype)

    @contextlib.contextmanager
    def _converting_errors(self) -> Iterator[None]:
        """Raise errors of the file system as CheckpointError."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"export: {self._target} could not be written: {error}") from error


def check_target(target: Path) -> None:
    """Raise CheckpointError if an export to ``target`` would replace something other than a Hugging Face directory."""
    try:
        replaceable = is_replaceable(target, "config.json")
    except OSError as error:
        raise CheckpointError(f"export: {target} could not be written: {error}") from error
    if not replaceable:
        raise CheckpointError(f"export: {target} exists and is not a Hugging Face checkpoint; choose another directory")


def exported_config(source: Path, info: ModelInfo, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of an export, corrected to describe the exported tensors."""
    config = scalar_head.exported_config(read_config(source), info.scalar_head, source)
    if info.scalar_head is None and not info.shape.tied and OUTPUT in info.tensors:
        # Readers other than transformers 5 believe this setting and would drop the output layer.
        parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        for part in parts:
            if part.get("tie_word_embeddings"):
                part["tie_word_embeddings"] = False
        if all(part.get("tie_word_embeddings") is None for part in parts):
            config["tie_word_embeddings"] = False
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)  # weights are exported dequantised
            if info.mtp == "drop":
                part.update(dict.fromkeys(PREDICTION_COUNTS & part.keys(), 0))
    return with_dtype(config, dtype)


def require_same_tensors(source: Path, info: ModelInfo, exported: Mapping[str, TensorHeader], dtype: str) -> None:
    """Raise CheckpointError unless ``exported`` are the tensors of the model that came from ``source``, in ``dtype``."""
    if problems := differences(info.export_tensors, exported, DTYPES[f"torch.{dtype}"]):
        raise CheckpointError(
            f"export: not the tensors of {source}, so nothing was written: {'; '.join(problems)}; please report the model's "
            "architecture"
        )
