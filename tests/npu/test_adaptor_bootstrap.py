"""The bootstrap with MegatronAdaptor: order of imports, the command line, what is completed and verified, late imports."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from support.ascend_packages import WITHOUT_EXPERTS, package_folders

LATE = {
    "megatron.core": ("import megatron.core", "megatron.core, transformer_engine"),
    "transformer_engine": ("import transformer_engine", "transformer_engine"),
    "peft, which looks for Transformer Engine": ("__import__('peft')", "transformer_engine"),
    "mcore_bridge": ("import mcore_bridge", "megatron.core, transformer_engine, mcore_bridge"),
    "megatron_adaptor": ("import megatron_adaptor", "megatron_adaptor, megatron.core, transformer_engine"),
}
REFUSED = """
import json, sys
{first}
import torch
before = torch.distributed.all_reduce, torch.cuda.current_device
import megascend
try:
    megascend.bootstrap("npu", engine="megatron")
except megascend.ImportOrderError as error:
    untouched = before == (torch.distributed.all_reduce, torch.cuda.current_device)
    print(json.dumps({{"message": str(error), "untouched": untouched, "adaptor": "megatron_adaptor" in sys.modules}}))
"""


@pytest.mark.difference_cases("peft, *")  # differs: peft imports the NPU's transformer_engine: order of imports
@pytest.mark.parametrize("first", LATE)
def test_late_import_is_refused_before_patching(first: str, run_python) -> None:
    code, imported_packages = LATE[first]
    report = json.loads(run_python(REFUSED.format(first=code)).stdout.splitlines()[-1])
    assert re.split(" (?:was|were) imported before", report["message"])[0] == imported_packages
    assert "megascend.bootstrap()" in report["message"]
    assert report["untouched"]
    assert report["adaptor"] == (first == "megatron_adaptor")


AFTER = """
import contextlib, json, logging, sys
sys.argv = ["train.py", "--transformer-impl", "local", "--optimization-level", "7", "--hidden-dropout", "0.5", "-h"]
import transformers  # before the bootstrap: no problem
handler = logging.StreamHandler(sys.stderr)
logging.getLogger().addHandler(handler)
logging.getLogger().setLevel(logging.ERROR)
from megascend.runtime.bootstrap.import_hooks import around_import
order = ["torch_npu"] if "torch_npu" in sys.modules else []
def watch(name):
    @contextlib.contextmanager
    def block(module):
        order.append(name)
        yield
    around_import(name, block)
for name in ("megatron_adaptor", "transformer_engine", "megatron.core", "mindspeed", "mcore_bridge"):
    watch(name)
import megascend
runtime = megascend.bootstrap("npu", engine="megatron")
runtime.load_megatron()
import torch
from megatron.core.extensions import transformer_engine as extensions
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig
import transformer_engine, megatron_adaptor
from megatron_adaptor.utils.args_utils import get_mindspeed_args
config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
torch.npu.manual_seed(5)
state = random._get_cuda_rng_state()
first = torch.rand(3, device="npu").tolist()
random._set_cuda_rng_state(state)
print(json.dumps({
    "argv": sys.argv, "order": order,
    "handlers_kept": logging.getLogger().handlers == [handler], "level": logging.getLogger().level,
    "hidden_dropout": config.hidden_dropout, "arguments": vars(get_mindspeed_args()),
    "have_te": extensions.HAVE_TE, "te_checkpoint": hasattr(extensions, "te_checkpoint"),
    "attention": issubclass(extensions.TEDotProductAttention, transformer_engine.pytorch.DotProductAttention),
    "same_device": torch.cuda.current_device() == torch.npu.current_device(),
    "same_numbers": torch.rand(3, device="npu").tolist() == first,
    "provider": runtime.provider.name, "versions": runtime.provider.versions(), "changes": runtime.changes,
}))
"""


@pytest.fixture(scope="module")
def after(run_python):
    """Bootstrap in a process whose command line would mislead MegatronAdaptor."""
    completed = run_python(AFTER)
    return json.loads(completed.stdout.splitlines()[-1]) | {"stdout": completed.stdout, "stderr": completed.stderr}


@pytest.mark.difference  # differs: default provider
def test_provider_follows_from_the_stack(after) -> None:
    assert after["provider"] == "megatron_adaptor"
    assert set(after["versions"]) == {"MegatronAdaptor", "TransformerEngineNPU", "MindSpeed"}


@pytest.mark.difference  # differs: provider megatron_adaptor: order of imports
def test_packages_are_imported_in_order(after) -> None:
    # MegatronAdaptor imports Megatron-Core, which imports the engine.
    expected = ["torch_npu", "megatron_adaptor", "megatron.core", "transformer_engine", "mindspeed", "mcore_bridge"]
    assert after["order"] == [name for name in expected if name != "mindspeed" or len(package_folders()) > 1]


def test_command_line_is_hidden_and_unchanged(after) -> None:
    assert after["argv"][1:3] == ["--transformer-impl", "local"]
    assert after["arguments"]["transformer_impl"] == "transformer_engine"
    assert after["arguments"]["optimization_level"] == 2
    assert "hidden_dropout" not in after["arguments"] or after["arguments"]["hidden_dropout"] == 0.1
    assert after["hidden_dropout"] == 0.1  # Megatron's default, a number
    assert "usage:" not in after["stdout"]


def test_root_logging_is_unchanged(after) -> None:
    assert after["handlers_kept"]
    assert after["level"] == 40
    assert "MindSpeed defaults" not in after["stderr"]


@pytest.mark.difference  # differs: Transformer Engine's classes on the NPU
def test_megatrons_layers_are_built_on_the_npus_engine(after) -> None:
    assert after["have_te"]
    assert after["te_checkpoint"]
    assert after["attention"]


def test_device_and_random_state_are_the_npus(after) -> None:
    assert after["same_device"]
    assert after["same_numbers"]


def test_changes_are_reported(after) -> None:
    changes = " ".join(after["changes"])
    for change in ("imported in this order", "sys.argv", "torch.distributed.all_reduce", "HCCL_IF_BASE_PORT="):
        assert change in changes


FLOAT64 = """
import torch, torch.distributed as dist, megascend
megascend.bootstrap("npu", engine="megatron")
from megascend.testing.distributed import run_distributed
def rank():
    number = torch.tensor([1.0 + dist.get_rank()], dtype=torch.float64)
    dist.all_reduce(number)
    return number.item()
print(run_distributed(rank, 2, backend="gloo"))
def on_npu():
    try:
        dist.all_reduce(torch.ones(1, dtype=torch.float64, device="npu"))
    except megascend.PlatformError as error:
        return str(error)
print(run_distributed(on_npu, 2, backend="hccl")[0])
"""


def test_all_reduce_of_float64_works_on_cpu_and_is_refused_on_npu(run_python) -> None:
    lines = run_python(FLOAT64).stdout.strip().splitlines()
    assert lines[-2] == "[3.0, 3.0]"
    assert "HCCL has no float64" in lines[-1]


COMPLETED = """
import json, sys, torch
import megascend
runtime = megascend.bootstrap("npu", engine="megatron")
from megatron.core.extensions import transformer_engine as extensions
from megatron.core.tensor_parallel import random
from megascend.runtime.bootstrap.megatron_adaptor import verification
print(json.dumps({
    "te_checkpoint": extensions.te_checkpoint.__module__, "random": verification.random_state_is_npus(),
    "device": torch.cuda.current_device() == torch.npu.current_device(), "changes": runtime.changes,
}))
"""
# Makes the stand-in an adaptor that leaves these things to the program, as ROLL expects it to.
LEAVES_OUT = """
from megascend.runtime.bootstrap.import_hooks import after_import
def leave_out():
    import torch
    from megatron.core.extensions import transformer_engine as extensions
    from megatron.core.tensor_parallel import random
    vars(extensions).pop("te_checkpoint", None)
    def on_cuda(*args, **kwargs):
        raise RuntimeError("Torch not compiled with CUDA enabled")
    random._set_cuda_rng_state = random._get_cuda_rng_state = on_cuda
    torch.cuda.current_device = lambda: -1
after_import("megatron_adaptor", leave_out)
"""


def test_what_the_adaptor_leaves_out_is_completed(run_python) -> None:
    report = json.loads(run_python(LEAVES_OUT + COMPLETED).stdout.splitlines()[-1])
    assert report["te_checkpoint"] == "megascend.runtime.bootstrap.megatron_adaptor.provider"
    assert report["random"]
    assert report["device"]
    changes = " ".join(report["changes"])
    for name in ("te_checkpoint", "torch.cuda.current_device", "random._set_cuda_rng_state"):
        assert name in changes


VERIFIED = """
import json, sys, megascend
from types import SimpleNamespace
runtime = megascend.bootstrap("npu", engine="megatron")
runtime.load_megatron()
from megatron.core import optimizer
from megatron.core.extensions import transformer_engine as extensions
from megatron.core.tensor_parallel import layers, random
import torch
from megascend.runtime.bootstrap.megatron_adaptor import verification
defaults = runtime.provider._defaults
complete = SimpleNamespace(**defaults)
verification.verify(complete, defaults)
def broken(owner, name, value, config=complete):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        verification.verify(config, defaults)
    except megascend.PlatformError as error:
        return str(error)
    finally:
        setattr(owner, name, before)
print(json.dumps({
    "attention": broken(extensions, "TEDotProductAttention", torch.nn.Module),
    "linear": broken(extensions, "TELinear", layers.ColumnParallelLinear),
    "flag": broken(extensions, "HAVE_TE", False),
    "random": broken(random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
    "device": broken(torch.cuda, "current_device", lambda: 5),
    "adam": broken(optimizer, "Adam", torch.optim.AdamW),
    "config": broken(extensions, "HAVE_TE", True, SimpleNamespace()),
}))
"""


@pytest.mark.difference  # differs: provider megatron_adaptor: verification
def test_verification_names_what_is_not_patched(run_python) -> None:
    report = json.loads(run_python(VERIFIED).stdout.splitlines()[-1])
    for name, part in {
        "attention": "TEDotProductAttention is torch.nn.modules.module.Module, which is not built on TransformerEngineNPU",
        "linear": "TELinear is megatron.core.tensor_parallel.layers.ColumnParallelLinear",
        "flag": "HAVE_TE is False",
        "random": "the random states of megatron.core.tensor_parallel.random are not those of the NPU",
        "device": "torch.cuda.current_device() is 5",
        "adam": "the optimizer's Adam is torch.optim.adamw.AdamW",
        "config": "the model configuration lacks MegatronAdaptor's ",
    }.items():
        assert report[name].startswith("MegatronAdaptor's patches are not as they must be: ")
        assert part in report[name]
        assert "start a fresh process" in report[name]


PLACEHOLDER = """
import sys, types, megascend
from megascend.runtime.bootstrap.import_hooks import after_import
def put_placeholder():
    sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
after_import("megatron_adaptor", put_placeholder)
try:
    megascend.bootstrap("npu", engine="megatron")
except megascend.PlatformError as error:
    print(error)
"""


def test_placeholder_in_the_engines_place_is_refused(run_python) -> None:
    message = run_python(PLACEHOLDER).stdout.splitlines()[-1]
    assert "transformer_engine in this process is None, not TransformerEngineNPU in " in message
    assert "start another" in message


MINDSPEEDS_PATCHES = """
import json
from pkgutil import resolve_name
import megascend
megascend.bootstrap("npu", engine="megatron").load_megatron()
import mindspeed
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.patch_utils import MindSpeedPatchesManager
replaced = []
for path, patch in MindSpeedPatchesManager.patches_info.items():
    owner, _, name = path.rpartition(".")
    if vars(resolve_name(owner))[name] is not patch.final_patch_func:  # a static method is wrapped
        replaced.append(path)
print(json.dumps({
    "file": mindspeed.__file__, "features": len(MindSpeedFeaturesManager.FEATURES_LIST),
    "patches": list(MindSpeedPatchesManager.patches_info), "replaced": sorted(replaced),
}))
"""
CORE = "megatron.core"
REPLACED = [
    f"{CORE}.models.common.embeddings.rope_utils.apply_rotary_pos_emb",  # by mcore-bridge's
    f"{CORE}.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",  # by Megatron's own
]

if WITHOUT_EXPERTS:

    def test_patches_of_the_real_mindspeed_are_in_place(run_python) -> None:
        report = json.loads(run_python(MINDSPEEDS_PATCHES).stdout.splitlines()[-1])
        assert Path(report["file"]).parents[1] == Path(os.environ["MEGASCEND_MINDSPEED"]).resolve()
        assert report["features"] > 50
        assert {
            f"{CORE}.transformer.transformer_config.TransformerConfig.__post_init__",
            f"{CORE}.fusions.fused_bias_swiglu.SwiGLUFunction",
            f"{CORE}.tensor_parallel.layers.VocabParallelEmbedding.forward",
            "megatron.training.arguments.validate_args",
        } <= set(report["patches"])
        assert report["replaced"] == REPLACED
