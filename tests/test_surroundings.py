"""Users without a home, and folders named like packages."""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from megascend.apps.tracking.tracker import check_trackers
from megascend.apps.train.plot import require_extra
from megascend.errors import ConfigError, MissingDependencyError
from megascend.runtime.io.paths import cache_folder
from megascend.runtime.io.shared import locked
from megascend.surroundings import home, is_installed, set_user_variables
from weightwire.errors import UpdateError
from weightwire.vllm.updates import _adapters_directory


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user unknown to the system."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "MEGASCEND_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return {}


def test_is_installed_ignores_plain_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("swanlab", "trackio", "no_such_plot", "torch", "real_package"):
        (tmp_path / name).mkdir()
    (tmp_path / "real_package" / "__init__.py").write_text("")
    (tmp_path / "real_module.py").write_text("")
    monkeypatch.setitem(sys.modules, "put_there", ModuleType("put_there"))
    assert [is_installed(name) for name in ("swanlab", "trackio", "no_such_plot", "nothing")] == [False] * 4
    assert [is_installed(name) for name in ("torch", "real_package", "real_module", "put_there", "sys")] == [True] * 5
    # Modules in sys.modules that are no packages have no modules of their own.
    assert not is_installed("put_there.inner")
    assert not is_installed("nothing.inner")
    for name in ("swanlab", "trackio"):  # no test environment has these installed
        with pytest.raises(MissingDependencyError, match=rf"trackers: {name} needs {name}, which is not installed"):
            check_trackers([name])
    with pytest.raises(MissingDependencyError, match="needs no_such_plot"):
        require_extra("no_such_plot", "plot")


def test_user_without_home_uses_a_temporary_folder(nobody: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / f"megascend-home-{os.getuid()}"
    assert home() == folder
    assert cache_folder() == folder / ".cache" / "megascend"
    changes = set_user_variables(nobody)
    assert nobody == {"HOME": str(folder), "USER": f"uid-{os.getuid()}"}
    assert len(changes) == 2
    assert folder.stat().st_mode & 0o777 == 0o700


def test_name_user_keeps_known_values(nobody: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("LOGNAME", "me")
    assert set_user_variables(nobody) == []
    assert nobody == {}
    monkeypatch.setenv("HOME", "/")
    assert home() == (Path("/") if os.access("/", os.W_OK) else tmp_path / f"megascend-home-{os.getuid()}")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for unwritable in ("/nonexistent/home", str(tmp_path)):
        monkeypatch.setenv("HOME", unwritable)
        assert home() == tmp_path / f"megascend-home-{os.getuid()}"
    assert set_user_variables(nobody)[0] == f"HOME={tmp_path}/megascend-home-{os.getuid()}: this user has no home"


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "open to others", "another user's"])
def test_folders_of_strangers_in_tmp_are_not_used(
    kind: str, nobody: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse locks, a home and adapters in a folder that somebody else prepared, or may write to."""
    (tmp_path / "ours").mkdir()
    for name in ("megascend-locks", "megascend-home", "weightwire"):
        path = tmp_path / f"{name}-{os.getuid()}"
        match kind:
            case "link":
                path.symlink_to(tmp_path / "ours")
            case "dangling link":
                path.symlink_to(tmp_path / "nothing")
            case "file":
                path.touch()
            case _:
                path.mkdir()
                path.chmod(0o770 if kind == "open to others" else 0o755)
    if kind == "another user's":
        real, user = Path.lstat, os.getuid() + 1
        monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result([*real(path)[:4], user, *real(path)[5:]]))
    with pytest.raises(ConfigError, match="TMPDIR"), locked(tmp_path / "x"):
        pass
    with pytest.raises(ConfigError, match="TMPDIR"):
        home()
    with pytest.raises(UpdateError, match="TMPDIR"):
        _adapters_directory()
    set_user_variables(nobody)
    assert nobody["HOME"].startswith(f"{tmp_path}/megascend-home-{os.getuid()}-")
    assert list((tmp_path / "ours").iterdir()) == []


def test_home_ignores_a_folder_of_another_user(
    nobody: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    set_user_variables(nobody)
    assert nobody["HOME"].startswith(f"{tmp_path}/megascend-home-54321-")
    assert Path(nobody["HOME"]).is_dir()
