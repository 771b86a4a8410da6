"""A Hugging Face directory from a stream of named tensors: it appears only when it is complete and what its source is.

For any engine: the tensors come under the source's names, in any order, one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megascend.errors import CheckpointError
from megascend.files import followed, remove, replace_directory, stage, staging, vacant
from megascend.huggingface import scalar_head
from megascend.huggingface.exported import differences, extra_tensors
from megascend.huggingface.files import TensorHeader, copy_companions, read_config, tensor_headers
from megascend.huggingface.safetensors_writer import DTYPES, FILE_BYTES, SafetensorsWriter

if TYPE_CHECKING:
    from torch import Tensor

    from megascend.huggingface.scalar_head import ScalarHead


class CheckpointWriter:
    """Writes ``target`` beside its place and moves it there; what was there before stays until then.

    ::

        with CheckpointWriter(source, target, "bfloat16", tied=False) as writer:
            for name, tensor in weights:
                writer.add(name, tensor)
            writer.finish()

    Left without :meth:`finish`, it leaves nothing behind. One process writes; the others need none of it.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        dtype: str,
        *,
        tied: bool,
        file_bytes: int = FILE_BYTES,
        head: ScalarHead | None = None,
    ) -> None:
        """
        Args:
            source: the checkpoint that the weights come from; may be ``target`` itself.
            dtype: ``float32``, ``float16`` or ``bfloat16``: of what is added, for the configuration.
            tied: the output layer is the embedding, and its own tensor need not be there.
            file_bytes: see :class:`~megascend.huggingface.safetensors_writer.SafetensorsWriter`.
            head: the model's scalar head, which may stand in the place of the source's output layer.

        Raises:
            CheckpointError: ``target`` exists and is no Hugging Face directory (it would be replaced), or cannot be
                written; ``source`` is no checkpoint.
        """
        self._source, self._target, self._dtype, self._tied = source, target, dtype, tied
        self._head = head
        with self._told():
            self._place = followed(target)  # a link stays one
            self._temporary = staging(self._place)
            config = read_config(source)
            self._wanted = scalar_head.with_head(tensor_headers(source), head, config)
            self._extra = extra_tensors(config, self._wanted)
            self._make_room()
            self._tensors = SafetensorsWriter(self._temporary, self._wanted, file_bytes)
        self._unknown: dict[str, TensorHeader] = {}

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors.abandon()
        remove(self._temporary)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Its memory is free afterwards.

        Raises:
            CheckpointError: the disk is full, or the tensor came before.
        """
        if name not in self._wanted or name in self._extra:
            self._unknown[name] = TensorHeader(DTYPES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))
            return  # told by finish(), with what is missing instead
        with self._told():
            self._tensors.add(name, tensor)

    def finish(self) -> None:
        """Copy what is not trained here and the files beside the weights, hold all against the source, and move it into place.

        Raises:
            CheckpointError: it would have other tensors than the source, by name, shape or dtype, or cannot be written.
        """
        with self._told():
            self._copy_extra()
            self._tensors.finish()
            self._hold_against_source()
            copy_companions(
                self._source,
                self._temporary,
                self._dtype,
                lambda config: scalar_head.exported_config(config, self._head),
            )
            replace_directory(self._temporary, self._place)

    def _make_room(self) -> None:
        target = self._target
        if not vacant(target) and not (target / "config.json").is_file():
            raise CheckpointError(
                f"export: {target} exists and is not a Hugging Face checkpoint; choose another directory"
            )
        stage(self._place, self._temporary)

    def _copy_extra(self) -> None:
        """Carry over what the source has and no model here: heads for multi-token prediction, unchanged."""
        from safetensors import safe_open

        for name in self._extra:
            file = self._wanted[name].file
            assert file is not None
            with safe_open(file, framework="pt") as opened:
                self._tensors.add(name, opened.get_tensor(name))

    def _hold_against_source(self) -> None:
        def own(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
            return {name: header for name, header in headers.items() if name not in self._extra}

        exported = own(tensor_headers(self._temporary)) | self._unknown
        dtype = DTYPES[f"torch.{self._dtype}"]
        if found := differences(own(self._wanted), exported, dtype, tied=self._tied):
            raise CheckpointError(
                f"export: not the tensors that {self._source} has, so transformers would not load it as the same model: "
                f"{'; '.join(found)}. Nothing has been written; please report the model's architecture"
            )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the file system as megascend's."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"export: {self._target} could not be written: {error}") from error
