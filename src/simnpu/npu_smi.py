"""``npu-smi`` for the simulated device: the calls that programs make, answered in the layout that they parse.

``npu-smi -v``; ``info``, ``info -l``, ``info -m``; ``info -t TYPE -i ID [-c CHIP]`` with TYPE one of board, common,
health, memory, usages, topo. What only hardware could measure is ``NA``. The layouts follow Huawei's command reference
(npu-smi, Atlas 800 training server). Every table says that the device is simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import psutil

from simnpu.errors import ConfigError
from simnpu.identity import GENERATION, SIMULATED_VERSION, chip, device_count

MARK = "SIMULATED by simnpu on CPU memory"
WIDTHS = (27, 15, 52)
PROCESS_WIDTHS = (27, 15, 26, 25)


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one call. Returns npu-smi's exit code; an unknown device or type goes to stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in ("-v", "--version"):
        print(f"npu-smi version: {SIMULATED_VERSION}")
        return 0
    parser = argparse.ArgumentParser(prog="npu-smi", description=f"npu-smi of a device that is {MARK}.", add_help=False)
    parser.add_argument("-h", "--help", action="help")
    parser.add_argument("command", choices=["info"])
    parser.add_argument("-l", action="store_true", help="list the devices")
    parser.add_argument("-m", action="store_true", help="list the chips")
    parser.add_argument("-t", choices=[*DETAILS, "topo"], metavar="TYPE", help=f"one of {', '.join(DETAILS)}, topo")
    parser.add_argument("-i", type=int, metavar="ID")
    parser.add_argument("-c", type=int, default=0, metavar="CHIP")
    options = parser.parse_args(arguments)
    try:
        count = device_count()
        name = (chip() or GENERATION).name.removeprefix("Ascend")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    if options.t == "topo":
        lines = topology(count)
    elif options.t:
        devices = range(count) if options.i is None else [options.i]
        if (options.i is not None and not 0 <= options.i < count) or options.c != 0:
            print(
                f"This device does not exist: ID {options.i}, chip {options.c} of {count} devices. {MARK}",
                file=sys.stderr,
            )
            return 1
        lines = [line for device in devices for line in pairs(DETAILS[options.t](device, name))]
    elif options.l:
        lines = pairs([("Total Count", count)])
        for device in range(count):
            lines += ["", *pairs([("NPU ID", device), ("Product Name", MARK), ("Chip Count", 1)])]
    elif options.m:
        lines = [row_of_chips("NPU ID", "Chip ID", "Chip Logic ID", "Chip Name")]
        lines += [row_of_chips(device, 0, device, f"Ascend {name}") for device in range(count)]
    else:
        lines = overview(count, name)
    print("\n".join(lines))
    return 0


def pairs(entries: list[tuple[str, object]]) -> list[str]:
    """``Name : value`` lines, as the types of ``info -t`` are printed."""
    return [f"\t{name:<31}: {value}" for name, value in entries]


def row_of_chips(*values: object) -> str:
    return "\t" + "".join(f"{value!s:<31}" for value in values).rstrip()


def bus_id(device: int) -> str:
    """Return a PCIe address that differs between devices; no device has it."""
    return f"0000:{0x80 + device:02X}:00.0"


def memory_mb() -> tuple[int, int]:
    """Return used and total memory of the host in MB, which is what the devices live in."""
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) >> 20, memory.total >> 20


def board(device: int, name: str) -> list[tuple[str, object]]:
    return [
        ("NPU ID", device),
        ("Product Name", MARK),
        ("Model", "NA"),
        ("Manufacturer", "NA"),
        ("Serial Number", "NA"),
        ("Software Version", SIMULATED_VERSION),
        ("Firmware Version", "NA"),
        ("Compatibility", "NA"),
        ("Board ID", "NA"),
        ("PCIe Bus Info", bus_id(device)),
        ("Chip Count", 1),
        ("Chip Name", name),
    ]


def health(device: int, name: str) -> list[tuple[str, object]]:
    return [("Health", "OK"), ("Error Code", "NA"), ("Error Information", MARK)]


def memory(device: int, name: str) -> list[tuple[str, object]]:
    return [("NPU ID", device), ("Chip Count", 1), ("HBM Capacity(MB)", memory_mb()[1]), ("Chip ID", 0)]


def usages(device: int, name: str) -> list[tuple[str, object]]:
    used, total = memory_mb()
    return [
        ("NPU ID", device),
        ("Chip Count", 1),
        ("HBM Capacity(MB)", total),
        ("HBM Usage Rate(%)", 100 * used // total),
        ("Aicore Usage Rate(%)", 0),
        ("Aivector Usage Rate(%)", 0),
        ("Aicpu Usage Rate(%)", 0),
        ("Ctrlcpu Usage Rate(%)", 0),
        ("HBM Bandwidth Usage Rate(%)", 0),
        ("Chip ID", 0),
    ]


def common(device: int, name: str) -> list[tuple[str, object]]:
    return [
        ("NPU ID", device),
        ("Chip Count", 1),
        ("Chip ID", 0),
        ("Memory Usage Rate(%)", 0),
        ("HBM Usage Rate(%)", 100 * memory_mb()[0] // memory_mb()[1]),
        ("Aicore Usage Rate(%)", 0),
        ("Aicore Freq(MHZ)", "NA"),
        ("Temperature(C)", "NA"),
        ("NPU Real-time Power(W)", "NA"),
    ]


DETAILS = {"board": board, "common": common, "health": health, "memory": memory, "usages": usages}


def topology(count: int) -> list[str]:
    """Return a table of ``NA``: npu-smi has no name for devices in one memory."""
    names = [f"NPU{device}" for device in range(count)]
    lines = ["\t   " + "".join(f"{name:<11}" for name in names) + "CPU Affinity"]
    for row, name in enumerate(names):
        links = "".join(f"{'X' if row == column else 'NA':<11}" for column in range(count))
        lines.append(f"{name:<11}{links}NA")
    return [*lines, "", "Legend:", "", "  X    = Self", f"  NA   = Unknown relationship. {MARK}"]


def overview(count: int, name: str) -> list[str]:
    """``npu-smi info``: two lines a device, then the processes, which are not followed here."""
    used, total = memory_mb()
    rule, double = line_of(WIDTHS, "-"), line_of(WIDTHS, "=")
    wide = sum(WIDTHS) + len(WIDTHS) - 1
    lines = [
        "+" + "-" * wide + "+",
        "|" + f" npu-smi {SIMULATED_VERSION}   Version: {SIMULATED_VERSION}   {MARK}".ljust(wide) + "|",
        rule,
    ]
    lines.append(row(WIDTHS, " NPU   Name", " Health", " Power(W)    Temp(C)           Hugepages-Usage(page)"))
    lines.append(row(WIDTHS, " Chip  Phy-ID", " Bus-Id", " AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)"))
    lines.append(double)
    for device in range(count):
        lines.append(row(WIDTHS, f" {device:<5} {name}", " OK", " NA          NA                0    / 0"))
        figures = f" 0           0    / 0          {used:<5}/ {total}"
        lines += [row(WIDTHS, f" 0     {device}", f" {bus_id(device)}", figures), double]
    rule, double = line_of(PROCESS_WIDTHS, "-"), line_of(PROCESS_WIDTHS, "=")
    lines[-1] = rule
    lines.append(row(PROCESS_WIDTHS, " NPU     Chip", " Process id", " Process name", " Process memory(MB)"))
    lines.append(double)
    for device in range(count):
        lines += ["|" + f" No running processes found in NPU {device}".ljust(wide) + "|", double]
    lines[-1] = rule
    return lines


def line_of(widths: Sequence[int], filling: str) -> str:
    return "+" + "+".join(filling * width for width in widths) + "+"


def row(widths: Sequence[int], *cells: str) -> str:
    return "|" + "|".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + "|"


if __name__ == "__main__":
    sys.exit(main())
