"""docs/controller.md: its programs run, its routes are the controller's."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from controller_doubles import KEY, Served, a_seal, an_offer

from megascend.apps.rl.rollout.controller.client import ControllerEngine
from weightwire.keys import ENVIRONMENT, load_key

pytestmark = pytest.mark.waiting

ROOT = Path(__file__).parents[5]
PAGE = (ROOT / "docs" / "controller.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [code for code in PROGRAMS if "asyncio.run" in code]
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/controller.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "{'tokens': [5, 8, 2], 'logprobs': [-0.1, -1.2, -0.3]}\n"
    assert not (tmp_path / "controller.json").exists()


def test_the_program_of_a_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = [code for code in PROGRAMS if "engine.paused" in code]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, KEY)
    with Served(publish="controller.json") as served:
        names = {
            "ControllerEngine": ControllerEngine,
            "load_key": load_key,
            "offer": an_offer("a", 2),
            "seal": a_seal("a"),
        }
        exec(compile(program, "docs/controller.md", "exec"), names)
        assert asyncio.run(names["trainer"]()) == 2  # type: ignore[operator]
        assert [engine.in_force for engine in served.engines] == ["a", "a"]
        assert served.engines[0].calls[-2:] == ["pause 30", "resume"]
