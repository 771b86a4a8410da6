"""``megascend rollouts``: order, pages, filters and texts, of records as a run writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megascend.apps.cli.main import app
from support.runs import write_lines

ROW = {
    "outcome": "learned",
    "advantage": 0.5,
    "turns": 1,
    "sampled_tokens": 3,
    "finish_reason": "stop",
    "lag": 1,
    "engine": "vllm 0",
    "prompt": "1+1=",
}
TURNS = [
    {"sampled": True, "text": "[1+1]\nplease"},
    {"sampled": False, "text": "\n2;\x1b[2J"},
    {"sampled": True, "text": "x" * 500},
]


def row(step: int, reward: float, response: str, **changes: Any) -> dict[str, Any]:
    values = {"step": step, "prompt_number": 10 * step, "reward": reward, "rewards": {"right": reward - 0.2}}
    return ROW | values | {"versions": [step - 1, step - 1], "response": response} | changes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    earlier = [row(1, 0.2, "3"), row(1, 1.2, "2")]
    later = [
        row(2, 0.2, "4"),
        row(2, 1.2, "2.", rewards={}, outcome="equal", versions=[1, 2]),
        row(2, 0.3, "2", outcome="evaluated", advantage=None, lag=0),
        row(3, 0.7, "".join(turn["text"] for turn in TURNS), segments=TURNS, turns=2, finish_reason="length"),
    ]
    for name, rows in (("rollouts.1.jsonl", earlier), ("rollouts.jsonl", later)):
        write_lines(tmp_path / name, rows)
    with (tmp_path / "rollouts.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "rew')  # a line that the run is writing
    return tmp_path


def rollouts(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["rollouts", str(run), *options])


def chosen(run: Path, *options: str) -> list[tuple[int, float]]:
    return [
        (line["step"], line["reward"])
        for line in map(json.loads, rollouts(run, "--json", *options).output.splitlines())
    ]


def test_orders_filters_and_pages(run: Path) -> None:
    assert chosen(run) == [(3, 0.7), (2, 0.2), (2, 1.2), (2, 0.3), (1, 0.2), (1, 1.2)]
    assert chosen(run, "--sort", "reward") == [(2, 1.2), (1, 1.2), (3, 0.7), (2, 0.3), (2, 0.2), (1, 0.2)]
    assert (2, 0.3) not in chosen(run, "--sort", "advantage")
    assert chosen(run, "--outcome", "evaluated") == [(2, 0.3)]
    # Newest first among equal ones in both directions, and only those that have the part.
    assert chosen(run, "--sort", "right", "--ascending") == [(2, 0.2), (1, 0.2), (2, 0.3), (3, 0.7), (1, 1.2)]
    assert chosen(run, "--sort", "reward", "--limit", "2", "--offset", "1") == [(1, 1.2), (3, 0.7)]
    assert chosen(run, "--outcome", "equal") == chosen(run, "--step", "2", "--min-reward", "1") == [(2, 1.2)]
    assert chosen(run, "--contains", "please") == chosen(run, "--prompt", "30") == [(3, 0.7)]
    assert rollouts(run, "--contains", "nothing like it").output == "no trajectory matches\n"
    assert rollouts(run, "--limit", "2").output.splitlines()[-1] == "2 of 6 trajectories; the next with --offset 2"


def test_unknown_figure_lists_those_of_the_run(run: Path) -> None:
    refused = rollouts(run, "--sort", "rigt")
    assert refused.exit_code == 2
    assert "--sort rigt: no such figure or part of the reward" in refused.stderr
    assert refused.stderr.rstrip().endswith("available: step, reward, advantage, length, lag, turns, right")


def test_texts_show_who_wrote_them(run: Path) -> None:
    first, second = rollouts(run, "--limit", "1").output, rollouts(run, "--outcome", "equal").output
    assert first.splitlines()[:-2] == [
        "step 3  prompt 30  reward 0.7 (right 0.5)  advantage +0.5  lag 1  version 2  2 turns  3 tokens  cut off  vllm 0",
        "  > 1+1=",
        "    [1+1]",
        "    please",
        "  > 2;\ufffd[2J",
        f"    {'x' * 400}...",
    ]
    assert f"    {'x' * 500}\n" in rollouts(run, "--limit", "1", "--full").output
    assert second.splitlines()[0] == (
        "step 2  prompt 20  reward 1.2  advantage +0.5  lag 1  versions 1 to 2  1 turn  3 tokens  complete  dropped: equal  "
        "vllm 0"
    )
