"""Quantised checkpoints, read by dequantisation: fp8 in blocks (DeepSeek), MXFP4 experts (gpt-oss), INT4 in groups (Kimi-K2.5).

A quantised weight and its scales are one tensor to the rest of the package: its header has the shape of the weight, dtype bf16,
and says how it is stored. Only what is asked for is read and dequantised, so a rank needs memory for its own shards.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

SCALES = "_scale_inv"
BLOCKS, EXPONENTS = "_blocks", "_scales"
MXFP4_GROUP = 32
"""Values that share an exponent (Open Compute Project, "Microscaling Formats", 2023, section 5.2)."""
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of E2M1."""
PACKED, GROUP_SCALES, SHAPE = "_packed", "_scale", "_shape"
"""Ends of the names of a weight's tensors in the format pack-quantized of compressed-tensors."""
PER_WORD = 8
"""Values of 4 bits in an int32, the first in the lowest bits; stored with an offset of 8."""
DEQUANTISED = "BF16"


@dataclass(frozen=True)
class QuantisedHeader(TensorHeader):
    """Header of a weight that is stored quantised.

    Attributes:
        method: ``fp8``: e4m3 with a factor for each block of rows and columns; ``mxfp4``: 4 bits with an exponent for each 32
            input features, experts stored as [experts, out, in / 32, 16 bytes]; ``int4``: eight values in an int32, with a
            factor for each ``block`` of input features.
        values, scales: (name, header) of the stored tensors.
        block: rows and columns of values that share a factor, of ``fp8`` and ``int4``.
    """

    method: Literal["fp8", "mxfp4", "int4"] = "fp8"
    values: tuple[str, TensorHeader] = ("", TensorHeader("", ()))
    scales: tuple[str, TensorHeader] = ("", TensorHeader("", ()))
    block: tuple[int, int] = (128, 128)


def dequantised_headers(
    headers: Mapping[str, TensorHeader], config: Mapping[str, Any], source: Path
) -> dict[str, TensorHeader]:
    """Join the headers of quantised weights with those of their scales; leave others unchanged.

    Args:
        config: ``config.json``.
        source: the checkpoint, for messages.
    """
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if settings is None:
        return dict(headers)
    method = settings.get("quant_method")
    joined = dict(headers)
    if method == "fp8" and settings.get("weight_block_size"):
        rows, columns = settings["weight_block_size"]
        _join_fp8(joined, rows, columns, source)
    elif method == "mxfp4":
        _join_mxfp4(joined, source)
    elif method == "compressed-tensors" and (group := _int4_group(settings)):
        _join_int4(joined, group, source)
    else:
        raise CheckpointError(
            f"{source}/config.json: quantization_config.quant_method {method!r} is not read (fp8 in blocks, mxfp4, symmetric "
            "pack-quantized int4): dequantise it with transformers"
        )
    left = [name for name, header in joined.items() if header.dtype.startswith("F8") and header.dtype != DEQUANTISED]
    if left:
        raise CheckpointError(
            f"{source}: {left[0]} is stored in {joined[left[0]].dtype} without scales; fetch the files again"
        )
    return joined


def _join_fp8(joined: dict[str, TensorHeader], rows: int, columns: int, source: Path) -> None:
    """Join fp8 weights with the scales of their blocks of ``rows`` x ``columns``."""
    for name in [name for name in joined if name.endswith(SCALES)]:
        weight, scales = name.removesuffix(SCALES), joined.pop(name)
        values = joined.get(weight)
        if values is None:
            raise CheckpointError(f"{source}: {name} scales {weight}, which no file holds; fetch the files again")
        expected = (*values.shape[:-2], -(-values.shape[-2] // rows), -(-values.shape[-1] // columns))
        if scales.shape != expected:
            raise CheckpointError(
                f"{source}: {name} has shape {list(scales.shape)}; {weight} {list(values.shape)} in blocks of {rows} x "
                f"{columns} (quantization_config.weight_block_size) needs {list(expected)}"
            )
        joined[weight] = QuantisedHeader(
            DEQUANTISED,
            values.shape,
            values.file,
            method="fp8",
            values=(weight, values),
            scales=(name, scales),
            block=(rows, columns),
        )


def _join_mxfp4(joined: dict[str, TensorHeader], source: Path) -> None:
    """Join blocks of experts with their exponents."""
    for name in [name for name in joined if name.endswith(BLOCKS)]:
        weight = name.removesuffix(BLOCKS)
        values, scales = joined.pop(name), joined.pop(f"{weight}{EXPONENTS}", None)
        if scales is None or len(values.shape) != 4 or scales.shape != values.shape[:-1]:
            raise CheckpointError(
                f"{source}: {name} {list(values.shape)} needs {weight}{EXPONENTS} of shape {list(values.shape[:-1])}"
            )
        experts, rows, groups, _ = values.shape
        joined[weight] = QuantisedHeader(
            DEQUANTISED,
            (experts, groups * MXFP4_GROUP, rows),
            values.file,
            method="mxfp4",
            values=(name, values),
            scales=(f"{weight}{EXPONENTS}", scales),
        )


def _join_int4(joined: dict[str, TensorHeader], group: int, source: Path) -> None:
    """Join packed weights with the factors of groups of ``group`` values along the input."""
    for name in [name for name in joined if name.endswith(PACKED)]:
        weight = name.removesuffix(PACKED)
        values, scales = joined.pop(name), joined.pop(f"{weight}{GROUP_SCALES}", None)
        joined.pop(f"{weight}{SHAPE}", None)
        shape = (values.shape[0], values.shape[1] * PER_WORD)
        if scales is None or scales.shape != (shape[0], shape[1] // group):
            raise CheckpointError(
                f"{source}: {name} {list(values.shape)} needs {weight}{GROUP_SCALES} of shape {[shape[0], shape[1] // group]}"
            )
        joined[weight] = QuantisedHeader(
            DEQUANTISED,
            shape,
            values.file,
            method="int4",
            values=(name, values),
            scales=(f"{weight}{GROUP_SCALES}", scales),
            block=(1, group),
        )


def _int4_group(settings: Mapping[str, Any]) -> int | None:
    """Return the values that share a factor if all groups of compressed-tensors are symmetric ones of 4 bits, else None."""
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    expected = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None}
    sizes = {weights.get("group_size") for weights in groups}
    plain = all(weights.get(name, value) == value for weights in groups for name, value in expected.items())
    size = sizes.pop() if len(sizes) == 1 else None
    if not plain or settings.get("format") != "pack-quantized" or not isinstance(size, int) or size <= 0:
        return None
    return size if size % PER_WORD == 0 else None


def read_tensor(
    name: str, header: TensorHeader, files: MutableMapping[Path, Any], index: tuple[slice, ...] = ()
) -> Tensor:
    """Read a tensor, or a part of it; of a quantised one only what that part needs.

    Args:
        files: open safetensors files by path; those that are opened here are added.
        index: slices of the first dimensions, with step 1; of the others all is read.
    """
    if isinstance(header, QuantisedHeader):
        bounds = [part.indices(size)[:2] for part, size in zip(index, header.shape, strict=False)]
        bounds += [(0, size) for size in header.shape[len(bounds) :]]
        readers = {"fp8": _read_fp8, "mxfp4": _read_mxfp4, "int4": _read_int4}
        return readers[header.method](header, files, bounds)
    return _read_stored(name, header, files, index)


def _read_stored(name: str, header: TensorHeader, files: MutableMapping[Path, Any], index: tuple[slice, ...]) -> Tensor:
    from safetensors import safe_open

    assert header.file is not None
    if header.file not in files:
        files[header.file] = safe_open(header.file, framework="pt")
    return files[header.file].get_slice(name)[index] if index else files[header.file].get_tensor(name)


def _read_fp8(header: QuantisedHeader, files: MutableMapping[Path, Any], bounds: list[tuple[int, int]]) -> Tensor:
    import torch

    values = _read_stored(*header.values, files, tuple(slice(*bound) for bound in bounds)).float()
    matrix = list(zip(bounds[-2:], header.block, strict=True))
    # All blocks that the part touches: it may begin and end within one.
    blocks = [slice(start // size, -(-stop // size)) for (start, stop), size in matrix]
    scales = _read_stored(*header.scales, files, (*(slice(*bound) for bound in bounds[:-2]), *blocks)).float()
    for dimension, ((start, stop), size) in zip((-2, -1), matrix, strict=True):
        block_of = torch.arange(start, stop) // size - start // size
        scales = scales.index_select(dimension, block_of)
    return (values * scales).bfloat16()


def _read_mxfp4(header: QuantisedHeader, files: MutableMapping[Path, Any], bounds: list[tuple[int, int]]) -> Tensor:
    import torch

    experts, (start, stop), rows = bounds
    groups = slice(start // MXFP4_GROUP, -(-stop // MXFP4_GROUP))
    stored = (slice(*experts), slice(*rows), groups)
    codes, exponents = (_read_stored(*part, files, stored) for part in (header.values, header.scales))
    table = torch.tensor(MXFP4_VALUES)
    # Two values a byte, the first in its low half.
    values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1).flatten(-2)
    # Exponents are stored with a bias of 127 (E8M0).
    values = torch.ldexp(values, exponents.to(torch.int32)[..., None] - 127).flatten(-2)
    first = groups.start * MXFP4_GROUP
    # Stored by output row, and [experts, in, out] in transformers' model.
    return values[..., start - first : stop - first].transpose(1, 2).bfloat16().contiguous()


def _read_int4(header: QuantisedHeader, files: MutableMapping[Path, Any], bounds: list[tuple[int, int]]) -> Tensor:
    import torch

    rows, (start, stop) = slice(*bounds[0]), bounds[1]
    size = header.block[1]
    groups = slice(start // size, -(-stop // size))
    words = slice(groups.start * size // PER_WORD, groups.stop * size // PER_WORD)
    codes = _read_stored(*header.values, files, (rows, words))
    scales = _read_stored(*header.scales, files, (rows, groups)).float()
    values = torch.stack([(codes >> 4 * place & 15) - 8 for place in range(PER_WORD)], dim=-1).flatten(-2)
    values = (values.unflatten(-1, (-1, size)) * scales[..., None]).flatten(-2)
    return values[..., start - groups.start * size : stop - groups.start * size].bfloat16().contiguous()
