"""The memory estimate against peaks of real training steps on the CPU: bytes of all tensors (scripts/measure_memory.py)."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megascend.testing import run_distributed, write_tiny_checkpoint
from support.covering import first_stack_required
from support.prediction_head import add_prediction_head

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_memory.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure_memory"] = module  # dataclasses look for it
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


@pytest.fixture(scope="module")
def models(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("memory")
    for experts, shape in ((False, script.SMALL), (True, script.SMALL | script.SMALL_EXPERTS)):
        (folder / str(experts)).mkdir()
        script.write_checkpoint(script.Work(shape, "cpu", "bf16", 1, 1, 0, 0, 0.0, 1), folder / str(experts))
    return {experts: folder / str(experts) for experts in (False, True)}


@pytest.mark.parametrize("name", ["moe", "lora", "tp2 sequence", "dp2"])
def test_the_estimate_is_close_to_the_peak(megatron_imported, script: ModuleType, models: dict[bool, Path], name: str):
    case = script.CASES[name]
    model = models[case.experts]
    expected = script.estimate_of(case, "cpu", model)
    ranks = run_distributed(script.measure, case.ranks, case, "cpu", model, init=False)
    peak = max(rank.peak for rank in ranks)
    assert script.LOWEST <= expected.tensors / peak - 1 <= script.HIGHEST, (expected.items, peak)


LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 96,
    "torch_dtype": "bfloat16",
}


HEADS = {"one process": "packed", "recomputed": "recomputed", "stages": "pp2", "tensor parallel": "tp2 sequence"}


@pytest.mark.parametrize("name", ["packed", pytest.param("dense", marks=pytest.mark.nightly), "lora", "tp2"])
def test_estimate_of_latent_attention_is_close_to_the_peak(
    megatron_imported, script: ModuleType, tmp_path_factory: pytest.TempPathFactory, name: str
):
    sizes = {name: script.SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    model = tmp_path_factory.mktemp("latent") / "model"
    write_tiny_checkpoint(model, "deepseek_v3", max_position_embeddings=4096, **sizes, **LATENT)
    case = script.CASES[name]
    expected = script.estimate_of(case, "cpu", model)
    ranks = run_distributed(script.measure, case.ranks, case, "cpu", model, init=False)
    peak = max(rank.peak for rank in ranks)
    assert script.LOWEST <= expected.tensors / peak - 1 <= script.HIGHEST, (expected.items, peak)
    assert not any("MLA" in remark for remark in expected.remarks)


@first_stack_required
@pytest.mark.parametrize(
    "settings", [name if name == "stages" else pytest.param(name, marks=pytest.mark.nightly) for name in HEADS]
)
def test_estimate_counts_a_prediction_head(
    megatron_imported, script: ModuleType, tmp_path_factory: pytest.TempPathFactory, settings: str
):
    sizes = {name: script.SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    folder = tmp_path_factory.mktemp("head")
    source = write_tiny_checkpoint(
        folder / "source", "deepseek_v3", max_position_embeddings=4096, num_hidden_layers=3, **sizes, **LATENT
    )
    model = add_prediction_head(source, folder / "model")
    expected, peaks = {}, {}
    for mtp in ("keep", "train"):
        case = script.CASES[HEADS[settings]]
        case = dataclasses.replace(case, settings=case.settings | {"mtp": mtp})
        expected[mtp] = script.estimate_of(case, "cpu", model).tensors
        ranks = run_distributed(script.measure, case.ranks, case, "cpu", model, init=False)
        peaks[mtp] = max(rank.peak for rank in ranks)
    assert script.LOWEST <= expected["train"] / peaks["train"] - 1 <= script.HIGHEST, (expected, peaks)
    extra = (expected["train"] - expected["keep"]) / (peaks["train"] - peaks["keep"])
    assert script.LOWEST <= extra - 1 <= script.HIGHEST, (expected, peaks)


@pytest.mark.nightly
def test_every_case_of_every_engine(tmp_path: Path):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(tmp_path / "found.json")],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr[-3000:]
    results = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert {"dense", "fsdp moe", "single lora", "pp2"} <= results.keys()
