"""megatron-bridge under ``megascend run``, against transformers: docs/integrations/megatron.md, logits, an example of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

# Not importorskip: it imports Megatron-Core, which the programs have from `megascend run`.
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("no megatron-bridge: bash scripts/test_integrations.sh megatron_bridge", allow_module_level=True)

import torch
from torch import Tensor

from support.exported import exported_tensors
from support.integration_programs import page_blocks, run

FOLDER = Path(__file__).parent
REFERENCE_LOOP = FOLDER.parent / "bridges" / "reference_loop.py"
CHECKOUT = os.environ.get("MEGASCEND_MEGATRON_BRIDGE", "")

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def new_model(folder: Path, name: str, arch: str) -> None:
    run(["megascend", "new-model", name, "--arch", arch, "--hidden", "64", "--layers", "2"], folder)


def assert_equal(exported: dict[str, Tensor], imported: dict[str, Tensor]) -> None:
    assert imported
    assert exported.keys() == imported.keys()
    for name, tensor in imported.items():
        assert torch.equal(exported[name], tensor), name


def test_the_start_of_the_page(tmp_path: Path) -> None:
    new_model, *_ = page_blocks("megatron", "### Five-minute start with a bridge", "### megatron-bridge")
    blocks = page_blocks("megatron", "### megatron-bridge", "### What to know")
    output = run(["bash", "-c", "\n".join(["set -e", new_model, *blocks])], tmp_path)
    assert_equal(exported_tensors(tmp_path / "as_it_came"), exported_tensors(tmp_path / "model"))
    expected = json.loads(run([sys.executable, str(REFERENCE_LOOP), "model", "reference"], tmp_path))
    pairs = [(float(loss), float(norm)) for loss, norm in re.findall(r"loss ([\d.]+) norm ([\d.]+)", output)]
    assert len(pairs) == 2 * len(expected)  # two ranks
    for (loss, norm), (reference, reference_norm) in zip(sorted(pairs), sorted([*expected, *expected]), strict=True):
        assert loss == pytest.approx(reference, rel=1e-5)
        assert norm == pytest.approx(reference_norm, rel=1e-4)
    exported, trained = exported_tensors(tmp_path / "by_megatron_bridge"), exported_tensors(tmp_path / "reference")
    assert exported.keys() == trained.keys()
    for name, tensor in trained.items():
        assert (exported[name].float() - tensor).abs().max() < 1e-5, name


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_logits_are_transformers(arch: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    new_model(tmp_path, "model", arch)
    tokens = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, tmp_path / "tokens.pt")
    command = [sys.executable, str(FOLDER / "logits.py"), "model", "tokens.pt", "logits.pt"]
    run(["megascend", "run", "--platform", "cpu", "--", *command], tmp_path)
    logits = torch.load(tmp_path / "logits.pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(tokens).logits
    assert expected.abs().max() > 0.1
    assert (logits[..., : expected.shape[-1]] - expected).abs().max() < 1e-5


@pytest.mark.skipif(not CHECKOUT, reason="set MEGASCEND_MEGATRON_BRIDGE to a checkout of Megatron-Bridge (tag v0.3.1)")
def test_bridge_round_trip_example_preserves_weights(tmp_path: Path) -> None:
    new_model(tmp_path, "model", "llama")
    example = str(Path(CHECKOUT) / "examples" / "conversion" / "hf_megatron_roundtrip.py")
    program = [sys.executable, example, "--hf-model-id", "model", "--output-dir", "out"]
    run(["megascend", "run", "--platform", "cpu", "--", *program], tmp_path)
    assert_equal(exported_tensors(tmp_path / "out" / "model"), exported_tensors(tmp_path / "model"))
