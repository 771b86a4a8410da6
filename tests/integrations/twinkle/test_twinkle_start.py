"""The five-minute start of docs/integrations/twinkle.md, run verbatim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("twinkle.model", reason="no twinkle here: bash scripts/test_integrations.sh twinkle")

from twinkle_runs import run

from support.integration_programs import page_blocks

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def test_the_five_minute_start(tmp_path: Path) -> None:
    blocks = page_blocks("twinkle", "## Five-minute start", "## What the launcher does")
    output = run(["bash", "-c", "set -e\n" + "\n".join(blocks)], tmp_path)
    assert "megascend patches twinkle" in output
    losses = [float(value) for value in re.findall(r"step \d loss ([\d.]+)", output)]
    assert len(losses) == 2 * 8
    assert losses[-1] < 0.95 * losses[0]
    assert list((tmp_path / "out" / "trained").rglob("adapter_config.json"))
