"""``npu-smi`` as programs find, call and parse it; each parser here is written after one of theirs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import simnpu


def environment(**changes: str) -> dict[str, str]:
    names = ("LOCAL_WORLD_SIZE", "SIMNPU_DEVICES", "SIMNPU_DEVICE_NAME")
    base = {name: value for name, value in os.environ.items() if name not in names}
    return simnpu.environment(base | {"SIMNPU_DEVICES": "4"} | changes)


def npu_smi(*arguments: str, check: bool = True, **changes: str) -> str:
    completed = subprocess.run(
        ["npu-smi", *arguments], capture_output=True, text=True, env=environment(**changes), timeout=60, check=check
    )
    return completed.stdout if check else completed.stderr


def test_bus_ids_as_twinkle_reads_them() -> None:
    """twinkle.utils.platforms.npu: one address for each physical id."""
    pattern = re.compile(r"^\|\s*\d+\s+(\d+)\s*\|\s*([0-9A-F]{4}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F])\s*\|", re.MULTILINE)
    bus_ids = dict(pattern.findall(npu_smi("info")))
    assert list(bus_ids) == ["0", "1", "2", "3"]
    assert len(set(bus_ids.values())) == 4


def test_names_and_memory_as_monitors_read_them() -> None:
    """Two lines a device between rules of ``=``: id and name, health; then used and total memory in MB."""
    text = npu_smi("info", SIMNPU_DEVICE_NAME="Ascend910B3")
    assert "SIMULATED by simnpu" in text
    assert len({len(line) for line in text.splitlines()}) == 1  # a table with straight edges
    first = re.findall(r"^\|\s+(\d+)\s+(910\w+)\s+\|\s+(\w+)\s+\|", text, re.MULTILINE)
    assert first == [(str(device), "910B3", "OK") for device in range(4)]
    memory = re.findall(r"(\d+)\s*/\s*(\d+)\s*\|$", text, re.MULTILINE)[1::2]
    assert len(memory) == 4
    assert all(0 < int(used) < int(total) for used, total in memory)


def test_the_board_as_verl_reads_it() -> None:
    """verl.utils.device.get_npu_versions: the software version, and CANN's from the toolkit's file."""
    line = next(line for line in npu_smi("info", "-t", "board", "-i", "1").splitlines() if "Software Version" in line)
    software = line.split(":")[1].strip()
    assert software == "0.0.0+simnpu"
    home = Path(environment()["ASCEND_HOME_PATH"])
    for machine in ("x86_64", "aarch64", "arm64"):
        info = (home / f"{machine}-linux" / "ascend_toolkit_install.info").read_text()
        assert re.search(r"^version=(.*)$", info, re.MULTILINE)[1] == software  # type: ignore[index]


def test_lists_as_scripts_cut_them() -> None:
    ids = [line.split()[3] for line in npu_smi("info", "-l").splitlines() if "NPU ID" in line]  # awk '{print $4}'
    assert ids == ["0", "1", "2", "3"]
    chips = [line.split() for line in npu_smi("info", "-m", SIMNPU_DEVICE_NAME="910B2").splitlines()[1:]]
    assert chips == [[str(device), "0", str(device), "Ascend", "910B2"] for device in range(4)]
    assert npu_smi("-v").split(":")[-1].strip() == "0.0.0+simnpu"


def test_figures_of_one_device() -> None:
    usages = dict(re.findall(r"^\s*(.+?)\s*: (.+)$", npu_smi("info", "-t", "usages", "-i", "2"), re.MULTILINE))
    assert usages["NPU ID"] == "2"
    assert 0 <= int(usages["HBM Usage Rate(%)"]) <= 100
    assert int(usages["HBM Capacity(MB)"]) > 100
    common = npu_smi("info", "-t", "common", "-i", "0")
    assert re.search(r"Temperature\(C\)\s*: NA$", common, re.MULTILINE)  # nothing was measured
    topology = npu_smi("info", "-t", "topo")
    assert [row.split()[1:5].count("X") for row in topology.splitlines()[1:5]] == [1, 1, 1, 1]


@pytest.mark.parametrize("arguments", [("info", "-t", "board", "-i", "9"), ("info", "-t", "nonsense"), ("set",)])
def test_what_does_not_exist_is_an_error(arguments: tuple[str, ...]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        npu_smi(*arguments)
    assert npu_smi(*arguments, check=False)


def test_a_chip_that_is_not_simulated_is_refused_with_those_that_are() -> None:
    message = npu_smi("info", check=False, SIMNPU_DEVICE_NAME="H200")
    assert "SIMNPU_DEVICE_NAME='H200': expected one of Ascend910B1, " in message
