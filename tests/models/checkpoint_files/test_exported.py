"""Required tensors of an export, on plain data."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.models.checkpoint_files.exported import (
    FusedPart,
    differences,
    fused_part,
)
from megascend.models.checkpoint_files.files import TensorHeader

SOURCE = {
    "model.embed_tokens.weight": TensorHeader("BF16", (8, 4), Path("model.safetensors")),
    "model.layers.0.mlp.gate.e_score_correction_bias": TensorHeader("F32", (2,)),
    "lm_head.weight": TensorHeader("BF16", (8, 4)),
}


def exported(**changes: TensorHeader | None) -> dict[str, TensorHeader]:
    headers = {name: TensorHeader(header.dtype, header.shape) for name, header in SOURCE.items()}
    for name, header in changes.items():
        full = next((candidate for candidate in headers if name in candidate), name)
        headers.pop(full, None)
        if header is not None:
            headers[full] = header
    return headers


@pytest.mark.parametrize(
    ("changes", "dtype", "expected"),
    [
        ({}, "BF16", None),
        ({"lm_head": None}, "BF16", "it lacks lm_head.weight"),
        ({"new": TensorHeader("BF16", (1,))}, "BF16", "it would have new, which the source has not"),
        ({"lm_head": TensorHeader("BF16", (8, 5))}, "BF16", "lm_head.weight [8, 5] instead of [8, 4]"),
        ({"lm_head": TensorHeader("F32", (8, 4))}, "BF16", "lm_head.weight F32 instead of BF16"),
        ({}, "F16", "model.embed_tokens.weight BF16 instead of F16, lm_head.weight BF16 instead of F16"),
        ({"correction": TensorHeader("BF16", (2,))}, "BF16", None),
    ],
)
def test_differences_are_named(changes, dtype, expected):
    messages = differences(SOURCE, exported(**changes), dtype)
    assert not messages if expected is None else expected in "; ".join(messages)


def test_fused_part_requires_the_fused_tensor_in_the_source():
    fused, separate = "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    assert fused_part(separate, {fused}) == FusedPart(fused, None, "gate")
    assert fused_part(separate.replace("gate", "up"), {fused}) == FusedPart(fused, None, "up")
    assert fused_part(separate, {separate}) is None
    assert fused_part(separate, {"model.layers.1.mlp.gate_up_proj.weight"}) is None
    assert fused_part("model.layers.0.mlp.gate.weight", {fused}) is None


def test_fused_part_of_an_expert_names_its_number_and_half():
    experts = "model.layers.0.mlp.experts"
    fused = {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
    assert fused_part(f"{experts}.3.gate_proj.weight", fused) == FusedPart(f"{experts}.gate_up_proj", 3, "gate")
    assert fused_part(f"{experts}.12.up_proj.weight", fused) == FusedPart(f"{experts}.gate_up_proj", 12, "up")
    assert fused_part(f"{experts}.0.down_proj.weight", fused) == FusedPart(f"{experts}.down_proj", 0, None)
    assert fused_part(f"{experts}.0.down_proj.weight", {f"{experts}.0.down_proj.weight"}) is None
    assert fused_part(f"{experts}.0.down_proj.weight", {f"{experts}.gate_up_proj"}) is None
