"""When the simulator's own tests may be left out: tests/simnpu/.verified, as scripts/simnpu_verified.py reads and writes it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "simnpu_verified.py"


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on a small tree in which the tests have passed."""
    spec = importlib.util.spec_from_file_location("simnpu_verified", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for file in (
        "src/simnpu/memory.py",
        "src/simnpu/bin/npu-smi",
        "tests/simnpu/test_x.py",
        "scripts/npu_programs/a.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    assert module.main(["--write", json.dumps(module.state(tmp_path))]) == 0
    return module


def test_an_unchanged_simulator_is_left_out_with_a_reason(verified: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert verified.main([]) == 0
    assert "tests/simnpu left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed", ["src/simnpu/memory.py", "src/simnpu/bin/npu-smi", "tests/simnpu/new.py", "scripts/npu_programs/a.py"]
)
def test_any_change_of_a_file_makes_the_tests_run(
    changed: str, verified: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / changed).write_text("another")
    assert verified.main([]) == 1
    assert "have changed" in capsys.readouterr().out


def test_a_file_that_is_gone_or_renamed_makes_them_run(verified: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests/simnpu/test_x.py").rename(tmp_path / "tests/simnpu/test_y.py")
    assert verified.main([]) == 1
    (tmp_path / "tests/simnpu/test_y.py").unlink()
    assert verified.main([]) == 1


def test_documentation_and_leavings_do_not_count(verified: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "src/simnpu/README.md").write_text("text")
    (tmp_path / "src/simnpu/__pycache__").mkdir()
    (tmp_path / "src/simnpu/__pycache__/memory.cpython-312.pyc").write_text("code")
    assert verified.main([]) == 0


@pytest.mark.parametrize("name", ["torch", "python"])
def test_another_version_makes_them_run(
    name: str, verified: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / verified.VERIFIED
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: "1.0"}))
    assert verified.main([]) == 1
    assert f"{name} 1.0 -> " in capsys.readouterr().out
    file.unlink()
    assert verified.main([]) == 1


def test_what_changed_while_the_tests_ran_is_not_noted(verified: ModuleType, tmp_path: Path) -> None:
    before = json.dumps(verified.state(tmp_path))
    noted = (tmp_path / verified.VERIFIED).read_text()
    (tmp_path / "src/simnpu/memory.py").write_text("another")
    assert verified.main(["--write", before]) == 1
    assert (tmp_path / verified.VERIFIED).read_text() == noted


def test_the_digest_covers_the_simulator_of_this_tree(verified: ModuleType) -> None:
    files = {path.as_posix() for path in verified.covered_files(SCRIPT.parents[1])}
    assert len(files) > 120
    for file in ("src/simnpu/operators/attention.py", "src/simnpu/bin/npu-smi", "src/simnpu/site_packages/acl/rt.py"):
        assert file in files
    assert not any(file.endswith((".md", ".pyc", ".verified")) for file in files)
