"""Every bad input causes exit code 2 and one message with value, limit and setting, in seconds, and leaves nothing behind.

The tables are in ``bad_inputs``. All rows run in this process, some also as separate commands.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from bad_inputs import BAD_INPUTS, Bad

from megascend.apps.cli.main import app
from support.forked_programs import COMMAND, environment, run_forked

LIMIT_S = 30
"""Limit of processor time."""
WAIT_S = 300
"""Limit of a command that is not refused: one that serves would never end."""
AS_COMMANDS = (
    "data: text, not JSON",
    "data: lengths, above the context",
    "data: template, not a template",
    "settings: run file, Latin-1",
    "model: weights cut off",
    "command: options, more processes than cores",
    "command: environment, WORLD_SIZE in words",
    "command: rl, another function",
)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "MEGASCEND_DEBUG")


@pytest.fixture
def folder(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a valid run in the current directory."""
    chat = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]}
    (tmp_path / "model").symlink_to(small_model)
    (tmp_path / "data.jsonl").write_text(json.dumps(chat) + "\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one?"}\n')
    run = {"model": "model", "output": "out", "data": {"path": "data.jsonl"}, "steps": 1, "platform": "cpu"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    del run["data"]
    rollout = {"prompts": "prompts.jsonl", "reward": "operator:eq", "max_tokens": 8}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(run | {"rollout": rollout}, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    # A command in this process adds its directory: with another path, the next one of its own would wait for another server.
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    bad = BAD_INPUTS[name]
    bad.arrange(folder)
    for variable, value in bad.variables.items():
        monkeypatch.setenv(variable, value)
    before, children, start = tree(folder), psutil.Process().children(), time.process_time()
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("not refused: the command still runs"))
    signal.alarm(WAIT_S)
    try:
        with pytest.raises(SystemExit) as ended:
            app([*bad.command], prog_name="megascend")
    finally:
        signal.alarm(0)
    assert time.process_time() - start < LIMIT_S
    out, err = capfd.readouterr()
    check(bad, ended.value.code, out, err)
    assert tree(folder) == before
    assert psutil.Process().children() == children


@pytest.mark.parametrize("name", AS_COMMANDS)
def test_bad_input_as_a_command(name: str, folder: Path) -> None:
    bad = BAD_INPUTS[name]
    bad.arrange(folder)
    before = tree(folder)
    limited = f"import resource\nresource.setrlimit(resource.RLIMIT_CPU, ({LIMIT_S}, {LIMIT_S}))\n{COMMAND}"
    variables = {name: value for name, value in environment(**bad.variables).items() if name not in VARIABLES}
    completed = run_forked(limited, *bad.command, directory=folder, variables=variables | bad.variables)
    check(bad, completed.returncode, completed.stdout, completed.stderr)
    assert tree(folder) == before
    assert list(processes_in(folder)) == []


def check(bad: Bad, code: object, out: str, err: str) -> None:
    assert code == 2, err
    assert out == "", "error messages go to stderr"
    # What had begun before is no message of the error.
    first, *continuation = [line for line in err.splitlines() if not line.startswith("megascend: ")]
    assert first.split(":")[0].split(" ")[0].endswith("Error"), err
    assert all(line.startswith("  ") for line in continuation), f"more than one message:\n{err}"
    missing = [word for word in bad.words if word not in err]
    assert not missing, f"missing in the message: {missing}\n{err}"


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return all files in a folder with their content, except ranks' error files in ``out/errors``."""
    contents: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "__pycache__" in name:  # compiled modules of the user
            continue
        if name.startswith("out/errors") or (
            name == "out" and path.is_dir() and [*path.iterdir()] == [path / "errors"]
        ):
            continue
        plain = path.is_file() and not path.is_symlink() and path.suffix != ".safetensors"
        contents[name] = path.read_bytes() if plain else None
    return contents


def processes_in(folder: Path) -> Iterator[int]:
    """Yield the processes whose working directory or command line refers to a folder."""
    for process in psutil.process_iter(["pid", "ppid", "cwd", "cmdline"]):
        words = [process.info["cwd"] or "", *(process.info["cmdline"] or [])]
        is_this_test = os.getpid() in (
            process.info["pid"],
            process.info["ppid"],
        )  # the process that is forked is a child
        if not is_this_test and any(str(folder) in word for word in words):
            yield process.info["pid"]
