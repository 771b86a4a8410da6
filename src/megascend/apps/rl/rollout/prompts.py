"""Prompts for rollouts: JSONL whose lines have ``prompt`` or ``messages``, and fields for the reward function."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.data.chat import ChatTemplate
from megascend.apps.data.columns import IMAGES, text_column
from megascend.apps.data.files import parse_json
from megascend.apps.data.findings import Findings, of_source
from megascend.apps.data.images import sources_of
from megascend.apps.data.messages import decoded, parse_messages, parse_tools
from megascend.apps.data.samples import check_characters, opening_tokens
from megascend.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = dict[str, Any]


def read_prompts(path: Path, *, free: bool = False) -> list[Prompt]:
    """Read all lines of a JSONL file, as objects; ``free`` as in :func:`numbered_prompts`."""
    return [prompt for _, prompt in numbered_prompts(path, free=free)]


def numbered_prompts(path: Path, findings: Findings | None = None, *, free: bool = False) -> list[tuple[int, Prompt]]:
    """Read all lines of a JSONL file, with their line numbers from 1.

    Args:
        findings: collects malformed lines, which are then skipped; default: they raise.
        free: lines need neither ``prompt`` nor ``messages``: an environment begins its conversations itself.
    """
    if not path.is_file():
        raise DataError(f"no prompts at {path.absolute()}: not a file")
    prompts, malformed = [], findings or Findings()
    for number, line in numbered_lines(path.read_bytes(), path):
        with malformed.collecting():
            prompts.append((number, parse_prompt(line, f"{path}:{number}", free=free)))
    if findings is None:
        malformed.raise_problems("prompts")
    if not prompts and not malformed.problems:
        raise DataError(f"{path}: the file has no prompts")
    return prompts


def numbered_lines(content: bytes, source: str | Path) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, with their numbers from 1."""
    try:
        # utf-8-sig: editors on Windows write a byte order mark. Not splitlines(), which also splits at characters
        # inside JSON strings.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 text (byte {error.start}: {error.reason})") from None
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def parse_prompt(line: str, source: str, *, free: bool = False) -> Prompt:
    """Parse one line: an object with exactly one of ``prompt`` (a string) and ``messages`` (of a chat), or ``free`` of both."""
    with of_source(source):
        record = parse_json(line)
    if free and isinstance(record, dict) and not {"prompt", "messages"} & record.keys():
        return record
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise DataError(f"{source}: expected a JSON object with either 'prompt' or 'messages', found {record!r:.60}")
    if "prompt" in record and (not isinstance(record["prompt"], str) or not record["prompt"]):
        raise DataError(f"{source}: 'prompt' must be a string that is not empty, found {record['prompt']!r:.60}")
    with of_source(source):
        text_column(record, "prompt", empty=True)
    messages = ()
    if "messages" in record:
        messages, _ = parse_messages(record["messages"], f"{source}: messages", learned=False)
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{source}: 'messages' must not end with the assistant's, which is to be written")
    images = next((name for name in IMAGES if record.get(name)), None)
    if images is not None or sources_of(messages):
        location = f"column {images!r}" if images else "parts of 'messages'"
        raise DataError(
            f"{source}: images ({location}) are not supported in rollouts, which would answer without them: leave it out"
        )
    return record


def prompt_tokens(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    template_date: date | None = None,
    findings: Findings | None = None,
    source: str = "",
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Tokenize a prompt, in the same way as supervised training does.

    A text begins with the tokenizer's opening special tokens; a chat is rendered by the chat template up to the assistant's
    answer, with its ``tools`` and ``chat_template_kwargs``.

    Args:
        template_date: passed to the chat template as today's date; default: today.
        findings: collects, for ``source``, what is not in the tokens: content that the chat template leaves out, and ``tools`` of
            a text.
        template_options: further variables of the chat template.
    """
    if "prompt" in prompt:
        check_characters(prompt["prompt"])
        unused = [name for name in ("tools", "chat_template_kwargs") if prompt.get(name)]
        if unused and findings is not None:
            findings.remark(
                f"{' and '.join(unused)} left out: only a prompt with 'messages' is rendered with them", source
            )
        tokens: Any = opening_tokens(prompt["prompt"], tokenizer)
    elif not tokenizer.chat_template:
        raise DataError(
            "a prompt with 'messages' needs a chat template, and the model's tokenizer has none; add chat_template.jinja to the "
            "model's directory"
        )
    else:
        template = ChatTemplate(tokenizer, template_options, template_date)
        prefix = f"{source}: " if source else ""
        messages = parse_messages(prompt["messages"], f"{prefix}messages", learned=False)[0]
        tools = parse_tools(prompt.get("tools"), f"{prefix}tools")
        options = decoded(prompt.get("chat_template_kwargs") or {})
        if not isinstance(options, dict):
            raise DataError(f"{prefix}'chat_template_kwargs' must be an object, found {options!r:.60}")
        conversation = template.rendering(messages, tools, options, prompt=True)
        if findings is not None or tools:
            unread = Findings() if findings is None else findings
            template.check_written(conversation, source, unread)
        check_characters(conversation.text)
        tokens = tokenizer(conversation.text, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise DataError(f"the prompt has no tokens: {prompt!r:.80}")
    return list(tokens)
