"""The five-minute start of docs/integrations/megatron.md, run verbatim and compared with transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Not importorskip: mcore-bridge imports Transformer Engine, which the page's program has from megascend.
if importlib.util.find_spec("mcore_bridge") is None:
    pytest.skip("no mcore-bridge: bash scripts/test_integrations.sh bridges", allow_module_level=True)

from safetensors.torch import load_file

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
DEADLINE_S = 900

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def run(command: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "PATH": programs, "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    return completed.stdout


def test_the_five_minute_start(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "integrations" / "megatron.md").read_text(encoding="utf-8")
    page = text.partition("## megatron-bridge and mcore-bridge\n")[2]
    section = page[page.index("## Five-minute start") : page.index("## megatron-bridge")]
    script = "set -e\n" + "\n".join(re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    output = run(["bash", "-c", script], tmp_path)
    expected = json.loads(run([sys.executable, str(FOLDER / "reference_loop.py"), "model", "reference"], tmp_path))
    pairs = [(float(loss), float(norm)) for loss, norm in re.findall(r"loss ([\d.]+) norm ([\d.]+)", output)]
    assert len(pairs) == 2 * len(expected)  # two ranks
    for (loss, norm), (reference, reference_norm) in zip(sorted(pairs), sorted([*expected, *expected]), strict=True):
        assert loss == pytest.approx(reference, rel=1e-5)
        assert norm == pytest.approx(reference_norm, rel=1e-4)
    trained = load_file(tmp_path / "reference" / "model.safetensors")
    exported = {}
    for file in (tmp_path / "by_mcore_bridge").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == trained.keys()
    for name, tensor in trained.items():
        assert (exported[name].float() - tensor).abs().max() < 1e-5, name
