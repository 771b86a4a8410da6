"""A rendered conversation and the positions of its messages' words, found by rendering it again with marks in them.

A mark is a number between two characters of a private use area that the conversation does not contain. Removing the marks must
give the same text again, so positions are exact, however a template trims, quotes, moves or repeats its input.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from megascend.apps.data.document import Message
from megascend.apps.data.messages import REASONING
from megascend.errors import DataError

Part = Literal["words", "thought", "call"]
Span = tuple[int, int]
Render = Callable[[Sequence[Message], Any, bool], tuple[str, list[Span]]]
"""Renders messages with tools, and with True up to the assistant's continuation; returns the spans of generation blocks, too."""

PRIVATE = (0xE000, 0xF900), (0xF0000, 0xFFFFE)
"""Private use areas of Unicode, which conversations seldom contain; two unused characters delimit the marks."""
THOUGHT_END = "</think>"
TAGGED = re.compile(r"<(\w+)>\s*(?P<inner>.*?)\s*</\1>", re.DOTALL)
"""Words in tags that a template may look for, ``<tool_response>`` in a user's message for example."""
THOUGHT_TAG = re.compile(r"\s*<think>")


LEVELS = range(4)
"""From the most marks to the fewest, as templates test whether a text is empty and how it begins: 0 marks all, 1 no empty texts,
2 only what is within tags, 3 neither beginnings nor the names of calls."""


@dataclass
class MarkedText:
    """One text of a message, which may be empty, and the offsets of the marks around it; none where the template omits it."""

    message: int
    part: Part
    is_empty: bool
    has_beginning: bool
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class Rendering:
    """A conversation as ``template`` writes it, and the spans of the template's generation blocks in the text."""

    def __init__(
        self, messages: Sequence[Message], tools: Any, template: str, render: Render, *, prompt: bool = False
    ) -> None:
        self.messages, self.tools, self.template = messages, tools, template
        self._render, self._prompt = render, prompt
        self.text, self.blocks = render(messages, tools, prompt)

    def cut(self, messages: Sequence[Message], *, prompt: bool = False) -> Rendering:
        """Render other messages with the same template, tools and options; ``prompt``: up to the assistant's continuation."""
        return Rendering(messages, self.tools, self.template, self._render, prompt=prompt)

    def is_written_without(self, messages: Sequence[Message], tools: Any) -> bool:
        """Check whether the template writes the same text for messages and tools that lack a part."""
        with contextlib.suppress(DataError):  # a template may need what is left out
            return self.text == self._render(messages, tools, self._prompt)[0]
        return False

    @cached_property
    def texts(self) -> list[MarkedText]:
        """Return the messages' texts with their positions; those that cannot be marked without changing the text are left out."""
        # JSON also shows the characters of keys and nested values that the template may print.
        used = {*self.text, *json.dumps(self.messages, ensure_ascii=False, default=str)}
        unused = (character for area in PRIVATE for code in range(*area) if (character := chr(code)) not in used)
        self._open, self._close = next(unused), next(unused)
        return self._marked_texts(range(len(self.messages)))

    def words_of(self, message: int) -> list[int]:
        """Return the offsets at which a message's words begin and end, ascending."""
        texts = [text for text in self.texts if (text.message, text.part) == (message, "words")]
        return sorted(offset for text in texts for offset in (*text.begins, *text.ends))

    def end_of(self, message: int, start: int) -> int | None:
        """Return the end of a message's last text after ``start``; of repeated texts the first occurrence counts."""
        ends = [
            min((offset for offset in text.ends if offset >= start), default=-1)
            for text in self.texts
            if text.message == message
        ]
        return max(ends) if ends and max(ends) >= 0 else None

    def is_left_out(self, message: int, part: Part, unknown: bool | None = None) -> bool | None:
        """Check whether a text of a part is missing from the rendered text, or cut at its end; ``unknown`` if it is unmarked."""
        texts = [text for text in self.texts if (text.message, text.part, text.is_empty) == (message, part, False)]
        return any(not text.ends for text in texts) if texts else unknown

    def is_cut(self, message: int, part: Part) -> bool:
        """Return True if some text of a part is in the rendered text without its beginning."""
        texts = [text for text in self.texts if (text.message, text.part) == (message, part)]
        return any(text.has_beginning and text.ends and not text.begins for text in texts)

    def others_within(self, message: int, start: int, end: int) -> set[int]:
        """Return the other messages with words or thoughts between two offsets."""
        return {
            text.message
            for text in self.texts
            if text.message != message
            and text.part != "call"
            and not text.is_empty
            and (
                any(start <= offset < end for offset in text.begins)
                or any(start < offset <= end for offset in text.ends)
            )
        }

    def without_texts(self, end: int, messages: int) -> str | None:
        """Return the text up to ``end`` without white space and the first messages' texts; None where one has no beginning."""
        rendered = self.text[:end]
        spans = []
        for text in self.texts:
            ends = [offset for offset in text.ends if offset <= len(rendered)]
            if text.message < messages and text.part != "call":
                if len(text.begins) < len(ends) and not text.is_empty:
                    return None
                spans += zip(text.begins, ends, strict=False)
        pieces, offset = [], 0
        for start, end in sorted(spans):
            pieces.append(rendered[offset : max(offset, start)])
            offset = max(offset, end)
        return "".join("".join([*pieces, rendered[offset:]]).split())

    def _marked_texts(self, chosen: Sequence[int]) -> list[MarkedText]:
        """Mark the texts of some messages together; bisect if one message prevents marking the rest."""
        for level in LEVELS:
            if (texts := self._attempt(chosen, level)) is not None:
                return texts
        # A template may branch on the content of one message; the others can still be marked.
        half = len(chosen) // 2
        return self._marked_texts(chosen[:half]) + self._marked_texts(chosen[half:]) if half else []

    def _attempt(self, chosen: Sequence[int], level: int) -> list[MarkedText] | None:
        """Return the texts found with one level of marks; None if the marks change what the template writes."""
        texts: list[MarkedText] = []
        marked = [
            _Marker(index, level, texts, self._open, self._close).marked(message) if index in chosen else message
            for index, message in enumerate(self.messages)
        ]
        try:
            text, _ = self._render(marked, self.tools, self._prompt)
        except DataError:
            return None
        mark = re.compile(f"{self._open}(\\d+){self._close}")
        # The marks changed the template's behaviour, so their positions do not apply to the unmarked text.
        if mark.sub("", text) != self.text:
            return None
        removed = 0
        for match in mark.finditer(text):
            # Even numbers are beginnings, odd ones are ends.
            marked_text = texts[int(match[1]) // 2]
            (marked_text.ends if int(match[1]) % 2 else marked_text.begins).append(match.start() - removed)
            removed += len(match[0])
        return texts


@dataclass
class _Marker:
    """Puts marks into a message, and lists the texts that have them."""

    index: int
    level: int
    texts: list[MarkedText]
    open: str
    close: str

    def marked(self, message: Message) -> Message:
        """Return a copy with marks around the words, the thoughts and the names of calls."""
        changes: dict[str, Any] = {}
        content = message.get("content")
        if isinstance(content, str):
            changes["content"] = self._content(content, message["role"])
        elif isinstance(content, list):
            changes["content"] = [
                part | {"text": self._text(part["text"], "words")} if part["type"] == "text" else part
                for part in content
            ]
        thoughts = [key for key in REASONING if isinstance(message.get(key), str)]
        if thoughts:
            changes |= dict.fromkeys(thoughts, self._text(message[thoughts[0]], "thought"))
        if self.level < 3 and "tool_calls" in message:
            changes["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return message | changes

    def _content(self, text: str, role: str) -> str:
        """Mark words, and before them the thoughts that the assistant's may begin with."""
        # Templates split an assistant's content at </think> and may drop the first part, so each part has marks of its own.
        reasoning, tag, words = text.rpartition(THOUGHT_END) if role == "assistant" else ("", "", text)
        opening = THOUGHT_TAG.match(reasoning)
        head = opening[0] if opening is not None else ""
        if reasoning[len(head) :].strip():
            reasoning = head + self._text(reasoning[len(head) :], "thought")
        return reasoning + tag + self._text(words, "words")

    def _text(self, text: str, part: Part) -> str:
        """Mark where a text begins and ends, within the white space around it that a template may trim."""
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        if first >= last and self.level > 0:
            return text
        # A template may test startswith("<tool_response>"), so the marks go inside the tags.
        if self.level > 1 and (tagged := TAGGED.fullmatch(text, first, last)):
            first, last = tagged.span("inner")
        is_empty = first >= last
        first = last if is_empty else first
        number = 2 * len(self.texts)
        has_beginning = self.level < 3 and not is_empty
        self.texts.append(MarkedText(self.index, part, is_empty, has_beginning))
        beginning = self._mark(number) if has_beginning else ""
        return f"{text[:first]}{beginning}{text[first:last]}{self._mark(number + 1)}{text[last:]}"

    def _mark(self, number: int) -> str:
        return f"{self.open}{number}{self.close}"

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        self.texts.append(MarkedText(self.index, "call", is_empty=False, has_beginning=False))
        # Only the name: arguments are serialized, and a mark in them could be escaped.
        function = function | {"name": f"{function['name']}{self._mark(2 * len(self.texts) - 1)}"}
        return call | {"function": function} if "function" in call else function
