"""The package without megascend: nothing of it imports megascend, and a model trains where megascend cannot be imported."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import simnpu
from simnpu.environment import own_paths

PACKAGE = Path(simnpu.__file__).parent

NO_MEGASCEND = """
import sys
from importlib.abc import MetaPathFinder


class NoMegascend(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megascend":
            raise ImportError(f"{name} was asked for, by a package that stands alone")


sys.meta_path.insert(0, NoMegascend())
"""

TRAIN = """
import json, os, pathlib, sys, torch, torch_npu
import torch.distributed as dist
from torch import nn

try:
    import megascend
except ImportError as error:
    assert "stands alone" in str(error), error
else:
    raise SystemExit("megascend was imported")

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.npu.set_device(rank)


def trained(where, data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        x = data.to(where)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        if where.startswith("npu") and world > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
        optimizer.step()
        losses.append(loss.item())
    return losses


data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
if world > 1:
    dist.init_process_group("hccl")
    assert dist.get_backend() == "hccl"
on_npu = trained(f"npu:{rank}", data.chunk(world)[rank])
pathlib.Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([on_npu, trained("cpu", data)]))
if world > 1:
    dist.destroy_process_group()
"""


def copy_package(folder: Path) -> None:
    """Copy the package alone to ``folder``, where nothing of megascend lies beside it."""
    shutil.copytree(PACKAGE, folder / "simnpu", ignore=shutil.ignore_patterns("__pycache__"))


def run_alone(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """``python -m simnpu -- COMMAND`` in processes that have this package and cannot import megascend."""
    library = folder / "library"
    library.mkdir()
    copy_package(library)
    (library / "sitecustomize.py").write_text(NO_MEGASCEND)
    package_paths = {str(path) for path in own_paths()} | {str(PACKAGE.parent)}
    paths = [str(library), *(entry for entry in sys.path if entry and entry not in package_paths)]
    unset = ("SIMNPU", "RANK", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    start = [sys.executable, "-m", "simnpu", "--", *map(str, command)]
    completed = subprocess.run(start, capture_output=True, text=True, env=env, cwd=folder, timeout=300, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.torchrun)])
def test_a_model_trains_where_megascend_cannot_be_imported(tmp_path: Path, ranks: int) -> None:
    """On npu:0, or on two ranks over hccl, each with half of the batch: the losses are those of the CPU."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    completed = run_alone(tmp_path, sys.executable, *torchrun, script, tmp_path)
    assert completed.stderr.count("SIMULATED") == 1
    for rank in range(ranks):
        on_npu, on_cpu = json.loads((tmp_path / f"{rank}.json").read_text())
        assert on_npu == pytest.approx(on_cpu, rel=1e-5)
        assert on_npu[-1] < on_npu[0]


def test_no_file_of_the_package_names_megascend() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 80
    mentions = {path.relative_to(PACKAGE).as_posix() for path in files if b"megascend" in path.read_bytes().lower()}
    assert mentions == set()


def test_what_the_package_imports_at_any_place_is_declared() -> None:
    """Imports inside functions included. torchvision and the like would show here before a user meets them."""
    imports = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imports.add(str(node.module).partition(".")[0])
    stand_ins = {path.stem for path in (PACKAGE / "site_packages").iterdir()}
    assert imports - sys.stdlib_module_names - stand_ins == {"simnpu", "torch", "packaging", "psutil"}


def test_a_child_finds_the_package_that_its_parent_imported_from_a_source_tree(tmp_path: Path) -> None:
    copy_package(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import os, subprocess, simnpu\n"
        "env = simnpu.environment({'PATH': os.environ['PATH']})\n"
        "print(env['PYTHONPATH'])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert str(tmp_path) in completed.stdout.strip().split(os.pathsep)
