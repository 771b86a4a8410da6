"""The two phases of MindSpeed's bootstrap: order, arguments, side effects, repatching, cost."""

from __future__ import annotations

import json
import re

import pytest

FIRST = {
    "megatron.core": ("import megatron.core", "megatron.core"),
    "mcore_bridge without Transformer Engine": (
        "try:\n    import mcore_bridge\nexcept ModuleNotFoundError:\n    pass",
        "megatron.core",
    ),
    "transformer_engine": (
        "from megascend.reference import te; te.install(force=True)",
        "transformer_engine",
    ),
    "MindSpeed's adaptor": ("from mindspeed import megatron_adaptor", "megatron.core, transformer_engine"),
}

REFUSED = """
import json, sys
{first}
import torch
before = torch.distributed.all_reduce, torch.compile
loaded = set(sys.modules)
import megascend
try:
    megascend.bootstrap("npu", engine="megatron")
except megascend.ImportOrderError as error:
    new = sorted(name for name in set(sys.modules) - loaded if name.startswith("mindspeed"))
    untouched = before == (torch.distributed.all_reduce, torch.compile)
    print(json.dumps({{"message": str(error), "untouched": untouched, "new": new}}))
"""


@pytest.mark.nightly_cases(
    "megatron.core",  # covered: runtime/bootstrap/test_import_order.py; MindSpeed's adaptor
    "mcore_bridge without Transformer Engine",  # covered: runtime/bootstrap/test_import_order.py
)
@pytest.mark.parametrize(("first", "named"), [pytest.param(*values, id=name) for name, values in FIRST.items()])
def test_wrong_import_order_is_refused_before_patching(first, named, run_python):
    completed = run_python(REFUSED.format(first=first), huggingface="mcore_bridge" in first)
    report = json.loads(completed.stdout.splitlines()[-1])
    assert re.split(" (?:was |were )?imported before", report["message"])[0] == named
    assert "megascend.bootstrap()" in report["message"]
    assert report["untouched"]
    assert "mindspeed.megatron_adaptor" not in report["new"]


AFTER = """
import json, logging, sys
sys.argv = ["train.py", "--hidden-dropout", "0.5", "--optimization-level", "3", "-h"]
import transformers, peft  # before the bootstrap: no problem
handler = logging.StreamHandler(sys.stderr)
logging.getLogger().addHandler(handler)
logging.getLogger().setLevel(logging.ERROR)
import megascend
runtime = megascend.bootstrap("npu", engine="megatron")
runtime.load_megatron()
import torch
from megatron.core import jit
from megatron.core.extensions import transformer_engine as extensions
from megatron.core.transformer.transformer_config import TransformerConfig
from megascend.runtime.bootstrap.mindspeed import verification
config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
print(json.dumps({
    "argv": sys.argv,
    "handlers_kept": logging.getLogger().handlers == [handler], "level": logging.getLogger().level,
    "hidden_dropout": config.hidden_dropout,
    "have_te": extensions.HAVE_TE,
    "attention": extensions.TEDotProductAttention.__module__.split(".")[0],
    "level_of_optimization": config.optimization_level,
    "changes": runtime.changes,
    "platform": runtime.platform.name, "stack": runtime.stack.name,
}))
"""


@pytest.fixture(scope="module")
def after(run_python):
    """Bootstrap in a process whose command line and logging would mislead MindSpeed."""
    completed = run_python(AFTER, huggingface=True)
    return json.loads(completed.stdout.splitlines()[-1]) | {"stdout": completed.stdout}


def test_command_line_is_not_parsed_or_changed(after):
    assert after["argv"] == ["train.py", "--hidden-dropout", "0.5", "--optimization-level", "3", "-h"]
    assert after["hidden_dropout"] == 0.1  # Megatron's default, a number
    assert after["level_of_optimization"] == 0
    assert "usage:" not in after["stdout"]


def test_root_logging_is_unchanged(after):
    assert after["handlers_kept"]
    assert after["level"] == 40


def test_megatron_uses_mindspeeds_layers(after):
    assert after["have_te"] is True
    assert after["attention"] == "mindspeed"


def test_changes_are_reported(after):
    changes = " ".join(after["changes"])
    for change in ("sys.argv not read", "torch.compile", "dummy transformer_engine", "HCCL_IF_BASE_PORT="):
        assert change in changes


FLOAT64 = """
import torch, torch.distributed as dist, megascend
megascend.bootstrap("npu", engine="megatron")
import tempfile, os
from megascend.testing.distributed import run_distributed
def rank():
    number = torch.tensor([1.0 + dist.get_rank()], dtype=torch.float64)
    dist.all_reduce(number)
    from torch.distributed import distributed_c10d
    other = torch.tensor([2.0], dtype=torch.float64)
    distributed_c10d.all_reduce(other)
    return number.item(), other.item()
print(run_distributed(rank, 2, backend="gloo"))
def on_npu():
    try:
        dist.all_reduce(torch.ones(1, dtype=torch.float64, device="npu"))
    except megascend.PlatformError as error:
        return str(error)
print(run_distributed(on_npu, 2, backend="hccl")[0])
"""


def test_all_reduce_of_float64_works_on_cpu_and_is_refused_on_npu(run_python):
    lines = run_python(FLOAT64).stdout.strip().splitlines()
    assert lines[-2] == "[(3.0, 4.0), (3.0, 4.0)]"
    assert "HCCL has no float64" in lines[-1]
