"""What programs that are not ours do on the device, and nobody here did: small stand-ins of their calls.

The programs themselves run by `python scripts/npu/programs` (docs/simnpu.md says how they went).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import simnpu

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "npu" / "programs"


def run_program(text: str, folder: Path, *, ranks: int = 0, timeout_s: int = 120) -> str:
    """Return the output of a program of its own on the simulated device, under torchrun if it has ranks."""
    file = folder / "program.py"
    file.write_text(text)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    completed = subprocess.run(
        [sys.executable, *start, str(file)],
        capture_output=True,
        text=True,
        env=simnpu.environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        cwd=folder,
        timeout=timeout_s,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed.stdout


def python_path() -> str:
    return f"{simnpu.environment()['PYTHONPATH']}:{SCRIPTS}"


UNUSED = """
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")

class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.never = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1)
    def forward(self, x):
        return self.used(x)

model = torch.nn.parallel.DistributedDataParallel(Half().npu(), find_unused_parameters=True)
for step in range(2):
    model(torch.full((1, 2), rank + 1.0, device="npu")).sum().backward()
with open(f"rank{rank}", "w") as file:
    print(model.module.used.weight.grad.tolist(), model.module.never.weight.grad, file=file)
dist.destroy_process_group()
"""


def test_ddp_looks_for_unused_parameters(tmp_path: Path) -> None:
    """transformers' Trainer asks for it. The reducer pins memory in C++: "implement getPinnedMemoryAllocator"."""
    run_program(UNUSED, tmp_path, ranks=2)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "[[3.0, 3.0]] None\n"  # two steps of the mean of 1 and 2


POOL = """
import multiprocessing, os, torch, torch.distributed as dist

def on_rank(rank, world, store):
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=world)
    weight = torch.full((2,), float(rank + 1), device="npu", requires_grad=True)
    (weight * weight).sum().backward()
    dist.all_reduce(weight.grad)
    dist.destroy_process_group()
    return weight.grad.tolist()

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["torch"])
    with multiprocessing.Pool(2) as pool:
        work = pool.starmap_async(on_rank, [(rank, 2, os.path.abspath("store")) for rank in range(2)], chunksize=1)
        print("FOUND", work.get(90))
        print("DEVICE", torch.ones(1, device="npu").item())
"""


def test_a_pool_of_a_forkserver_uses_the_device(tmp_path: Path) -> None:
    """Run as MindSpeed's distributed tests do: pools of processes, each a rank, and the device in the parent too."""
    out = run_program(POOL, tmp_path)
    assert "FOUND [[6.0, 6.0], [6.0, 6.0]]" in out  # d/dw of w*w is 2w, on weights 1 and 2
    assert "DEVICE 1.0" in out


def test_half_precision_backward_is_right_and_overflows_where_the_cpus_does(sim_npu: None) -> None:
    """ms-swift in fp16 finds NaN at once: Megatron starts with a loss scale of 2**32, which no fp16 gradient survives."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 16, generator=generator, dtype=torch.float64) / 4
    inputs, targets = torch.randn(8, 16, generator=generator, dtype=torch.float64), torch.arange(8)

    def gradient(scale: float, dtype: torch.dtype, device: str) -> torch.Tensor:
        leaf = weight.to(device, dtype, copy=True).requires_grad_()
        hidden = torch.nn.functional.silu(inputs.to(device, dtype) @ leaf)
        loss = torch.nn.functional.cross_entropy((hidden @ leaf).float(), targets.to(device))
        (loss * scale).backward()
        assert leaf.grad is not None
        return leaf.grad.cpu()

    exact = gradient(1.0, torch.float64, "cpu").float()
    actual = gradient(16.0, torch.float16, "npu").float() / 16
    assert (actual - exact).abs().max() < 2e-3 * exact.abs().max()
    overflown = gradient(2.0**32, torch.float16, "npu")
    assert not overflown.isfinite().all()
    assert torch.equal(overflown.isfinite(), gradient(2.0**32, torch.float16, "cpu").isfinite())


def test_typed_constructors_take_a_size(sim_npu: None) -> None:
    """MindSpeed's tests call ``torch.cuda.LongTensor(size=(2, 3))``."""
    tensor = torch.npu.LongTensor(size=(2, 3))  # type: ignore[attr-defined]
    assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == ((2, 3), torch.int64, "npu")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_program_runs_with_other_ids_and_is_otherwise_itself(tmp_path: Path) -> None:
    source = "import sys\nMODEL_ID = 'hub/model'\nSTEPS = 3\nprint(MODEL_ID, STEPS, __name__, sys.argv[1:])\n"
    recipe = tmp_path / "recipe.py"
    recipe.write_text(source)
    command = [sys.executable, str(SCRIPTS / "run_with_ids.py"), str(recipe)]
    completed = subprocess.run([*command, "MODEL_ID=/small"], capture_output=True, text=True, timeout=60, check=True)
    assert completed.stdout == "/small 3 __main__ []\n"
    with pytest.raises(ValueError, match="assigns no DATA_ID at module level"):
        script("run_with_ids").with_constants(source, "recipe.py", {"DATA_ID": "x"})


def test_programs_without_a_checkout_are_said_to_be_missing(tmp_path: Path) -> None:
    env = simnpu.environment() | {"MEGASCEND_RUN": str(tmp_path / "run"), "MEGASCEND_MINDSPEED": str(tmp_path)}
    for name in ("MEGASCEND_TWINKLE", "MEGASCEND_MEGATRON_LM"):
        env.pop(name, None)
    command = [sys.executable, str(SCRIPTS), "twinkle_tp_npu", "mindspeed_tests"]
    completed = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert completed.returncode == 1, completed.stderr
    assert "MISSING (set MEGASCEND_TWINKLE)" in completed.stdout
    assert "MISSING (set MEGASCEND_MEGATRON_LM)" in completed.stdout


def test_modules_that_cannot_be_imported_are_counted() -> None:
    command = [sys.executable, str(SCRIPTS / "import_modules.py"), "json", "json.nothing"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert completed.stdout == "RESULT not all 1 of 2 modules imported\n"
    assert "json.nothing: ModuleNotFoundError" in completed.stderr


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("RESULT ok 17 of 17", ("OK", "17 of 17")),
        ("RESULT not all 16 of 17", ("FAILED (not all)", "16 of 17")),
        ("died", ("FAILED (no result)", "")),
    ],
)
def test_verdicts(log: str, expected: tuple[str, str], programs: Any) -> None:
    result = programs.result_line(log)
    assert (result.verdict, result.figures) == expected


def test_a_program_that_stops_early_or_loses_its_numbers_fails(programs: Any) -> None:
    judge = programs.last_step(r"loss (?P<loss>\S+) norm (?P<norm>\S+)", 2)
    assert judge("loss 2 norm 1\nloss 1 norm 1\n").verdict == "OK"
    assert judge("loss 2 norm 1\n").verdict == "FAILED (1 of 2 steps)"
    assert judge("loss 2 norm 1\nloss nan norm 1\n").verdict == "FAILED (NaN)"


def test_the_reason_is_the_first_error_of_any_rank(programs: Any) -> None:
    log = "[rank1]: NotImplementedError: no experts\nTraceback\n[rank0]: RuntimeError: Connection reset by peer\n"
    assert programs.first_error(log) == "NotImplementedError: no experts"
    assert programs.first_error("[rank0]: torch.AcceleratorError: out\n") == "torch.AcceleratorError: out"
    assert programs.first_error("Killed\n") == ""


@pytest.mark.parametrize("adaptor", [True, False])
def test_the_stack_decides_the_packages_on_the_path(
    adaptor: bool, tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "ON_ADAPTOR", adaptor)
    monkeypatch.setenv("MEGASCEND_VERL", str(tmp_path / "verl"))
    monkeypatch.setenv("MEGASCEND_MINDSPEED", str(tmp_path / "mindspeed"))
    by_name = {program.name: program for program in programs.PROGRAMS}

    def path(name: str) -> list[str]:
        return programs.environment(by_name[name], tmp_path)["PYTHONPATH"].split(":")

    stand_ins = str(ROOT / "tests" / "doubles" / "adaptor_packages")
    assert (stand_ins in path("verl_imports")) is adaptor
    assert str(tmp_path / "mindspeed") in path("verl_imports")
    assert stand_ins not in path("ddp")


@pytest.mark.parametrize("version", ["0.16.0", "0.12.1"])
def test_mindspeed_has_the_version_of_its_checkout(
    version: str, tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branch core_r0.18.0 states 0.12.1; mcore-bridge chooses its LoRA layers by it."""
    checkout = tmp_path / "mindspeed"
    checkout.mkdir()
    (checkout / "setup.py").write_text(f"import sys\n__version__ = '{version}'\nsetup(version=__version__)\n")
    monkeypatch.setenv("MEGASCEND_MINDSPEED", str(checkout))
    for name in ("qwen3", "qwen3_moe"):
        (tmp_path / "models" / name).mkdir(parents=True)
    programs.prepare(tmp_path)
    distribution = next(iter(importlib.metadata.distributions(name="mindspeed", path=[str(tmp_path / "metadata")])))
    assert distribution.version == version


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("npu_programs_table", SCRIPTS / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
