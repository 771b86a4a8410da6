"""``megascend generate`` and ``megascend chat``, compared with the greedy answers of transformers and peft."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megascend.apps.train.exports import run_template_options
from megascend.apps.train.inference import json_line
from support import forked_programs
from support.forked_programs import run_command
from support.runs import chats, reference, write_lines, write_run

CONVERSATIONS = [
    [{"role": "user", "content": "one?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "red, or blue?"}],
]
TEXT = "once upon a time"
LENGTH = 12

# Greedy tokens after each prompt, by the likeliest token of a full forward pass, until the end of a turn.
GREEDY = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float()
if sys.argv[2] != "none":
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, sys.argv[2])
model.eval()
stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
answers = []
for prompt in json.loads(sys.argv[3]):
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = []
    while len(tokens) < int(sys.argv[4]):
        with torch.no_grad():
            token = int(model(torch.tensor([ids + tokens])).logits[0, -1].argmax())
        tokens.append(token)
        if token in stops:
            break
    answers.append([tokenizer.decode([t for t in tokens if t not in stops], skip_special_tokens=True), len(tokens)])
print(json.dumps(answers))
"""


def greedy(model: Path, prompts: list, adapter: Path | None = None) -> list[tuple[str, int]]:
    """Return texts and numbers of tokens of transformers' answers."""
    answers = reference(GREEDY, model, adapter or "none", json.dumps(prompts), str(LENGTH))
    return [(text, count) for text, count in answers]


@pytest.fixture(scope="module")
def folder(megascend, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create prompts, and a run with an adapter that has learned to answer otherwise."""
    tmp_path = tmp_path_factory.mktemp("generate")
    lines = [*({"messages": messages, "id": number} for number, messages in enumerate(CONVERSATIONS)), {"prompt": TEXT}]
    write_lines(tmp_path / "prompts.jsonl", lines)
    write_lines(tmp_path / "data.jsonl", chats([("one?", "two")]))
    write_run(
        tmp_path,
        model=str(small_model),
        output="run",
        data={"path": "data.jsonl", "global_batch_size": 1},
        steps=60,
        engine="single",
        lora={"rank": 8, "alpha": 32},
        optimizer={"lr": 0.01},
    )
    megascend("train", "run.yaml", cwd=tmp_path)
    return tmp_path


COMMON = ("--dtype", "fp32", "--platform", "cpu", "--max-tokens", str(LENGTH))


@pytest.mark.parametrize(
    "layout",
    [
        ["--engine", "megatron"],
        pytest.param(["--engine", "megatron", "--nproc", "2", "--tensor", "2"], marks=pytest.mark.nightly),
        pytest.param(["--engine", "fsdp", "--nproc", "2"], marks=pytest.mark.nightly),
    ],
    ids=["one rank", "TP2", "fsdp"],  # covered: layouts by sampling/test_embedded_sampler.py
)
def test_answers_equal_those_of_transformers_on_every_engine(
    megascend, folder: Path, small_model: Path, tmp_path: Path, layout: list[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    megascend("generate", small_model, folder / "prompts.jsonl", "-o", out, *COMMON, *layout)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("id") for line in lines] == [0, 1, None]
    assert [(line["response"], line["tokens"]) for line in lines] == greedy(small_model, [*CONVERSATIONS, TEXT])
    repeated = megascend("generate", small_model, folder / "prompts.jsonl", "-o", out, *COMMON, *layout, code=2)
    assert "exists; choose another file" in repeated.stderr


def test_adapters_answer_by_name_and_as_peft_does(megascend, folder: Path, small_model: Path, tmp_path: Path) -> None:
    prompts = [{"messages": CONVERSATIONS[0]}, {"messages": CONVERSATIONS[0], "adapter": None}]
    write_lines(tmp_path / "prompts.jsonl", prompts)
    # A run directory stands for its adapter on its base model.
    completed = megascend("generate", folder / "run", tmp_path / "prompts.jsonl", *COMMON)
    adapted, plain = (json.loads(line) for line in completed.stdout.splitlines())
    assert [(adapted["response"], adapted["tokens"])] == greedy(
        small_model, CONVERSATIONS[:1], folder / "run" / "adapter"
    )
    assert (adapted["response"], adapted["finish_reason"]) == ("two", "stop")
    assert [(plain["response"], plain["tokens"])] == greedy(small_model, CONVERSATIONS[:1])
    write_lines(tmp_path / "named.jsonl", [prompts[0] | {"adapter": "b"}, prompts[0]])
    names = ("--adapter", f"a={folder / 'run'}", "--adapter", f"b={folder / 'run'}")
    completed = megascend("generate", small_model, tmp_path / "named.jsonl", *COMMON, *names)
    # Of two adapters none is the default.
    assert [json.loads(line)["response"] for line in completed.stdout.splitlines()] == ["two", plain["response"]]
    completed = megascend("generate", small_model, tmp_path / "named.jsonl", *COMMON, code=2)
    assert "a prompt names the adapter 'b'; --adapter NAME=DIR has loaded: none" in completed.stderr


def test_lines_of_text_from_standard_input_are_turns_and_long_ones_fail_alone(small_model: Path) -> None:
    lines = f"one?\n{'x' * 400}\n"
    completed = run_command("generate", small_model, "-", "--text", *COMMON[:4], stdin=lines)
    assert completed.returncode == 2, completed.stderr
    first, second = (json.loads(line) for line in completed.stdout.splitlines())
    # Without --max-tokens an answer is as long as the context allows, of 256 tokens here.
    [(text, _)] = greedy(small_model, CONVERSATIONS[:1])
    assert first["response"].startswith(text)
    assert LENGTH < first["tokens"] < 256
    assert "response" not in second
    assert "256" in second["error"]
    assert "1 of 2 prompts could not be answered" in completed.stderr


class Terminal:
    """A command on a pseudo-terminal; killed at the end of the context."""

    def __init__(self, *arguments: str | Path) -> None:
        self._main, terminal = pty.openpty()
        environment = forked_programs.environment(TERM="dumb")
        command = [sys.executable, "-m", "megascend.apps.cli.main", *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
        )
        os.close(terminal)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    def until(self, ending: str, timeout_s: float = 240) -> str:
        """Return the output up to ``ending``; fail after the deadline."""
        output, deadline = b"", time.monotonic() + timeout_s
        while not output.replace(b"\r\n", b"\n").endswith(ending.encode()):
            ready, _, _ = select.select([self._main], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {ending!r} within {timeout_s:g} s: {output!r}"
            output += os.read(self._main, 1)
        return output.decode("utf-8", "replace").replace("\r\n", "\n")

    def write(self, line: str) -> None:
        """Type a line."""
        os.write(self._main, f"{line}\n".encode())

    def wait(self) -> int:
        """Return the exit code."""
        return self._process.wait(timeout=60)


def test_chat_continues_the_conversation_until_it_is_reset(folder: Path, small_model: Path) -> None:
    first = CONVERSATIONS[0]
    (answer, _), *_ = greedy(small_model, [first])
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    ((further, _),) = greedy(small_model, [second])
    with Terminal("chat", small_model, *COMMON, "--temperature", "0") as terminal:
        assert "/reset begins again" in terminal.until("\n> ")
        terminal.write("one?")
        reply = terminal.until("\n> ")
        assert answer in reply
        terminal.write("more")
        assert further in terminal.until("\n> ")
        terminal.write("/nothing")
        assert "/nothing is not a command" in terminal.until("\n> ")
        terminal.write("/reset")
        assert "a new conversation" in terminal.until("\n> ")
        terminal.write("one?")
        # The same as at first: nothing of the conversation is left.
        assert terminal.until("\n> ") == reply
        terminal.write("x" * 400)
        assert "/reset begins again" in terminal.until("\n> ")
        terminal.write("/exit")
        assert terminal.wait() == 0


def test_variables_of_the_runs_chat_template_are_those_of_its_answers(tmp_path: Path) -> None:
    settings = {"data": {"path": "d.jsonl", "chat_template_options": {"enable_thinking": False}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    for folder in ("hf", "adapter", "copied"):
        (tmp_path / folder).mkdir()
    assert (
        run_template_options(tmp_path / "hf")
        == run_template_options(tmp_path / "adapter")
        == {"enable_thinking": False}
    )
    assert run_template_options(tmp_path / "copied") == run_template_options(tmp_path) == {}


def test_line_that_cannot_be_encoded_is_written_with_escapes() -> None:
    line = {"id": "\ud83d", "response": "é"}
    assert json.loads(json_line(line, "utf-8").encode()) == line
    assert json_line({"response": "é"}, "utf-8") == '{"response": "é"}'
    assert json_line({"response": "é"}, "ascii") == '{"response": "\\u00e9"}'


def test_chat_with_a_run_answers_as_it_was_trained(folder: Path) -> None:
    completed = run_command("chat", folder / "run", *COMMON, "--temperature", "0", stdin="one?\n")
    assert completed.returncode == 0, completed.stderr
    assert "> two\n" in completed.stdout
