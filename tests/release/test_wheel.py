"""Contents of the wheel, built as pip builds it. ``scripts/test_release.sh`` tests installing its extras."""

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
    """Build in a copy of the tree, isolated from leftovers of earlier builds; the tree stays unchanged."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [sys.executable, "-c", BUILD, str(tree)]
    completed = subprocess.run(build, cwd=tree, capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    (path,) = tree.glob("*.whl")
    assert path.name == f"megascend-{megascend.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def test_wheel_contains_exactly_the_package_files(wheel) -> None:
    entries = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.split()  # fmt: skip
    expected = {path.removeprefix("src/") for path in entries if (ROOT / path).exists()}
    about = f"megascend-{megascend.__version__}.dist-info"
    assert set(wheel.namelist()) == expected | {f"{about}/{name}" for name in ADDED}
    assert {f"{package}/py.typed" for package in ("megascend", "simnpu", "weightwire")} <= expected
    assert "simnpu/bin/npu-smi" in expected
    assert all(name.partition("/")[0] in ("megascend", "simnpu", "weightwire") for name in expected)  # no tests
