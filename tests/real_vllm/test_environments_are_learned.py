"""``megascend rl`` with a real vLLM learns a task with a tool and a game of several turns."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from support.forked_programs import run_command
from support.page import page_files, run_page_command
from support.vllm_server import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
DEADLINE_S = 900
PAGE = "environments.md"
MODEL = "megascend new-model model --layers 3 --hidden 128 --heads 4 --context 64"
"""vLLM's attention wants heads of 32 or more."""

GAME = """
import random

BEATEN_BY = {"r": "p", "p": "s", "s": "r"}


class Rounds:
    \"\"\"Play rock, paper, scissors for three rounds against a player who moves first.\"\"\"

    async def run(self, policy, example):
        draw, move, won = random.Random(example["seed"]), example["prompt"], 0
        conversation = policy.conversation(move)
        for turn in range(3):
            won += await conversation.reply() == BEATEN_BY[move] + "."
            if conversation.full or turn == 2:
                break
            move = draw.choice("rps")
            conversation.add(move)
        return conversation.trajectory(won / 3)
"""
"""A player who pays no attention wins a third of the rounds."""


def write_files(folder: Path) -> None:
    """Write the page's files, with a vLLM in place of the local engine."""
    for name, text in page_files(PAGE).items():
        if name == "calculator.yaml":
            assert "engines: [local]" in text
            vllm = f"engines: [vllm]\nvllm: {{python: {vllm_python()}, options: [--max-num-seqs=64]}}"
            text = text.replace("engines: [local]", vllm)
        (folder / name).write_text(text, encoding="utf-8")


def rewards_of_run(run_file: Path, *settings: str) -> tuple[float, float]:
    """Run ``megascend rl``; return the rewards of the evaluation before and after."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    completed = run_command("rl", run_file, *overrides, directory=run_file.parent, timeout_s=DEADLINE_S)
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    rewards = re.search(r"reward ([\d.]+) before and ([\d.]+) after", completed.stdout)
    assert rewards is not None, completed.stdout[-3000:]
    return float(rewards[1]), float(rewards[2])


def assert_engine_agrees(output: Path, turns: float) -> None:
    """Check that vLLM sampled from the trainer's weights: without lag, the log-probabilities differ by rounding."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").open(encoding="utf-8")]
    assert max(row["mismatch_max"] for row in rows) < 1e-3
    assert max(row["turns"] for row in rows) > turns


def test_model_learns_to_use_a_tool(tmp_path: Path) -> None:
    write_files(tmp_path)
    for command in ("python make_problems.py", MODEL, "megascend train warm_up.yaml"):
        run_page_command(command, tmp_path, DEADLINE_S)
    before, after = rewards_of_run(tmp_path / "calculator.yaml", "rollout.max_lag=0", "steps=40", "evaluation.every=40")
    assert after > before + 0.2
    assert_engine_agrees(tmp_path / "runs" / "calculator", 1.2)


def test_model_learns_a_game_of_three_turns(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "game.py").write_text(GAME, encoding="utf-8")
    draw = random.Random(0)
    with (tmp_path / "solved.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(2000):  # moves at random
            moves = [draw.choice("rps") for _ in range(6)]
            text = "".join(move + "." * (number % 2 == 0) for number, move in enumerate(moves[1:]))
            print(json.dumps({"prompt": moves[0], "completion": text}), file=file)
    # So many games that no constant answer wins more than a third of them: with sixteen, the best one wins 0.4, and a run that
    # settles on it leaves it by chance, in 10 steps or in more than 80.
    for name, seeds in (("problems.jsonl", range(512)), ("held_out.jsonl", range(1000, 1032))):
        with (tmp_path / name).open("w", encoding="utf-8") as file:
            for seed in seeds:
                print(json.dumps({"prompt": draw.choice("rps"), "seed": seed}), file=file)
    for command in (MODEL, "megascend train warm_up.yaml"):
        run_page_command(command, tmp_path, DEADLINE_S)
    before, after = rewards_of_run(
        tmp_path / "calculator.yaml",
        "rollout.environment.name=game.py:Rounds",
        "rollout.stop=[.]",
        "rollout.max_tokens=2",
        "rollout.max_lag=0",
        "optimizer.lr=5e-4",
        "steps=80",
        "evaluation.every=80",
    )
    assert after > before + 0.3
    assert_engine_agrees(tmp_path / "runs" / "calculator", 2.5)
