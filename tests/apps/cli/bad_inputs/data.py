"""Invalid training data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_inputs.row import UNREADABLE, Bad, chat, data, settings, words

GOOD = '{"text": "one two three"}\n'
TURNS = ("user: one?", "assistant: two")
SIDES = {"prompt": "one?", "chosen": "two", "rejected": "three"}


def assistant(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "two"} | keys


def data_path(says: str, make: Callable[[Path], Any], *changes: str) -> Bad:
    """Set ``data.path`` to ``bad.jsonl``, which ``make`` creates."""
    changes = changes or ("data.path=bad.jsonl",)
    return Bad(words(says), settings(*changes, says="").command, lambda folder: make(folder / "bad.jsonl"))


def folder_of(**files: str | bytes) -> Callable[[Path], None]:
    """Create a folder with these files; ``__`` in a name is a dot."""

    def make(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / name.replace("__", ".")).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


FILES = {
    "nothing there": settings(
        "data.path=nowhere.jsonl", says="data.path | nowhere.jsonl | neither a file nor a folder"
    ),
    "a link to nothing": data_path(
        "bad.jsonl | gone.jsonl, which does not exist | data.path", lambda p: p.symlink_to("gone.jsonl")
    ),
    "a link to itself": data_path("bad.jsonl | data.path", lambda p: p.symlink_to("bad.jsonl")),
    "not to be read": data_path("bad.jsonl cannot be read", lambda p: p.symlink_to(UNREADABLE)),
    "a device": settings("data.path=/dev/null", says="/dev/null | data.path"),
    "an unknown ending": data("x", to="bad.xlsx", says="'.xlsx' | data.path | .jsonl, .json, .csv"),
    "no ending": data("x", to="bad", says="data.path | .jsonl, .json, .csv"),
    "an empty file": data("", says="bad.jsonl | no document"),
    "an empty folder": data_path("no file in it ends in .jsonl | data.path", folder_of()),
    "a folder of hidden files": data_path("no file in it ends in .jsonl", folder_of(__a__jsonl=GOOD)),
    "a folder with a link to nothing": data_path(
        "bad.jsonl/a.jsonl | gone, which does not exist", lambda p: (p.mkdir(), (p / "a.jsonl").symlink_to("gone"))
    ),
    "a data set cut off": data_path(
        "datasets cannot load it | data.path", folder_of(state__json="{", dataset_info__json="{}")
    ),
}
TEXT = {
    "not JSON": data(GOOD + "one two\n", says="bad.jsonl:2 | not valid JSON | column 1"),
    "a line of a list": data([1], {"text": "a b"}, says="bad.jsonl:1 | expected a JSON object | found list"),
    "UTF-16": data(GOOD.encode("utf-16"), says="bad.jsonl:1 | not UTF-8 | UTF-16"),
    "compressed": data(b"\x1f\x8b\x08\0\0\0\0\0", says="bad.jsonl:1 | not UTF-8"),
    "half a surrogate pair": data('{"text": "one \\ud83d two"}', says="bad.jsonl:1 | surrogate"),
    "JSON: a bad record": data('[{"text": "a b"}, 3]', to="bad.json", says="bad.json[1] | expected a JSON object | int"),
    "CSV: no column": data("a,b\n1,2\n", to="bad.csv", says="bad.csv:2 | 'prompt' and 'completion' | found: a, b"),
    "CSV: a row too long": data("text\na\nb,c\n", to="bad.csv", says="bad.csv:3 | 2 columns | names 1"),
    "CSV: semicolons": data("prompt;completion\n1;2\n3;4\n", to="bad.csv", says="bad.csv:1 | separated by ';' | .tsv"),
    "parquet: another file": data(GOOD, to="bad.parquet", says="bad.parquet | not a parquet file"),
    "text: Latin-1": data("café".encode("latin-1"), to="bad.txt", says="bad.txt | not UTF-8 | byte 3"),
}  # fmt: skip
COLUMNS = {
    "no column": data({"txt": "a b"}, says="bad.jsonl:1 | expected exactly one of the keys | found: txt"),
    "two forms": data({"text": "a b"} | chat(*TURNS), says="bad.jsonl:1 | found: messages, text | data.columns"),
    "no completion": data({"prompt": "a"}, says="bad.jsonl:1 | 'prompt' and 'completion' | found: prompt"),
    "prompt and completion of two kinds": data(
        {"prompt": "a", "completion": [assistant()]}, says="bad.jsonl:1 | 'prompt' and 'completion' must be both"
    ),
    "data.columns: not there": data(
        {"dialogue": []}, changes=("data.columns={messages: dialog}",), says="bad.jsonl:1 | no 'dialog' (data.columns) | dialogue"
    ),
    "pairs: equal": data(SIDES | {"rejected": "two"}, says="bad.jsonl:1 | 'chosen' and 'rejected' are the same"),
    "pairs: of two kinds": data(SIDES | {"chosen": [assistant()]}, says="bad.jsonl:1 | must be both strings or both lists"),
    "pairs: no prompt": data(
        {"chosen": "two", "rejected": "three"}, says="bad.jsonl:1 | 'prompt' must be a string that is not empty"
    ),
    "pairs: a question last": data(
        {"chosen": chat(*TURNS, "user: b")["messages"], "rejected": chat(*TURNS)["messages"]},
        says="bad.jsonl:1 | chosen must end with the assistant's message",
    ),
    "pairs: loss": data(
        {"prompt": "a", "chosen": [assistant(loss=1)], "rejected": [assistant(content="c")]},
        says="bad.jsonl:1: chosen | 'loss' and 'weight' have no meaning in preference pairs",
    ),
    "pairs: with other documents": data(
        SIDES, {"text": "one two"}, says="bad.jsonl holds preference pairs and other documents"
    ),
    "pairs without dpo": data(SIDES, says="preference pairs | dpo"),
    "dpo without pairs": settings("dpo={beta: 0.1}", says="dpo | data.jsonl | preference pairs | chosen"),
}  # fmt: skip
MESSAGES = {
    "no object": data(chat("one"), says="bad.jsonl:1: messages[0] | an object with 'role' and 'content'"),
    "no assistant": data(chat("system: a", "user: b"), says="bad.jsonl:1 | no assistant turn | data.train_on_prompt"),
    "an assistant misspelt": data(chat("user: a", "asistant: b"), says="messages[1] | 'asistant' | did you mean 'assistant'"),
    "a negative weight": data(
        chat("user: a", assistant(weight=-1)), says="bad.jsonl:1: messages[1] | 'weight' | from 0 on | -1"
    ),
    "loss and weight apart": data(
        chat("user: a", assistant(loss=0, weight=1)), says="messages[1] | 'loss' says 0 and 'weight' says 1"
    ),
    "ShareGPT: an unknown role": data(
        {"conversations": [{"from": "robot", "value": "a"}]}, says="conversations[0] | 'robot' | human, user, gpt"
    ),
    "ShareGPT: another form in between": data(
        {"conversations": [{"from": "human", "value": "a"}, assistant()]}, says="conversations[1] | 'from' and 'value'"
    ),
    "files, records and templates at once": data(
        3, chat("user: a", "bot: b"), chat("user: a"), chat("user: a", "assistant: "), changes=("validation.path=data.jsonl",),
        says="4 problems in the data | bad.jsonl:1: expected a JSON object | bad.jsonl:2: messages[1] | 'bot' | bad.jsonl:3: no "
        "assistant turn | bad.jsonl:4: messages[1] | is empty",
    ),
    "one problem many times": data(
        *[chat("user: a")] * 40, says="40 problems in the data, of 1 kind | bad.jsonl:1 and 39 more (:2, :3, :4, :5, ..)"
    ),
    "three problems at once": data(
        {"text": 3}, chat(), {"txt": ""}, says="3 problems in the data | bad.jsonl:1 | bad.jsonl:2 | bad.jsonl:3"
    ),
}  # fmt: skip
LENGTHS = {
    "above the context": data(
        chat("user: one?", "assistant: " + "a" * 300),
        says="bad.jsonl:1 | the limit is 256 | max_position_embeddings | data.on_too_long",
    ),
    "above max_length": settings(
        "batching.max_length=5", says="data.jsonl:1 | the limit is 5 | batching.max_length: 5 | data.on_too_long"
    ),
    "above micro_batch_tokens": settings(
        "batching.micro_batch_tokens=9", says="data.jsonl:1 | the limit is 9 | batching.micro_batch_tokens: 9"
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
