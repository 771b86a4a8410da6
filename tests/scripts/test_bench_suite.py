"""``scripts/bench.py``: comparison of ratios, isolation of failed lines, and one real line."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from bench import gate, lines, runner, running, suite
from bench.gate import Row, Stored

SCRIPTS = runner.SCRIPTS

STORED = Stored(
    "NVIDIA H200", "full", {"moe/a": (3.0, 0.04), "moe/b": (1.0, 0.25), "load/c": (0.7, 0.25)}, {"torch": "1"}
)


def row(name: str, ratio: float | None, noise: float = 0.04) -> Row:
    return Row(name, 1.0, "s", ratio, "something", noise)


def test_compare_fails_when_ratio_drops_beyond_noise() -> None:
    verdict = gate.compare([row("moe/a", 2.9), row("moe/b", 0.76)], STORED, ["moe"])
    assert verdict == gate.Verdict()
    assert verdict.passed

    fallen = gate.compare([row("moe/a", 2.85), row("moe/b", 9.0)], STORED, ["moe"])
    assert fallen.fallen == ("moe/a: 2.850, 3.000 stored: 5.0% less, noise is 4%",)
    assert not fallen.passed


@pytest.mark.parametrize("rows", [[], [row("moe/a", None)], [row("moe/a", math.nan)]])
def test_compare_reports_missing_ratios_of_requested_lines(rows: list[Row]) -> None:
    verdict = gate.compare([*rows, row("moe/b", 1.0)], STORED, ["moe"])
    assert [entry.partition(":")[0] for entry in verdict.missing] == ["moe/a"], "load was not requested"
    assert not verdict.passed


def test_compare_passes_new_ratios() -> None:
    verdict = gate.compare([row("save/d", 1.0), row("save/no ratio", None)], STORED, ["save"])
    assert verdict.new == ("save/d",)
    assert verdict.passed


def test_merged_keeps_stored_ratios_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / gate.file_name("NVIDIA H200", "full")
    assert path.name == "nvidia-h200.json"
    assert gate.file_name("CPU", "tiny") == "cpu-tiny.json"
    gate.write(path, STORED)
    assert gate.read(path) == STORED
    after = gate.merged(
        gate.read(path), [row("moe/a", 3.5, 0.1), row("moe/d", None)], "NVIDIA H200", "full", {"torch": "2"}
    )
    assert after.ratios == {"moe/a": (3.5, 0.1), "moe/b": (1.0, 0.25), "load/c": (0.7, 0.25)}
    assert after.versions == {"torch": "2"}
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no stored ratios"):
        gate.read(path)


def test_refusal_names_other_device_or_scale() -> None:
    assert gate.refusal(STORED, "NVIDIA H200", "full") == ""
    assert gate.refusal(STORED, "CPU", "full") == "the stored ratios are of NVIDIA H200, this is CPU"
    assert "scale full" in gate.refusal(STORED, "NVIDIA H200", "tiny")


def test_select_accepts_lines_and_suites() -> None:
    assert [line.name for line in lines.select("dense,start")] == ["dense-1.7b", "dense-4b", "start"]
    assert [line.name for line in lines.select("dense-4b")] == ["dense-4b"]
    assert len({line.name for line in lines.select(None)}) == len(lines.LINES)
    with pytest.raises(ValueError, match=r"--only dens: there are dense, dense-1\.7b"):
        lines.select("dens")


def test_line_options_are_those_of_their_benchmarks() -> None:
    for line in lines.LINES:
        bench = import_module(f"bench.{line.bench}")
        sizes = [size.options for size in line.sizes] or [()]
        for options in (line.tiny, *([*line.full, *size] for size in sizes)):
            runner.parse(bench, ["--platform", "cpu", "--json", "result.json", *options])


CARDS = {
    "H200": 139.8,
    "GH200 96 GB": 94.5,
    "H100 80 GB": 79.1,
    "A100 64 GB": 63.4,
    "L40S": 44.4,
    "A100 40 GB": 39.4,
    "RTX 4090": 23.5,
}
"""GiB that torch reports as a device's total memory."""


@pytest.mark.parametrize(
    ("card", "names"),
    [
        ("H200", ["dense-1.7b@28-layers", "dense-4b@36-layers", "moe@6-layers"]),
        ("GH200 96 GB", ["dense-1.7b@28-layers", "dense-4b@18-layers", "moe@4-layers"]),
        ("H100 80 GB", ["dense-1.7b@28-layers", "dense-4b@18-layers", "moe@4-layers"]),
        ("A100 64 GB", ["dense-1.7b@28-layers", "dense-4b@9-layers", "moe@2-layers"]),
        ("L40S", ["dense-1.7b@14-layers", "dense-4b@9-layers", None]),
        ("A100 40 GB", [None, None, None]),
        ("RTX 4090", [None, None, None]),
    ],
)
def test_sized_takes_largest_size_that_fits(card: str, names: list[str | None]) -> None:
    for line, name in zip(lines.select("dense,moe"), names, strict=True):
        if name is None:
            with pytest.raises(
                ValueError, match=rf"-layers, needs \d+ GiB of device memory; this device has {CARDS[card]}"
            ):
                lines.sized(line, CARDS[card])
            continue
        chosen = lines.sized(line, CARDS[card])
        assert chosen.name == name
        count = name.partition("@")[2].partition("-")[0]
        assert chosen.full[chosen.full.index("--layers") + 1] == count
        assert chosen.full.count("--layers") == 1


def test_sizes_descend_and_lines_without_sizes_are_unchanged() -> None:
    for line in lines.LINES:
        needs = [size.gib for size in line.sizes]
        assert needs == sorted(needs, reverse=True)
        assert line.sizes or lines.sized(line, 1.0) is line


def test_stored_ratios_match_lines_and_sizes() -> None:
    names = {f"{line.name}@{size.label}" for line in lines.LINES for size in line.sizes}
    names |= {line.name for line in lines.LINES if not line.sizes}
    for path in (SCRIPTS.parent / "benchmarks").glob("*.json"):
        assert {name.partition("/")[0] for name in gate.read(path).ratios} <= names, path.name


def test_training_rows_are_relative_to_first_run() -> None:
    runs = [{"run": "bare", "ms": [100.0, 102.0, 98.0]}, {"run": "megascend", "ms": [80.0, 80.0, 200.0]}]
    rows = lines.training("moe", {"work": {"sequences": 8, "length": 100}, "runs": runs})
    assert [(row.name, row.value, row.ratio) for row in rows] == [
        ("moe/bare", 8000.0, None),
        ("moe/megascend", 10000.0, 1.25),
    ]


def test_file_rows_compare_fastest_times() -> None:
    make = lines.files("ours", against="reads", of="parallel direct reads")
    rows = make("load", {"seconds": {"reads": [4.0, 2.0], "ours": [4.0]}})
    assert [(row.name, row.ratio) for row in rows] == [("load/reads", None), ("load/ours", 0.5)]


def test_small_rows_omit_ratio_without_device_time() -> None:
    request = {"24": {"step": [30.0], "device": math.nan}}
    graphs = {"24": {"step": [10.0], "device": 9.0}}
    rows = lines.small("small", {"eager": {"request": request}, "graphs": {"request": graphs}})
    assert {row.name: row.ratio for row in rows} == {
        "small/24 eager": None,
        "small/24 graphs": 3.0,
        "small/24 graphs, busy": 0.9,
    }


def python(program: str, arguments: list[str]) -> list[str]:
    return [sys.executable, program, *arguments]


def script(folder: Path, name: str, body: str) -> lines.Line:
    """Build a line measured by a short program, which writes its figures to ``result``."""
    path = folder / f"{name}.py"
    path.write_text(f"import json, sys, time, os\nresult = sys.argv[-1]\n{body}\n")
    rows = lambda name, figures: [Row(f"{name}/x", figures["x"], "s", figures["x"], "one")]  # noqa: E731
    return lines.Line(name, name, str(path), (), (), rows, 60.0, "")


def test_failed_line_is_reported_and_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = "json.dump({}, open(result, 'w'))"
    scripts = [
        script(tmp_path, "broken", "print('what it said'); sys.exit('no such thing')"),
        script(tmp_path, "slow", "time.sleep(600)"),
        script(tmp_path, "strange", write.format('{"y": 1}')),
        script(tmp_path, "silent", "pass"),
        script(tmp_path, "good", write.format('{"x": 2.0}')),
    ]
    monkeypatch.setattr(suite, "command", python)
    monkeypatch.setattr(suite, "TINY_DEADLINE_S", 10.0)
    monkeypatch.setattr(suite, "BENCHMARKS", tmp_path / "benchmarks")
    monkeypatch.setattr(suite, "this_device", lambda platform: ("Test 1", 80.0))
    monkeypatch.setattr(suite, "select", lambda only: [line for line in scripts if only in (None, line.name)])
    report = tmp_path / "out" / "report.json"

    assert suite.main(["--tiny", "--json", str(report), "--store"]) == 1
    output = capsys.readouterr().out
    assert re.search(r"broken: \d+ s, FAILED: exit code 1\n    what it said\n    no such thing", output)
    assert "FAILED: not done after its deadline of 10 s" in output
    assert "FAILED: its figures cannot be read: KeyError('x')" in output
    assert "FAILED: exit code 0, but no figures" in output
    assert "failed: broken, slow, strange, silent" in output
    stored_report = json.loads(report.read_text())
    assert [(row["name"], row["ratio"]) for row in stored_report["rows"]] == [("good/x", 2.0)]
    assert stored_report["lines"]["slow"]["seconds"] < 60

    assert suite.main(["--tiny", "--only", "good", "--compare"]) == 0
    script(tmp_path, "good", write.format('{"x": 1.9}'))
    assert suite.main(["--tiny", "--only", "good", "--compare"]) == 1
    assert "FALLEN  good/x: 1.900, 2.000 stored" in capsys.readouterr().out

    assert suite.main(["--only", "good", "--compare"]) == 3
    assert "NOT COMPARED: no ratios are stored for Test 1, scale full" in capsys.readouterr().out
    monkeypatch.setattr(suite, "this_device", lambda platform: ("Test 2", 80.0))
    stored = str(tmp_path / "benchmarks" / "test-1-tiny.json")
    assert suite.main(["--tiny", "--only", "good", "--compare", stored]) == 3
    assert "the stored ratios are of Test 1, this is Test 2" in capsys.readouterr().out


def test_size_is_printed_and_part_of_stored_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use a line of two sizes whose figure is its option: 2.0 at 50 GiB and 3.0 at 100."""
    plain = script(tmp_path, "work", "json.dump({'x': float(sys.argv[-3])}, open(result, 'w'))")
    line = replace(plain, sizes=(lines.Size("big", 100.0, ("3.0",)), lines.Size("small", 50.0, ("2.0",))))
    monkeypatch.setattr(suite, "BENCHMARKS", tmp_path / "benchmarks")
    monkeypatch.setattr(suite, "select", lambda only: [line])
    monkeypatch.setattr(suite, "command", python)
    stored = tmp_path / "benchmarks" / "test.json"

    def run(memory_gib: float, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(suite, "this_device", lambda platform: ("Test", memory_gib))
        return suite.main(options), capsys.readouterr().out

    code, output = run(80.0, "--store")
    assert code == 0
    assert "work: runs as work@small: big needs 100 GiB of device memory, this device has 80.0" in output
    assert gate.read(stored).ratios == {"work@small/x": (2.0, 0.04)}
    code, output = run(120.0, "--compare")
    assert code == 0
    assert "new     work@big/x: nothing stored" in output
    assert "runs as" not in output
    assert run(120.0, "--store")[0] == 0
    assert gate.read(stored).ratios == {"work@small/x": (2.0, 0.04), "work@big/x": (3.0, 0.04)}
    code, output = run(40.0)
    assert code == 1
    assert "work: FAILED: its smallest size, small, needs 50 GiB of device memory; this device has 40.0" in output


def parent(folder: Path, child: Path) -> lines.Line:
    """Build a line whose program starts a child process, writes its PID to ``child``, and waits."""
    body = "import subprocess\nstarted = subprocess.Popen(['sleep', '600'])\n"
    body += f"open({str(child)!r} + '.new', 'w').write(str(started.pid))\n"
    return script(folder, "parent", body + f"os.rename({str(child)!r} + '.new', {str(child)!r})\ntime.sleep(600)")


def ended(pid: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while running_process(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running_process(pid)


def test_run_ends_descendants_at_the_deadline_of_a_line(tmp_path: Path) -> None:
    line = parent(tmp_path, tmp_path / "pid")
    for deadline_s in (2.0, 60.0):  # on a busy machine the child may not start within the first deadline
        outcome = running.run(python(line.bench, []), tmp_path / "result.json", tmp_path / "log", deadline_s)
        assert outcome.figures is None
        if (tmp_path / "pid").is_file():
            break
    assert ended(int((tmp_path / "pid").read_text()))


def test_sigterm_ends_the_running_line(tmp_path: Path) -> None:
    line, child = parent(tmp_path, tmp_path / "pid"), tmp_path / "pid"
    program = "import sys; from pathlib import Path; from bench import running, suite; suite.end_on_sigterm(); "
    program += f"running.run({python(line.bench, [])!r}, Path('result.json'), Path('log'), 300.0)"
    path = os.pathsep.join([str(SCRIPTS), *filter(None, sys.path)])
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    try:
        deadline = time.monotonic() + 60
        while not child.is_file() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert ended(int(child.read_text()))


def running_process(pid: int) -> bool:
    """Check whether a process exists and is not a zombie that init has not reaped."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.nightly  # covered: a line that fails; rows of stored figures
def test_save_line_produces_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--tiny", "--platform", "cpu", "--only", "save"]) == 0
    names = {line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("save/")}
    disk = {"save/plain file written", "save/plain files at once"}
    assert names == disk | {"save/sync", "save/async, training waits", "save/load"}
