"""Weights in fp8 blocks: the numbers of their definition, also from slices, and what engines say of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.fp8_reference import dequantised, quantise_by_blocks
from weightwire import fp8
from weightwire.errors import ManifestError
from weightwire.fp8 import (
    BlockFormat,
    formats_from_json,
    formats_to_json,
    merged_formats,
    quantise,
    stored_specs,
    stored_tensors,
)
from weightwire.manifest import Manifest, TensorSpec
from weightwire.sender import spec_of
from weightwire.slices import index_of
from weightwire.vllm.checkpoint import ExpectedTensors, fp8_blocks

BLOCKS = BlockFormat(16, 32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Build a matrix whose blocks differ in size by many orders of magnitude; one is 0, one far below the smallest scale."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp(6 * torch.randn(rows, 1, generator=generator))
    weight[:16, :32] = 0
    weight[-16:, -32:] *= 1e-9
    return weight.to(dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 96), (50, 70), (16, 32), (3, 5), (17, 1)])
def test_values_and_scales_are_those_of_the_definition(
    shape: tuple[int, int], dtype: torch.dtype, power_of_two: bool
) -> None:
    weight = matrix(*shape, dtype)
    blocks = BlockFormat(16, 32, power_of_two)
    values, scales = quantise(weight, blocks)
    expected_values, expected_scales = quantise_by_blocks(weight, 16, 32, power_of_two)
    assert torch.equal(bits(values), bits(expected_values))
    assert torch.equal(scales, expected_scales)
    assert not values.float().isnan().any()
    close, scale = (
        dequantised({"w": numbers, "w_scale_inv": scales}, 16, 32)["w"] for numbers in (values, torch.ones_like(values))
    )
    # Three bits of mantissa; below 2^-6 the steps are 2^-9.
    bound = torch.maximum(weight.float().abs() / 16, 2.0**-10 * scale)
    assert bool(((close - weight.float()).abs() <= bound * 1.001).all())


@pytest.mark.parametrize("part_elements", [1, 2 * 40 * 64, 2**26])
def test_stacked_matrices_are_quantised_one_by_one(part_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "PART_ELEMENTS", part_elements)
    weight = torch.stack([matrix(40, 64, seed=seed) for seed in range(3)])
    values, scales = quantise(weight, BLOCKS)
    assert (values.shape, scales.shape) == ((3, 40, 64), (3, 3, 2))
    for index in range(3):
        expected = quantise_by_blocks(weight[index], 16, 32)
        assert torch.equal(bits(values[index]), bits(expected[0]))
        assert torch.equal(scales[index], expected[1])


def test_slices_of_complete_blocks_are_slices_of_the_quantised_weight() -> None:
    weight = matrix(50, 70)
    values, scales = quantise(weight, BLOCKS)
    for offsets, sizes in (((0, 0), (32, 64)), ((16, 32), (34, 38)), ((48, 64), (2, 6)), ((0, 64), (50, 6))):
        box = BLOCKS.box(offsets, sizes, (50, 70))
        assert box is not None
        part_values, part_scales = quantise(weight[index_of(offsets, sizes)], BLOCKS)
        assert torch.equal(bits(part_values), bits(values[index_of(offsets, sizes)]))
        assert torch.equal(part_scales, scales[index_of(*box)])
    for offsets, sizes in (((8, 0), (8, 32)), ((0, 0), (24, 70)), ((0, 0), (50, 33)), ((0, 31), (16, 33))):
        assert BLOCKS.box(offsets, sizes, (50, 70)) is None


def test_weights_without_elements_have_scales_without_elements() -> None:
    values, scales = quantise(torch.zeros(0, 64, dtype=torch.bfloat16), BLOCKS)
    assert (values.dtype, values.shape, scales.shape) == (torch.float8_e4m3fn, (0, 64), (0, 2))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_at_the_end(number: float, power_of_two: bool) -> None:
    weight = matrix(40, 64)
    weight[20, 33] = number
    values, scales = quantise(weight, BlockFormat(16, 32, power_of_two))
    assert (~scales.isfinite()).nonzero().tolist() == [[1, 1]]
    assert torch.equal(bits(values[:16]), bits(quantise_by_blocks(matrix(40, 64), 16, 32, power_of_two)[0][:16]))
    formats = {"a": BlockFormat(16, 32, power_of_two), "b": BLOCKS}
    stream = stored_tensors([("b", matrix(40, 64)), ("a", weight), ("norm", torch.ones(3))], formats)
    with pytest.raises(ManifestError, match=r"a has numbers that are NaN or infinite \(1 weights\)"):
        list(stream)
    # A weight that the engine stores as it is sent keeps its bits.
    assert torch.equal(bits(dict(stored_tensors([("a", weight)], {}))["a"]), bits(weight))


def test_tensors_follow_the_specs_and_are_half_as_many_bytes() -> None:
    tensors = {"a": matrix(64, 64), "norm": torch.ones(64), "b": matrix(30, 40)}
    formats = {"a": BLOCKS, "b": BLOCKS, "not sent": BLOCKS}
    specs = stored_specs((spec_of(*item) for item in tensors.items()), formats)
    stored = list(stored_tensors(tensors.items(), formats))
    assert [spec.name for spec in specs] == ["a", "a_scale_inv", "norm", "b", "b_scale_inv"]
    assert [spec_of(*item) for item in stored] == list(specs)
    assert sum(spec.nbytes for spec in specs[:2]) < 0.51 * tensors["a"].nbytes
    assert stored[2][1] is tensors["norm"]
    with pytest.raises(ManifestError, match=r"norm has shape \[64\], and blocks are of matrices"):
        stored_specs([spec_of("norm", tensors["norm"])], {"norm": BLOCKS})


def test_engines_that_store_weights_in_different_ways_are_refused() -> None:
    assert merged_formats({"a": {"w": BLOCKS}, "b": {"w": BLOCKS}}) == {"w": BLOCKS}
    for other in ({}, {"w": BlockFormat(128, 128)}, {"w": BLOCKS, "v": BLOCKS}):
        with pytest.raises(ManifestError, match=r"a and b store [wv] in different ways"):
            merged_formats({"a": {"w": BLOCKS}, "b": other})


@pytest.mark.parametrize(
    "data",
    [
        *(None, {}, [None], [[1, 1, True]]),
        *([[*sizes, ["w"]]] for sizes in ((0, 1, False), (1, 1, 1), (1.0, 1, True))),
        *([[1, 1, True, names]] for names in (None, "w", [1], ["w", "w"])),
        [[1, 1, True, ["w"]], [2, 2, True, ["v", "w"]]],
    ],
)
def test_malformed_descriptions_are_refused(data: Any) -> None:
    with pytest.raises(ManifestError, match="quantised"):
        formats_from_json(data)


def test_descriptions_are_the_same_after_json() -> None:
    formats = {"a": BLOCKS, "b": BlockFormat(128, 128, power_of_two=True), "c": BLOCKS}
    assert formats_from_json(json.loads(json.dumps(formats_to_json(formats)))) == formats
    assert formats_from_json(formats_to_json({})) == {}


# --- the engine's checkpoint ---


def checkpoint(folder: Path, scales_dtype: torch.dtype = torch.float32, **settings: Any) -> SimpleNamespace:
    """Write tensors of a checkpoint in fp8 blocks; return its configuration."""
    values, scales = quantise(matrix(48, 64), BLOCKS)
    scales = scales.to(scales_dtype)
    tensors = {"q.weight": values, "q.weight_scale_inv": scales, "norm.weight": torch.ones(64).bfloat16()}
    save_file(tensors, folder / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [16, 32]} | settings
    return SimpleNamespace(quantization_config=settings, tie_word_embeddings=False)


def test_quantised_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    config = checkpoint(tmp_path)
    assert fp8_blocks(str(tmp_path), config) == {"q.weight": BLOCKS}
    assert fp8_blocks(str(tmp_path), checkpoint(tmp_path, torch.bfloat16)) == {"q.weight": BLOCKS}
    config = checkpoint(tmp_path, scale_fmt="ue8m0")
    assert fp8_blocks(str(tmp_path), config) == {"q.weight": BlockFormat(16, 32, power_of_two=True)}
    for settings in (None, {"quant_method": "awq"}, {"quant_method": "fp8", "weight_block_size": None}):
        assert fp8_blocks(str(tmp_path), SimpleNamespace(quantization_config=settings)) == {}


def test_a_checkpoint_that_cannot_be_quantised_for_is_refused_by_name(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, weight_block_size=[128, 128])
    with pytest.raises(
        ManifestError, match=r"q\.weight \[48, 64\] is in fp8, and its scales q\.weight_scale_inv are .* 128 x"
    ):
        fp8_blocks(str(tmp_path), config)
    with pytest.raises(ManifestError, match=r"organisation/model .* start the engine from a directory"):
        fp8_blocks("organisation/model", config)
    # Gate and up of a stack of experts, 24 rows each: their second block has rows of both.
    values, scales = quantise(torch.ones(2, 48, 64), BLOCKS)
    fused = {"experts.gate_up_proj": values, "experts.gate_up_proj_scale_inv": scales}
    save_file(fused, tmp_path / "model.safetensors")
    with pytest.raises(
        ManifestError, match=r"gate_up_proj \[2, 48, 64\] holds gate and up .* 16 rows have parts of both"
    ):
        fp8_blocks(
            str(tmp_path),
            SimpleNamespace(quantization_config=config.quantization_config | {"weight_block_size": [16, 32]}),
        )
    save_file({"w": torch.zeros(4, 4).to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    with pytest.raises(ManifestError, match="w is stored in F8_E5M2"):
        fp8_blocks(str(tmp_path), config)


def test_values_that_loaders_would_cast_without_scales_are_refused(tmp_path: Path) -> None:
    config = checkpoint(tmp_path)
    expected = ExpectedTensors(str(tmp_path), config)
    tensors = {"q.weight": matrix(48, 64), "norm.weight": torch.ones(64)}
    specs = stored_specs((spec_of(*item) for item in tensors.items()), {"q.weight": BLOCKS})
    expected.check(Manifest(1, specs))
    for number, dtype in ((0, "bfloat16"), (0, "float8_e5m2"), (1, "bfloat16")):
        wrong = list(specs)
        wrong[number] = TensorSpec(specs[number].name, dtype, specs[number].shape)
        with pytest.raises(ManifestError, match=rf"comes as {dtype} .* not float"):
            expected.check(Manifest(1, tuple(wrong)))
    with pytest.raises(ManifestError, match=r"q\.weight_scale_inv is missing"):
        expected.check(Manifest(1, tuple(spec_of(*item) for item in tensors.items())))
