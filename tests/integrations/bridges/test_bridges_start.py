"""The five-minute start of docs/integrations/megatron.md, run verbatim and compared with transformers."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

# Not importorskip: mcore-bridge imports Transformer Engine, which the page's program has from megascend.
if importlib.util.find_spec("mcore_bridge") is None:
    pytest.skip("no mcore-bridge: bash scripts/test_integrations.sh bridges", allow_module_level=True)

from safetensors.torch import load_file

from support.exported import exported_tensors
from support.integration_programs import page_blocks, run

FOLDER = Path(__file__).parent

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def test_the_five_minute_start(tmp_path: Path) -> None:
    blocks = page_blocks("megatron", "### Five-minute start with a bridge", "### megatron-bridge")
    output = run(["bash", "-c", "set -e\n" + "\n".join(blocks)], tmp_path)
    expected = json.loads(run([sys.executable, str(FOLDER / "reference_loop.py"), "model", "reference"], tmp_path))
    pairs = [(float(loss), float(norm)) for loss, norm in re.findall(r"loss ([\d.]+) norm ([\d.]+)", output)]
    assert len(pairs) == 2 * len(expected)  # two ranks
    for (loss, norm), (reference, reference_norm) in zip(sorted(pairs), sorted([*expected, *expected]), strict=True):
        assert loss == pytest.approx(reference, rel=1e-5)
        assert norm == pytest.approx(reference_norm, rel=1e-4)
    trained = load_file(tmp_path / "reference" / "model.safetensors")
    exported = exported_tensors(tmp_path / "by_mcore_bridge")
    assert exported.keys() == trained.keys()
    for name, tensor in trained.items():
        assert (exported[name].float() - tensor).abs().max() < 1e-5, name
