"""twinkle's MegatronModel in fp32 on the CPU gives transformers' losses and gradient norms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("twinkle.model", reason="no twinkle here: bash scripts/test_integrations.sh twinkle")

import sys

from twinkle_runs import FOLDER, launched, run

from megascend.testing import write_tiny_checkpoint

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("twinkle")
    write_tiny_checkpoint(directory / "model", "qwen3")
    run([sys.executable, str(FOLDER / "reference_steps.py"), "model", "reference.json"], directory)
    return directory


@pytest.mark.parametrize(
    ("dp", "tp", "pp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["1", "DP2", "TP2", "PP2"]
)
def test_losses_and_norms_are_those_of_transformers(folder: Path, dp: int, tp: int, pp: int) -> None:
    program = [str(FOLDER / "twinkle_sft.py"), "model", str(dp), str(tp), str(pp), "out.json"]
    run(launched(dp * tp * pp, *program), folder)
    steps, expected = (json.loads((folder / name).read_text()) for name in ("out.json", "reference.json"))
    assert len(steps) == len(expected) == 4
    for (loss, norm), (reference, reference_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(reference, rel=1e-5)
        assert norm == pytest.approx(reference_norm, rel=1e-4)


def test_without_mending_one_rank_has_a_norm_that_is_too_large_by_the_tokens(folder: Path) -> None:
    """Check what docs/integrations/twinkle.md says of unpatched twinkle. If this fails, twinkle has fixed it: update the docs."""
    program = folder / "bf16.py"
    source = (
        (FOLDER / "twinkle_sft.py")
        .read_text()
        .replace('mixed_precision="no"', 'mixed_precision="bf16", use_distributed_optimizer=False')
    )
    program.write_text(source)
    run(launched(1, "--as-it-is", str(program), "model", "1", "1", "1", "as_it_is.json"), folder)
    steps, expected = (json.loads((folder / name).read_text()) for name in ("as_it_is.json", "reference.json"))
    tokens = sum(n - 1 for n in (17, 9, 24, 12))
    assert steps[0][1] == pytest.approx(tokens * expected[0][1], rel=0.03)
