"""Read the pickles of a checkpoint without running anything in them: a checkpoint may be a stranger's.

Only the opcodes and the globals that torch writes into checkpoints are known here. A pickle is small and can still exhaust memory
(``bytearray(10**12)``) or time (hashing nested tuples that share their items), so those forms are refused too.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import IO, Any, ClassVar

import numpy
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import _get_layout, safe_globals

from megascend.errors import CheckpointError


class _Inert:
    """Stand-in for every object of a pickle that is checked before torch reads it."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _empty_array(*args: Any) -> numpy.ndarray:
    # NumPy's own function allocates an array of any size that the pickle names; the state that follows replaces it.
    return numpy.ndarray(0, dtype=numpy.uint8)


_CLASSES = {
    name: getattr(metadata, name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
}
_METADATA = {
    **{(metadata.__name__, name): value for name, value in _CLASSES.items()},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    # Early releases of Python 3.11 pickle a member of an enumeration so.
    ("builtins", "getattr"): lambda _, name: metadata._MEM_FORMAT_ENCODING[name],
    # The directory that the checkpoint was first written to.
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
}
_OBJECTS = {
    **{
        (module, "_reconstruct"): _empty_array
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")  # NumPy 1 and 2
    },
    ("numpy", "ndarray"): numpy.ndarray,
    ("numpy", "dtype"): numpy.dtype,
}
_ARCHIVE = dict.fromkeys(
    [
        ("collections", "OrderedDict"),
        ("_codecs", "encode"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch.storage", "UntypedStorage"),
        *(("torch", name) for name in vars(torch) if name.endswith("Storage")),
        *(key for key, value in _METADATA.items() if isinstance(value, torch.dtype)),
        *_OBJECTS,
    ],
    _Inert,
)
_FIELDS = {
    metadata.Metadata: {"state_dict_metadata": dict, "storage_data": dict},
    metadata.MetadataIndex: {"fqn": str},
    metadata.TensorStorageMetadata: {"properties": metadata.TensorProperties, "size": torch.Size, "chunks": list},
    metadata.ChunkStorageMetadata: {"offsets": torch.Size, "sizes": torch.Size},
    metadata.TensorProperties: {"dtype": torch.dtype},
    filesystem._StorageInfo: {"relative_path": str, "offset": int, "length": int},
}
_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE "
    "SHORT_BINBYTES BINBYTES EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE BINPERSID"
)
_PURE: Any = vars(pickle)["_Unpickler"]


# The unpickler in C allocates a table as long as the largest number of a memo entry (64 GiB for a pickle of 11 bytes).
class _Unpickler(_PURE):
    """Unpickler of the objects in ``known``, by module and name."""

    dispatch: ClassVar = {
        code: _PURE.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES.split())
    }

    def __init__(self, content: bytes, known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"{module[:80]}.{name[:80]} does not belong in a checkpoint")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()  # a tensor's storage

    def _build(self) -> None:
        instance: Any = self.stack[-2]
        # A state that is put into a class would change it for the whole process.
        if not isinstance(instance, (_Inert, *_FIELDS, *_CLASSES.values())):
            raise pickle.UnpicklingError(f"a state for {type(instance).__name__}")
        super().load_build()
        for name, kind in _FIELDS.get(type(instance), {}).items():
            if not isinstance(getattr(instance, name), kind):
                raise pickle.UnpicklingError(f"{type(instance).__name__}.{name} is not of type {kind.__name__}")

    def _get(self, index: int) -> None:
        value = self.memo[index]
        # Tuples of tuples that occur twice double their hash's time with each level; torch writes none twice.
        if type(value) is tuple:
            raise pickle.UnpicklingError("a tuple that occurs twice")
        self.append(value)

    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.BINGET[0]] = lambda self: self._get(self.read(1)[0])
    dispatch[pickle.LONG_BINGET[0]] = lambda self: self._get(int.from_bytes(self.read(4), "little"))


def read_metadata(content: bytes) -> metadata.Metadata:
    """Read the file ``.metadata`` of a distributed checkpoint.

    Raises:
        CheckpointError: it holds anything but metadata of tensors and objects in files of its own directory.
    """
    try:
        value = _Unpickler(content, _METADATA).load()
        if not isinstance(value, metadata.Metadata):
            raise pickle.UnpicklingError(f"it holds {type(value).__name__}")
        for info in (value.storage_data or {}).values():
            if "/" in info.relative_path or getattr(info, "transform_descriptors", None):  # torch 2.6 has none
                raise pickle.UnpicklingError(f"a tensor in {info.relative_path[:80]}")
    except Exception as error:  # noqa: BLE001  foreign bytes can fail in any way
        raise _refusal(".metadata", error) from None
    return value


def load(stream: IO[bytes], name: str) -> Any:
    """Read tensors, numbers, texts and NumPy arrays from what ``torch.save`` wrote.

    Raises:
        CheckpointError: it holds anything else; ``name`` says where.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            # torch compresses nothing, and finds names without regard to case.
            if len({record.filename.lower() for record in records}) < len(records) or any(
                record.file_size != record.compress_size or record.compress_type for record in records
            ):
                raise pickle.UnpicklingError("compressed records, or two of one name")
            for record in records:
                if record.filename.endswith("/data.pkl"):
                    with archive.open(record) as file:
                        file._expected_crc = None  # type: ignore[reportAttributeAccessIssue]  # files are written without
                        _Unpickler(file.read(), _ARCHIVE).load()
        stream.seek(0)
        arrays = [(value, ".".join(key)) for key, value in _OBJECTS.items()]
        with safe_globals([*arrays, *{type(numpy.dtype(kind)) for kind in ("u4", "u8", "u1")}]):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  foreign bytes can fail in any way
        raise _refusal(name, error) from None


def _refusal(name: str, error: Exception) -> CheckpointError:
    reason = str(error).partition("\n")[0][:80] or type(error).__name__
    return CheckpointError(f"{name} holds more than data, or is damaged: {reason}")
