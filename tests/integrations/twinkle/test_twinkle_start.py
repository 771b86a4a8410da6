"""The five-minute start of docs/integrations/twinkle.md, run verbatim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("twinkle.model", reason="no twinkle here: bash scripts/test_integrations.sh twinkle")

from twinkle_runs import ROOT, run

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def test_the_five_minute_start(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "integrations" / "twinkle.md").read_text(encoding="utf-8")
    section = page[page.index("## Five-minute start") : page.index("## What the launcher does")]
    script = "set -e\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    output = run(["bash", "-c", script], tmp_path)
    assert "megascend mends" in output
    losses = [float(value) for value in re.findall(r"step \d loss ([\d.]+)", output)]
    assert len(losses) == 2 * 8
    assert losses[-1] < 0.95 * losses[0]
    assert list((tmp_path / "out" / "trained").rglob("adapter_config.json"))
