"""The names by which router replay depends on vLLM, in a real one: its setting, and the field of its outputs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from driving import ROOT, vllm_python

from megascend.testing.tiny_models import write_tiny_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]

PROGRAM = """
import dataclasses, json, sys
from types import SimpleNamespace
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import CompletionOutput
from weightwire.vllm.contract import returns_routed_experts, routed_experts

def returns(**options):
    arguments = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", **options)
    try:
        config = arguments.create_engine_config()
    except ValueError as error:  # 0.32 refuses the option on a CPU
        if "Model Runner V2" not in str(error):
            raise
        config = SimpleNamespace(aux_output_config=arguments.aux_output_config)
    return returns_routed_experts(config)

output = CompletionOutput(0, "", [1], None, None)
print("result:", json.dumps({
    "on": returns(enable_return_routed_experts=True),
    "off": returns(),
    "field": "routed_experts" in {field.name for field in dataclasses.fields(CompletionOutput)},
    "default": routed_experts(output),
}))
"""


def test_setting_and_field_have_the_names_that_weightwire_reads(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3_moe", head_dim=32)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    completed = subprocess.run(
        [vllm_python(), "-c", PROGRAM, checkpoint], capture_output=True, text=True, env=environment, timeout=300
    )
    lines = [line for line in completed.stdout.splitlines() if line.startswith("result: ")]
    assert lines, completed.stderr[-3000:]
    assert json.loads(lines[0].removeprefix("result: ")) == {"on": True, "off": False, "field": True, "default": None}
