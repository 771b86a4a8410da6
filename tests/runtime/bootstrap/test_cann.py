"""CANN's version is read from the layouts of its installers and compared with what torch_npu needs."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

import simnpu
from megascend.errors import PlatformError, VersionError
from megascend.runtime.bootstrap import ascend
from megascend.runtime.bootstrap.versions import STACKS

CFG = """# version: 1.0
runtime_running_version=[7.7.T20.0.B210:{0}]
toolkit_running_version=[7.7.T20.0.B210:{0}]
opp_upgrade_version=[7.7.T20.0.B210:8.0.RC1]
"""
INFO = "package_name=Ascend-cann-toolkit\nversion={}\ninnerversion=V100R001C23SPC001B235\narch=aarch64\nos=linux\npath={}\n"


def toolkit(folder: Path, version: str, *files: str) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((CFG if path.name == "version.cfg" else INFO).format(version, folder))
    return folder


@pytest.mark.parametrize("version", ["8.0.0", "8.1.RC1", "8.2.RC1.alpha003", "8.5.0", "8.5.0.B160", "9.0.0-beta.1"])
@pytest.mark.parametrize(
    "files",
    [
        ("version.cfg",),
        ("aarch64-linux/ascend_toolkit_install.info",),
        ("version.cfg", "x86_64-linux/ascend_toolkit_install.info"),
        ("ascend_nnae_install.info",),
    ],
)
def test_version_is_read_from_each_layout(version, files, tmp_path):
    assert ascend.cann_version(toolkit(tmp_path, version, *files)) == version


@pytest.mark.parametrize(
    ("torch_npu", "cann", "outcome"),
    [
        ("2.6.0", "8.0.RC1", "VersionError"),
        ("2.6.0", "8.0.RC2", "released with 8.2.RC1"),
        ("2.7.1", "8.3.RC1", "ok"),
        ("2.7.1.post4", "8.0.0", "VersionError"),
        ("2.9.0", "8.5.0.B160", "ok"),
        ("2.10.0", "8.1.RC1", "released with 9.0.0"),
        ("2.10.0.post4", "8.3.RC1", "VersionError"),
        ("2.13.0", "9.3.0", "ok"),
        ("2.13.0", "9.2.0.alpha001", "ok"),
        ("2.99.0", "8.0.0", "ok"),  # the torch pair is another prerequisite
    ],
)
def test_version_is_compared_with_torch_npu(torch_npu, cann, outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(simnpu, "is_active", lambda: False)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(toolkit(tmp_path, cann, "version.cfg")))
    monkeypatch.setattr(metadata, "version", lambda package: torch_npu)
    if outcome == "VersionError":
        with pytest.raises(VersionError, match=rf"CANN {cann} .*torch_npu {torch_npu}") as raised:
            ascend.check_cann(STACKS[0])
        assert len(str(raised.value)) < 160 + len(str(tmp_path))
    else:
        result = ascend.check_cann(STACKS[0])
        assert result.startswith(f"{cann} in {tmp_path}")
        assert (outcome == "ok") == ("released with" not in result)
        assert outcome == "ok" or outcome in result


@pytest.mark.parametrize(
    "content", [None, "toolkit_running_version=[:]\n", "version=\n", "toolkit_running_version=[x:soon]\n"]
)
def test_folder_without_a_toolkit_is_refused(content, tmp_path, monkeypatch):
    monkeypatch.setattr(simnpu, "is_active", lambda: False)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    if content is not None:
        (tmp_path / "version.cfg").write_text(content)
    with pytest.raises(PlatformError, match=r"has no CANN \("):
        ascend.check_cann(STACKS[0])
