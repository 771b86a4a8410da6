"""Runs of ``megascend train``: the files that they read, the command's options, and what they leave."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
from megascend.config import RunConfig
from megascend.testing.reference import run_reference

DEADLINE_S = 480.0
USUAL: dict[str, Any] = {"platform": "cpu", "precision": "fp32", "plot": False, "self_check": False}
ANSWER_LOGPROBS = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
def load(path):
    return AutoModelForCausalLM.from_pretrained(path).float().eval()
def answer_logprobs(model, tokenizer, question, answer):
    turn = [{"role": "user", "content": question}]
    head = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(head + answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]])
    start = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[start - 1 :]
def loss_of_chats(model, tokenizer, file):
    chats = [[turn["content"] for turn in json.loads(line)["messages"]] for line in open(file)]
    return -torch.cat([answer_logprobs(model, tokenizer, *chat) for chat in chats]).mean().item()
"""
"""Part of a reference program: log-probabilities of an answer's tokens, with the end of the turn, by transformers."""
QUESTIONS = [("one?", "two"), ("red?", "blue and green"), ("up?", "down"), ("left?", "right, as ever")]


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def chats(questions: Sequence[tuple[str, str]] = QUESTIONS) -> list[dict[str, Any]]:
    """Return a conversation for each question with its answer."""
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in questions
    ]


def write_run(folder: Path, **settings: Any) -> None:
    """Write ``run.yaml`` with :data:`USUAL` settings and these."""
    (folder / "run.yaml").write_text(yaml.safe_dump({"output": "out", **USUAL, **settings}))


def sets(*settings: str) -> list[str]:
    """Return ``--set`` before each of the settings."""
    return [part for setting in settings for part in ("--set", setting)]


def tiny_run(folder: Path, texts: Iterable[str] = tuple(f"number {n}" for n in range(4))) -> Path:
    """Write a model of one layer and ``texts.jsonl``; return the folder."""
    write_checkpoint(folder / "model", ModelSize(hidden=32, layers=1, heads=2, kv_heads=2, context=64), 0)
    write_lines(folder / "texts.jsonl", ({"text": text} for text in texts))
    return folder


def run_config(folder: Path, output: Path, **changes: Any) -> RunConfig:
    """Return the settings of a run in ``output`` of what :func:`tiny_run` has written."""
    data = {"path": folder / "texts.jsonl", "global_batch_size": 2}
    values = {"model": folder / "model", "output": output, "data": data, "optimizer": {"lr": 0.01}, **USUAL}
    return RunConfig(**(values | {"export": False, "timeout_s": 60} | changes))


TIMINGS = {"seconds", "step_seconds", "dispatch_seconds", "tokens_per_s", "peak_memory_bytes", "mfu"}


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(run: Path) -> list[dict[str, Any]]:
    """Return :func:`metrics` without times, speed and memory, to compare two runs."""
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in metrics(run)]


def losses(run: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and gradient norm of each step."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(run)]


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a run, or those of one kind."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if kind in (None, event["event"])]


def checkpoints(run: Path) -> list[int]:
    """Return the steps after which a run has checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def exported(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


def reference(program: str, *arguments: Path | str) -> Any:
    """Run a program of transformers or peft, and parse the last line that it prints, if any, as JSON."""
    completed = run_reference(program, *arguments)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout.splitlines()[-1]) if completed.stdout else None


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int = 3, log: Path | None = None) -> None:
    """Wait until a run has logged so many steps; fail if its process ends before, or at the deadline."""
    path, deadline = run / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not (path.exists() and path.read_bytes().count(b"\n") >= steps):
        assert process.poll() is None, log and log.read_text()[-4000:]
        assert time.monotonic() < deadline, "no step within the deadline"
        time.sleep(0.02)
