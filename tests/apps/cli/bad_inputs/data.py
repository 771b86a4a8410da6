"""Invalid training data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_inputs.row import UNREADABLE, Bad, chat, data, settings, words

GOOD = '{"text": "one two three"}\n'
SIDES = {"prompt": "one?", "chosen": "two", "rejected": "three"}


def data_path(says: str, make: Callable[[Path], Any], *changes: str) -> Bad:
    """Set ``data.path`` to ``bad.jsonl``, which ``make`` creates."""
    changes = changes or ("data.path=bad.jsonl",)
    return Bad(words(says), settings(*changes, says="").command, lambda folder: make(folder / "bad.jsonl"))


FILES = {
    "nothing there": settings(
        "data.path=nowhere.jsonl", says="data.path | nowhere.jsonl | neither a file nor a folder"
    ),
    "not to be read": data_path("bad.jsonl cannot be read", lambda p: p.symlink_to(UNREADABLE)),
    "an empty file": data("", says="bad.jsonl | no document"),
}
TEXT = {
    "not JSON": data(GOOD + "one two\n", says="bad.jsonl:2 | not valid JSON | column 1"),
    "CSV: no column": data("a,b\n1,2\n", to="bad.csv", says="bad.csv:2 | 'prompt' and 'completion' | found: a, b"),
    "CSV: semicolons": data("prompt;completion\n1;2\n3;4\n", to="bad.csv", says="bad.csv:1 | separated by ';' | .tsv"),
}  # fmt: skip
COLUMNS = {
    "data.columns: not there": data(
        {"dialogue": []}, changes=("data.columns={messages: dialog}",), says="bad.jsonl:1 | no 'dialog' (data.columns) | dialogue"
    ),
    "pairs: with other documents": data(
        SIDES, {"text": "one two"}, says="bad.jsonl holds preference pairs and other documents"
    ),
    "pairs without dpo": data(SIDES, says="preference pairs | dpo"),
    "dpo without pairs": settings("dpo={beta: 0.1}", says="dpo | data.jsonl | preference pairs | chosen"),
}  # fmt: skip
MESSAGES = {
    "an assistant misspelt": data(chat("user: a", "asistant: b"), says="messages[1] | 'asistant' | did you mean 'assistant'"),
    "files, records and templates at once": data(
        3, chat("user: a", "bot: b"), chat("user: a"), chat("user: a", "assistant: "), changes=("validation.path=data.jsonl",),
        says="4 problems in the data | bad.jsonl:1: expected a JSON object | bad.jsonl:2: messages[1] | 'bot' | bad.jsonl:3: no "
        "assistant turn | bad.jsonl:4: messages[1] | is empty",
    ),
    "one problem many times": data(
        *[chat("user: a")] * 40, says="40 problems in the data, of 1 kind | bad.jsonl:1 and 39 more (:2, :3, :4, :5, ..)"
    ),
}  # fmt: skip
LENGTHS = {
    "above the context": data(
        chat("user: one?", "assistant: " + "a" * 300),
        says="bad.jsonl:1 | the limit is 256 | max_position_embeddings | data.on_too_long",
    ),
    "a pair above micro_batch_tokens": data(
        SIDES, says="bad.jsonl:1 | the pair takes | the limit is 12 | batching.micro_batch_tokens",
        changes=("dpo={beta: 0.1}", "batching.micro_batch_tokens=12"),
    ),
    "all left out": settings(
        "batching.max_length=5", "data.on_too_long=skip", says="no training samples | data.jsonl | more than 5 tokens"
    ),
    "max_length above the context": settings(
        "batching.max_length=512", says="batching.max_length: 512 | 256 tokens | max_position_embeddings | config.json"
    ),
}  # fmt: skip
VALIDATION = {
    "the data": settings(
        "validation.path=data.jsonl", says="validation.path: data.jsonl lies in data.path: data.jsonl"
    ),
    "nothing left to learn": settings("validation.fraction=0.9", says="validation.fraction | 0.9 | 1 document"),
}
TEMPLATE = {
    "nothing there": settings("data.chat_template=no.jinja", says="data.chat_template | no.jinja"),
    "not a template": Bad(
        words("data.chat_template: bad.jinja:1 | not a template"),
        settings("data.chat_template=bad.jinja", says="").command,
        lambda folder: (folder / "bad.jinja").write_text("{% for m in %}"),
    ),
    "a template that refuses": Bad(
        words("data.jsonl:1 | the chat template refuses | no system"),
        settings("data.chat_template=bad.jinja", says="").command,
        lambda folder: (folder / "bad.jinja").write_text("{{ raise_exception('no system') }}"),
    ),
}
DATA = {
    f"{part}, {name}": bad
    for part, rows in {
        "files": FILES,
        "text": TEXT,
        "columns": COLUMNS,
        "messages": MESSAGES,
        "lengths": LENGTHS,
        "validation": VALIDATION,
        "template": TEMPLATE,
    }.items()
    for name, bad in rows.items()
}
