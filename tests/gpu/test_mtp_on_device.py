"""Heads for multi-token prediction on a GPU, against the plain one that transformers' layers compute on the CPU in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascend.testing import run_distributed
from megascend.testing.parity import Case
from support.prediction_head import checkpoint_with_head, compare, plain_run, train_head

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
LOSS_BOUND, NORM_BOUND = 0.15, 0.3
"""In bf16, after the first step, where routing flips: absolute, and relative."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.mark.parametrize("arch", FAMILIES)
def test_head_in_fp32_trains_like_a_plain_one(arch: str, folder: Path, tmp_path: Path) -> None:
    case = Case("padded", packing=False, micro_batch_tokens=200)
    checkpoint = checkpoint_with_head(folder, arch)
    (run,) = run_distributed(train_head, 1, case, checkpoint, tmp_path, init=False, timeout_s=240, platform="cuda")
    compare(run, folder, checkpoint)


@pytest.mark.parametrize("arch", FAMILIES)
def test_head_in_bf16_trains_like_a_plain_one(arch: str, folder: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_with_head(folder, arch)
    (run,) = run_distributed(
        train_head,
        1,
        Case("packed", precision="bf16"),
        checkpoint,
        tmp_path,
        init=False,
        timeout_s=240,
        platform="cuda",
    )
    expected, rounded = plain_run(folder, checkpoint, weights=True), plain_run(folder, checkpoint, dtype="bfloat16")
    rounding = max(float((expected[figure] - rounded[figure])[0].abs()) for figure in ("losses", "mtp_losses"))
    for figure in ("losses", "mtp_losses"):
        differences = (torch.tensor(getattr(run, figure), dtype=torch.float64) - expected[figure]).abs()
        print(f"{arch}, {figure}: {float(differences.max()):.1e}")
        assert float(differences[0]) < 3 * rounding, (figure, differences, rounding)
        assert float(differences.max()) < LOSS_BOUND, (figure, differences)
    ratios = torch.tensor(run.grad_norms, dtype=torch.float64) / expected["grad_norms"]
    print(f"{arch}, grad_norms: {float((ratios - 1).abs().max()):.1e}")
    assert float((ratios - 1).abs().max()) < NORM_BOUND, ratios
