"""``torch_npu`` and ``torch.npu`` of the simulated device, as a program sees them.

What changes torch for a whole process is tested in processes of their own; these tests run in any pytest process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import simnpu

Run = Callable[..., subprocess.CompletedProcess[str]]
PATHS = [entry for entry in sys.path if entry and "simnpu" not in entry]


def plain_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without the simulated device."""
    names = ("SIMNPU", "SIMNPU_DEVICES", "RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    base = {name: value for name, value in os.environ.items() if name not in names}
    return base | {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | changes


def run_python(code: str, env: Mapping[str, str] | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter, on the simulated device unless ``env`` says otherwise."""
    env = simnpu.environment(plain_environment()) if env is None else dict(env)
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert not check or completed.returncode == 0, completed.stderr[-3000:]
    return completed


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys; import simnpu; print(simnpu.is_active(), 'torch' in sys.modules)"
    assert run_python(code, plain_environment()).stdout.split() == ["False", "False"]


def test_the_environment_puts_the_device_in_front_and_leaves_the_rest(tmp_path: Path) -> None:
    base = {"PYTHONPATH": "/somewhere", "ASCEND_HOME_PATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    changed = simnpu.environment(base)
    paths = changed["PYTHONPATH"].split(os.pathsep)
    assert (Path(paths[0]) / "torch_npu" / "__init__.py").is_file()
    assert list(Path(paths[1]).glob("torch_npu-*.dist-info"))
    assert "/somewhere" in paths
    assert changed["SIMNPU"] == "1"
    assert changed["ASCEND_HOME_PATH"] == str(tmp_path)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in changed
    assert simnpu.environment(changed) == changed
    assert base == {"PYTHONPATH": "/somewhere", "ASCEND_HOME_PATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert Path(simnpu.environment({})["ASCEND_HOME_PATH"]).is_dir()


@pytest.mark.parametrize("first", ["torch", "torch_npu"])
def test_torch_loads_the_device_by_itself_in_either_order(first: str) -> None:
    code = f"""
import {first}
import sys, importlib.metadata, torch
assert "torch_npu" in sys.modules
import torch_npu, torch_npu.npu, torch_npu.contrib, torch_npu.utils.collect_env
assert torch_npu.npu is torch.npu and sys.modules["torch_npu.npu.amp"] is torch.npu.amp
release = torch.__version__.split("+")[0]
assert torch_npu.__version__ == importlib.metadata.version("torch_npu") == release + "+simnpu", torch_npu.__version__
assert (torch.ones(2, device="npu") + 1).tolist() == [2.0, 2.0]
assert torch.npu.get_device_name() == "Simulated Ascend (CPU memory, simnpu)"
import simnpu
assert simnpu.is_active()
simnpu.activate()
"""
    completed = run_python(code)
    assert completed.stderr.count("SIMULATED") == 1


def test_other_ranks_and_ranks_under_a_launcher_that_spoke_are_silent() -> None:
    env = simnpu.environment(plain_environment())
    assert "SIMULATED" not in run_python("import torch", env | {"RANK": "1"}).stderr
    assert "SIMULATED" in run_python("import torch", env | {"RANK": "0"}).stderr
    assert "SIMULATED" not in run_python("import torch", env | {"RANK": "0", "TORCHELASTIC_RUN_ID": "7"}).stderr


def test_activation_in_the_running_process() -> None:
    code = """
import os, torch
assert not hasattr(torch, "npu")
import simnpu
simnpu.activate(); simnpu.activate()
assert simnpu.is_active() and torch.npu.is_available() and os.environ["SIMNPU"] == "1"
assert os.path.isdir(os.environ["ASCEND_HOME_PATH"])
from transformers.utils import is_torch_npu_available
assert is_torch_npu_available()
from transformers.integrations.npu_flash_attention import npu_fusion_attention
"""
    completed = run_python(code, plain_environment())
    assert completed.stderr.count("SIMULATED") == 1


@pytest.mark.parametrize("early", ["megatron", "torch_npu"])
def test_activation_after_what_it_must_precede_is_refused(early: str) -> None:
    code = f"import sys, types; sys.modules['{early}'] = types.ModuleType('{early}')\nimport simnpu; simnpu.activate()"
    completed = run_python(code, plain_environment(), check=False)
    assert completed.returncode == 1
    assert f"ImportOrderError: simnpu.activate() must come before {early} (already imported)" in completed.stderr


@pytest.mark.parametrize("call", ["environment", "activate"])
def test_beside_a_torch_npu_that_works_both_refuse(tmp_path: Path, call: str) -> None:
    (tmp_path / "torch_npu.py").write_text("__version__ = '2.9.0'\n")
    env = plain_environment(PYTHONPATH=os.pathsep.join([str(tmp_path), *PATHS]))
    completed = run_python(f"import simnpu; simnpu.{call}()", env, check=False)
    assert completed.returncode == 1
    assert f"PlatformError: a real torch_npu is installed and works ({tmp_path / 'torch_npu.py'})" in completed.stderr


def test_a_torch_npu_without_cann_is_shadowed_and_said_so(tmp_path: Path) -> None:
    reason = "libhccl.so: cannot open shared object file: No such file or directory"
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({reason!r})\n")
    env = plain_environment(PYTHONPATH=os.pathsep.join([str(tmp_path), *PATHS]))
    code = "import simnpu; simnpu.activate(); import torch_npu; print(torch_npu.__version__)"
    completed = run_python(code, env)
    assert completed.stdout.strip().endswith("+simnpu")
    assert (
        f"({tmp_path / 'torch_npu.py'}) cannot be imported and is shadowed: ImportError: {reason}" in completed.stderr
    )


def test_metadata_that_cannot_be_written_is_an_error_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "simnpu").write_text("a file where a folder should be")
    code = "import simnpu; simnpu.environment()"
    completed = run_python(code, plain_environment(XDG_CACHE_HOME=str(tmp_path)), check=False)
    assert "PlatformError: simnpu cannot write its package metadata" in completed.stderr
    assert "set XDG_CACHE_HOME" in completed.stderr


def test_transfer_to_npu_makes_cudas_names_act_on_the_npu() -> None:
    code = """
import torch, torch_npu
from torch_npu.contrib import transfer_to_npu
cuda = torch.cuda
assert cuda.is_available() and cuda.device_count() == 8 and cuda.__name__ == "torch.cuda"
assert cuda.get_device_name("cuda:0").startswith("Simulated Ascend")
cuda.set_device(torch.device("cuda", 3)); assert cuda.current_device() == 3; cuda.set_device("cuda:0")
for tensor in (torch.zeros(2, device="cuda"), torch.ones(2).cuda(), torch.ones(2).to("cuda:0"), torch.ones(2).to(0),
               torch.ones(2).to(torch.device("cuda")), torch.full((2,), 1.0, device=torch.device("cuda", 0)),
               torch.ones(2).new_zeros(2, device="cuda"), cuda.FloatTensor([1.0, 2.0]), cuda.HalfTensor(2),
               torch.empty(2, device=cuda.current_device()), torch.nn.Linear(2, 2).cuda().weight,
               torch.nn.Linear(2, 2).to("cuda").weight, torch.ones(2).to(device="cuda", dtype=torch.float16)):
    assert tensor.device.type == "npu" and tensor.is_cuda and tensor.is_npu, tensor
assert not torch.ones(2).is_cuda
assert cuda.FloatTensor([1.0]).type() == "torch.npu.FloatTensor"
assert isinstance(torch.ones(1).cuda(), cuda.FloatTensor) and not isinstance(torch.ones(1), cuda.FloatTensor)
with cuda.device("cuda:2"):
    assert cuda.current_device() == 2
assert cuda.current_device() == 0
with torch.device("cuda"):
    assert torch.zeros(1).device.type == "npu"
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert (torch.ones(2, 2).cuda() @ torch.ones(2, 2).cuda()).dtype == torch.bfloat16
with cuda.stream(cuda.Stream()) as _:
    assert cuda.current_stream() != cuda.default_stream()
state = cuda.get_rng_state(); first = torch.rand(3, device="cuda"); cuda.random.set_rng_state(state)
assert torch.equal(first, torch.rand(3, device="cuda"))
assert cuda.default_generators is torch.npu.default_generators
assert torch.jit.script(len) is len
assert isinstance(torch.npu.default_generators[0], torch.Generator) and isinstance(torch.Generator("cpu"), torch.Generator)
import torch.distributed as dist
assert dist.is_nccl_available()
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "hccl", dist.get_backend()
group = dist.new_group([0], backend="nccl"); assert dist.get_backend(group) == "hccl"
total = torch.ones(2).cuda(); dist.all_reduce(total, group=group); assert total.tolist() == [1, 1]
options = dist.ProcessGroupNCCL.Options(); options.hccl_config = {"hccl_buffer_size": 200}
assert options is not torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
dist.new_group([0], backend="nccl", pg_options=options)
from torch.distributed.device_mesh import init_device_mesh
assert init_device_mesh("cuda", (1,)).device_type == "npu"
dist.destroy_process_group()
"""
    run_python(code)


def test_devices_memory_and_options() -> None:
    code = """
import pickle, torch
npu = torch.npu
assert npu.device_count() == 4
npu.set_device(3); assert npu.current_device() == 3
with npu.device(1):
    assert npu.current_device() == 1
assert npu.current_device() == 3
try:
    npu.set_device(4)
except RuntimeError as error:
    assert "this process sees 4 simulated devices; SIMNPU_DEVICES sets how many the host has" in str(error)
else:
    raise SystemExit("device 4 of 4")
try:
    npu.get_device_name("cpu")
except ValueError as error:
    assert "Expected a npu device" in str(error)
npu.set_device(0)
assert npu.get_device_properties().total_memory > 2**20
free, total = npu.mem_get_info(); assert 0 < free <= total
held = torch.zeros(256, device="npu")
assert npu.memory_allocated() == 1024 <= npu.max_memory_allocated()
npu.reset_peak_memory_stats(); npu.empty_cache(); assert npu.memory_stats()["allocated_bytes.all.current"] == 1024

assert len(npu.default_generators) == 4

number = npu.mstx.range_start("step"); npu.mstx.range_end(number)
npu.set_option({"ACL_PRECISION_MODE": "must_keep_origin_dtype"}); npu.set_compile_mode(jit_compile=False)
assert npu.is_jit_compile_false() and npu.is_bf16_supported()
npu.config.allow_internal_format = False
called = []; npu._lazy_call(lambda: called.append(1)); assert called == [1]
try:
    npu.NPUGraph()
except RuntimeError as error:
    assert "not simulated" in str(error)
"""
    run_python(code, simnpu.environment(plain_environment(SIMNPU_DEVICES="4")))


def test_operators_that_mindspeed_compiles_are_answered_without_a_compiler() -> None:
    code = """
import torch, torch_npu
from torch_npu.contrib import transfer_to_npu
from torch.utils.cpp_extension import load
def build(name):
    return load(name=name, sources=["nothing.cpp"], extra_ldflags=["-L/x", "-ltorch_npu"])
q = torch.randn(4, 1, 8).npu()
out = build("fusion_attention_v2").npu_fusion_attention_v2(
    q, q, q, 2, "SBH", None, None, None, 0.5, 1.0, 4, 4, 0, None, None, None, 0, True, False, 1, None, None)
grads = build("fusion_attention_v2").npu_fusion_attention_grad_v2(
    q, q, q, q, 2, "SBH", None, None, None, out[1], out[2], out[3], out[0], 0.5, 1.0, 4, 4, 0, *out[4:], None, None,
    None, 0, True, False, 1, None, None)
leaf = q.clone().requires_grad_()
expected = torch_npu.npu_fusion_attention(leaf, leaf, leaf, 2, "SBH", scale=0.5)[0]
expected.backward(q)
torch.testing.assert_close(out[0], expected.detach()); torch.testing.assert_close(sum(grads[:3]), leaf.grad)
x, w, dy = torch.randn(5, 3).npu(), torch.randn(2, 3, 4).npu(), torch.randn(5, 4).npu()
gmm = build("grouped_matmul")
y = gmm.npu_gmm([x], [w], [], [2, 5], 0, 0)[0]
torch.testing.assert_close(y, torch.cat([x[:2] @ w[0], x[2:] @ w[1]]))
(dx,), (dw,), _ = gmm.npu_gmm_backward([dy], [x], [w], [2, 5], 0)
torch.testing.assert_close(dx, torch.cat([dy[:2] @ w[0].t(), dy[2:] @ w[1].t()]))
torch.testing.assert_close(dw, torch.stack([x[:2].t() @ dy[:2], x[2:].t() @ dy[2:]]))
try:
    build("lcal")
except AttributeError as error:
    assert "operator extension 'lcal'" in str(error)
else:
    raise SystemExit("lcal")
"""
    run_python(code)
