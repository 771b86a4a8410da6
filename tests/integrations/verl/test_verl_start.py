"""The five-minute start of docs/integrations/verl.md, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

from verl_runs import DEADLINE_S, ROOT, environment

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def test_the_five_minute_start(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "integrations" / "verl.md").read_text(encoding="utf-8")
    section = page[page.index("## Five-minute start") : page.index("## How it is found")]
    script = "set -e\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "verl's engine is megascend" in done.stdout
    losses = [float(value) for value in re.findall(r"train/loss:([\d.]+)", done.stdout)]
    assert len(losses) == 12
    assert losses[-1] < 0.5 * losses[0]
    assert (tmp_path / "checkpoints" / "global_step_12" / "megascend").is_dir()
