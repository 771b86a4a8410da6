"""What a wheel of this tree holds, built as pip builds it. What its extras install is tried by ``scripts/test_release.sh``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megascend

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
ADDED = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built in a copy of the tree: what an earlier build has left in the tree must not get into it, nor anything here."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [sys.executable, "-c", BUILD, str(tree)]
    done = subprocess.run(build, cwd=tree, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tree.glob("*.whl")
    assert path.name == f"megascend-{megascend.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def test_every_file_of_the_packages_is_in_it_and_nothing_else(wheel) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.split()  # fmt: skip
    wanted = {path.removeprefix("src/") for path in listed if (ROOT / path).exists()}
    about = f"megascend-{megascend.__version__}.dist-info"
    assert set(wheel.namelist()) == wanted | {f"{about}/{name}" for name in ADDED}
    assert {f"{package}/py.typed" for package in ("megascend", "simnpu", "weightwire")} <= wanted
    assert "simnpu/bin/npu-smi" in wanted
    assert all(name.partition("/")[0] in ("megascend", "simnpu", "weightwire") for name in wanted)  # no tests
