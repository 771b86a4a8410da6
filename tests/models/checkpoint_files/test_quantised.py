"""Quantised checkpoints: what is read of them, in whole and in parts, and what engines train and export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megascend.config import Parallel
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import TensorHeader, tensor_headers
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.checkpoint_files.quantised import QuantisedHeader, dequantised_headers, read_tensor
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend, case_checkpoint, causal_samples, token_lists

BLOCK = (16, 24)


def quantised_fp8(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """Return e4m3 values, a factor for each block, and in float64 what they stand for."""
    rows, columns = weight.shape
    values, exact = (
        torch.zeros(rows, columns, dtype=torch.float8_e4m3fn),
        torch.zeros(rows, columns, dtype=torch.float64),
    )
    scales = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[part].abs().max() / 448
            values[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[part] = values[part].double() * scales[i, j].double()
    return values, scales, exact


@pytest.fixture(scope="module")
def fp8(parity_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny DeepSeek-V3 with blocks of fp8 as its authors store them, and the same weights in bf16."""
    source, folder = case_checkpoint(parity_folder, "deepseek_v3"), tmp_path_factory.mktemp("fp8")
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".layers." in name and tensor.dim() == 2 and "gate.weight" not in name:
            stored[name], stored[f"{name}_scale_inv"], exact = quantised_fp8(tensor)
            plain[name] = exact.bfloat16()
        else:
            stored[name] = plain[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    quantised = config | {
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    }
    for path, tensors, settings in ((folder / "fp8", stored, quantised), (folder / "bf16", plain, config)):
        path.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder / "fp8", folder / "bf16"


@pytest.fixture(scope="module")
def mxfp4(parity_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny gpt-oss with experts in MXFP4, and the same weights in bf16 as transformers dequantises them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source, folder = case_checkpoint(parity_folder, "gpt_oss"), tmp_path_factory.mktemp("mxfp4")
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            plain[name] = convert_moe_packed_tensors(blocks, scales).bfloat16()
            assert plain[name].shape == tensor.shape
        else:
            stored[name] = plain[name] = tensor.bfloat16()
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    for path, tensors, settings in (
        (folder / "mxfp4", stored, config | {"quantization_config": {"quant_method": "mxfp4"}}),
        (folder / "bf16", plain, config),
    ):
        path.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder / "mxfp4", folder / "bf16"


GROUP = 16


@pytest.fixture(scope="module")
def int4(parity_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Kimi-K2.5 with a tower and experts in INT4 as its authors store them, and the same weights in bf16."""
    source, folder = case_checkpoint(parity_folder, "kimi_k25"), tmp_path_factory.mktemp("int4")
    generator = torch.Generator().manual_seed(0)
    tower = {"vision_tower.encoder.final_layernorm.weight": (32,), "mm_projector.proj.0.weight": (128, 128)}
    stored = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in tower.items()}
    plain = dict(stored)
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." not in name:
            stored[name] = plain[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
            continue
        rows, columns = tensor.shape
        codes = torch.randint(-8, 8, (rows, columns), generator=generator)
        scales = (0.02 * torch.rand(rows, columns // GROUP, generator=generator)).bfloat16()
        words = sum((codes[:, place::8] + 8) * 16**place for place in range(8))
        stored[f"{name}_packed"] = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
        stored[f"{name}_scale"], stored[f"{name}_shape"] = scales, torch.tensor([rows, columns])
        plain[name] = (codes.double() * scales.double().repeat_interleave(GROUP, dim=1)).bfloat16()
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    text = config["text_config"] | {"quantization_config": settings}
    for path, tensors, content in (
        (folder / "int4", stored, config | {"text_config": text}),
        (folder / "bf16", plain, config),
    ):
        path.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "int4", folder / "bf16"


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "int4"])
def test_every_tensor_is_read_in_whole_and_in_parts(kind: str, request: pytest.FixtureRequest) -> None:
    quantised, plain = request.getfixturevalue(kind)
    info, expected = inspect_checkpoint(quantised), load_file(plain / "model.safetensors")
    expected = {name: tensor for name, tensor in expected.items() if name not in info.extra}
    assert info.quantised == kind
    assert info.parameter_count == sum(tensor.numel() for tensor in expected.values())
    assert info.tensors.keys() == expected.keys()
    files: dict[Path, Any] = {}
    for name, header in info.tensors.items():
        tensor = read_tensor(name, header, files)
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
        assert header.shape == tuple(tensor.shape)
        if isinstance(header, QuantisedHeader):
            index = tuple(slice(size // 3, size - size // 4) for size in header.shape)
            for part in (index, index[:1], (slice(0, 1),), (slice(None), *index[1:])):
                assert torch.equal(read_tensor(name, header, files, part), expected[name][part]), (name, part)


@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("fp8", Parallel()),
        ("mxfp4", Parallel(expert=2)),
        ("int4", Parallel()),
        pytest.param("fp8", Parallel(tensor=2, expert=2, expert_tensor=1), marks=pytest.mark.nightly),
    ],
)
def test_it_trains_as_its_dequantised_copy_and_exports_bf16(
    kind: str, layout: Parallel, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    quantised, plain = request.getfixturevalue(kind)

    def on_rank(checkpoint: Path) -> list[float]:
        with case_backend(Case("case", parallel=layout, precision="bf16"), checkpoint) as backend:
            samples = backend.shard(causal_samples(token_lists()))
            backend.export_hf(tmp_path / checkpoint.name)
            return [backend.forward_backward(samples).loss, backend.optimizer_step().grad_norm]

    size = max(layout.tensor, layout.expert)
    runs = [run_distributed(on_rank, size, checkpoint, init=False, timeout_s=120) for checkpoint in (quantised, plain)]
    assert runs[0] == runs[1]
    exported, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / kind, plain))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((tmp_path / kind / "config.json").read_text(encoding="utf-8"))


def test_unknown_method_is_refused_by_name(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    model = shutil.copytree(fp8[0], tmp_path / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="quant_method 'awq' is not read"):
        inspect_checkpoint(model)


@pytest.mark.parametrize("change", [{"symmetric": False}, {"num_bits": 8}, {"actorder": "group"}, {"group_size": 12}])
def test_other_groups_of_integers_are_refused(change: dict[str, Any], int4: tuple[Path, Path]) -> None:
    config = json.loads((int4[0] / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(CheckpointError, match="quant_method 'compressed-tensors' is not read"):
        dequantised_headers(tensor_headers(int4[0]), config, int4[0])


def test_scales_that_do_not_fit_are_refused(fp8: tuple[Path, Path]) -> None:
    config = json.loads((fp8[0] / "config.json").read_text(encoding="utf-8"))
    headers = tensor_headers(fp8[0])
    name = next(name for name in headers if name.endswith("_scale_inv"))
    with pytest.raises(CheckpointError, match=r"has shape \[1, 1\]; .* needs \["):
        dequantised_headers(headers | {name: TensorHeader("F32", (1, 1))}, config, fp8[0])
    baseline = {key: header for key, header in headers.items() if key != name}
    with pytest.raises(CheckpointError, match="is stored in F8_E4M3 without scales"):
        dequantised_headers(baseline, config, fp8[0])
