"""Every bad input is exit code 2 and one message that names value, limit and setting, in seconds; nothing is left behind.

The tables are in ``bad_inputs``. All of it runs in this process; some as commands of their own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from bad_inputs import BAD_INPUTS, Bad

from megascend.cli.main import app
from support.forked_programs import COMMAND, environment, run_forked

LIMIT_S = 30
"""Of processor time."""
AS_COMMANDS = (
    "data: text, not JSON",
    "data: files, a link to nothing",
    "data: columns, two forms",
    "data: messages, three problems at once",
    "data: lengths, above the context",
    "data: lengths, max_length above the context",
    "data: template, not a template",
    "settings: run file, Latin-1",
    "settings: run file, a key twice",
    "settings: keys, unknown",
    "settings: values, lr NaN",
    "settings: layout, attention heads",
    "model: weights cut off",
    "model: a tokenizer of one token",
    "command: options, more processes than cores",
    "command: options, processes in words",
    "command: options, new-model: experts of a dense one",
    "command: options, export: below a file",
    "command: output, below a file",
    "command: output, overwritten and resumed",
    "command: environment, WORLD_SIZE in words",
    "command: rl, another function",
)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "MEGASCEND_DEBUG")


def test_there_are_enough() -> None:
    assert len(BAD_INPUTS) >= 150
    assert len(AS_COMMANDS) >= 20


@pytest.fixture
def folder(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What would work, as the present directory."""
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
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_input(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = BAD_INPUTS[name]
    bad.arrange(folder)
    for variable, value in bad.variables.items():
        monkeypatch.setenv(variable, value)
    before, children, start = tree(folder), psutil.Process().children(), time.process_time()
    with pytest.raises(SystemExit) as ended:
        app([*bad.command], prog_name="megascend")
    assert time.process_time() - start < LIMIT_S
    out, err = capfd.readouterr()
    check(bad, ended.value.code, out, err)
    assert tree(folder) == before
    assert psutil.Process().children() == children


@pytest.mark.parametrize("name", AS_COMMANDS)
def test_a_bad_input_as_a_command(name: str, folder: Path) -> None:
    bad = BAD_INPUTS[name]
    bad.arrange(folder)
    before = tree(folder)
    limited = f"import resource\nresource.setrlimit(resource.RLIMIT_CPU, ({LIMIT_S}, {LIMIT_S}))\n{COMMAND}"
    variables = {name: value for name, value in environment(**bad.variables).items() if name not in VARIABLES}
    done = run_forked(limited, *bad.command, directory=folder, variables=variables | bad.variables)
    check(bad, done.returncode, done.stdout, done.stderr)
    assert tree(folder) == before
    assert list(processes_in(folder)) == []


def check(bad: Bad, code: object, out: str, err: str) -> None:
    assert code == 2, err
    assert out == "", "a message of an error goes to stderr"
    first, *others = err.splitlines()
    assert first.split(":")[0].split(" ")[0].endswith("Error"), err
    assert all(line.startswith("  ") for line in others), f"more than one message:\n{err}"
    missing = [word for word in bad.words if word not in err]
    assert not missing, f"not said: {missing}\n{err}"


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder with its content, except that a rank keeps what ended it in ``out/errors``."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "__pycache__" in name:  # Python's own, of a module of the user's
            continue
        if name.startswith("out/errors") or (
            name == "out" and path.is_dir() and [*path.iterdir()] == [path / "errors"]
        ):
            continue
        plain = path.is_file() and not path.is_symlink() and path.suffix != ".safetensors"
        found[name] = path.read_bytes() if plain else None
    return found


def processes_in(folder: Path) -> Iterator[int]:
    """Processes whose present directory or command line lies in a folder."""
    for process in psutil.process_iter(["pid", "ppid", "cwd", "cmdline"]):
        words = [process.info["cwd"] or "", *(process.info["cmdline"] or [])]
        ours = os.getpid() in (process.info["pid"], process.info["ppid"])  # the process that is forked is a child
        if not ours and any(str(folder) in word for word in words):
            yield process.info["pid"]
