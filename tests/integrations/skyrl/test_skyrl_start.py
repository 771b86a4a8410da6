"""The five-minute start of docs/integrations/skyrl.md, run verbatim except for the port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip(
    "skyrl.tinker.engine", reason="no SkyRL here: bash scripts/test_integrations.sh skyrl", exc_type=ImportError
)

from skyrl_server import free_port

from support.integration_programs import page_blocks, run

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def test_the_five_minute_start(tmp_path: Path) -> None:
    blocks = "\n".join(page_blocks("skyrl", "## Five-minute start", "| `--backend-config` |"))
    # the page's own kill ends the server; this one, if a step before it fails
    script = "set -e\ntrap 'kill $SERVER 2> /dev/null || true' EXIT\n" + blocks.replace("8000", str(free_port()))
    output = run(["bash", "-c", script], tmp_path)
    for name in ("ann", "bob"):
        losses = [float(value) for value in re.findall(rf"{name} step \d loss ([\d.]+)", output)]
        assert len(losses) == 8
        assert losses[-1] < 0.9 * losses[0]
    assert "models 2" in output
    assert "ann says" in output
