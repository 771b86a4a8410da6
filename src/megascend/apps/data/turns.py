"""Find the assistant's turns without generation blocks, by comparison with the conversation cut before and after them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megascend.apps.data.document import Message
from megascend.apps.data.rendering import Rendering, Span
from megascend.errors import DataError

PROBE = "wordsofaprobe"
LONGEST_END = 200
"""Maximum length of a turn's ending, in characters, when it is searched at the end of a conversation cut there."""
TAGS = re.compile(r"</?\w*:?think>")
THINKING = re.compile(rf"(?:\s|{TAGS.pattern})*")
"""Text of a generation prompt that history may lack: the beginning of a thought, or an empty one."""


class AppendedTurns:
    """Finder of the characters that the assistant writes in a conversation.

    Where the conversation begins with both cuts, the turn is what the second one has beyond the first. Templates that write a
    last turn differently (Qwen3 adds a thinking block to it, gpt-oss and Phi-3 another token at its end) are compared from the
    words on, whose positions are known in each text. A span never reaches into what a later message adds: neither cut has it.
    """

    def __init__(self, conversation: Rendering, special: Sequence[str], bos: str, eos: str) -> None:
        """Take the tokens that may end a turn, and those at the beginning and end of a sequence, "" for none."""
        self._conversation, self._bos, self._eos = conversation, bos, eos
        # The longest first: one token may be the ending, or the beginning, of another.
        self._special = tuple(sorted(special, key=len, reverse=True))
        ordered = "|".join(map(re.escape, self._special)) or "(?!)"
        self._token, self._closing = re.compile(rf"{ordered}|{TAGS.pattern}"), re.compile(rf"(?:\s*(?:{ordered}))+")

    def span(self, index: int) -> Span:
        """Return the span of characters of a turn."""
        text, messages = self._conversation.text, self._conversation.messages
        head = self._conversation.cut(messages[:index], prompt=True) if index else self._first_head()
        upto = self._conversation if index == len(messages) - 1 else self._conversation.cut(messages[: index + 1])
        # The simple case: history begins with both cut conversations, so their lengths are the turn's boundaries.
        start: int | None = len(head.text)
        end: int | None = len(upto.text)
        if not text.startswith(head.text):
            start = self._start_by_words(index, head)
        if start is not None and not text.startswith(upto.text):
            end = self._end_by_words(index, start, head, upto)
        if start is None or end is None or end < start:
            raise DataError(
                f"cannot tell where turn {index} of the assistant stands: the chat template rewrites earlier turns; use one "
                "with {% generation %} blocks (data.chat_template)"
            )
        return start, self._end_of_turn(index, start, end, head)

    def _first_head(self) -> Rendering:
        """Render the generation prompt of a conversation that begins with the assistant: no message precedes it."""
        try:
            return self._conversation.cut((), prompt=True)
        except DataError:
            raise DataError(
                "the conversation begins with the assistant, and the chat template writes no conversation without a message; "
                "begin with the user or the system"
            ) from None

    def _start_by_words(self, index: int, head: Rendering) -> int | None:
        """Return the start of a turn whose generation prompt differs from the history's; None if that is not exact.

        History may lack the end of a generation prompt (``<think>``), and have words of earlier messages elsewhere (Mistral's
        system message). What the template itself writes before the turn must be the same in both.
        """
        conversation, text = self._conversation, self._conversation.text
        anchors = [number for number in range(index) if conversation.words_of(number) and head.words_of(number)]
        if not anchors:
            return None
        anchor = anchors[-1]
        in_text, in_head = conversation.words_of(anchor)[-1], head.words_of(anchor)[-1]
        templates = (
            conversation.without_texts(in_text, index),
            head.without_texts(in_head, index),
        )
        if None in templates or TAGS.sub("", str(templates[0])) != TAGS.sub("", str(templates[1])):
            return None
        opening = head.text[in_head:]
        shared = self._common_beginning(opening, text[in_text:])
        if THINKING.fullmatch(opening, len(shared)):
            return in_text + len(shared)
        # Else by a probe: how the template opens a turn of the assistant that has nothing but words.
        messages = self._conversation.messages
        bare = self._or_none((*messages[:index], {"role": "assistant", "content": PROBE}, *messages[index + 1 :]))
        if bare is None or not (words := bare.words_of(index)) or not bare.words_of(anchor):
            return None
        prefix = bare.text[bare.words_of(anchor)[-1] : words[0]]
        return in_text + len(prefix) if opening.startswith(prefix) and text.startswith(prefix, in_text) else None

    def _end_by_words(self, index: int, start: int, head: Rendering, upto: Rendering) -> int | None:
        """Return the end of a turn that is written differently when others follow; None if that is not exact.

        What follows its words is its own as far as the conversation cut after it agrees, or the one that the assistant continues.
        """
        words = self._conversation.end_of(index, start)
        if words is None:
            return None
        messages, rest = self._conversation.messages, self._conversation.text[words:]
        ending = ""
        for ending in self._endings(index, rest, head, upto):
            if ending.rstrip().endswith(self._special):
                return words + len(ending.rstrip())
        # Without a special token at its end: complete lines only, because the rest of a line may be the common beginning of two
        # roles' headers. A call continues after its name, to the last character found.
        return words + len(ending.rstrip() if "tool_calls" in messages[index] else ending.rpartition("\n")[0].rstrip())

    def _endings(self, index: int, rest: str, head: Rendering, upto: Rendering) -> Iterator[str]:
        """Yield candidates for the part of ``rest``, the text after a turn's words, that is the turn's; cheap ones first."""
        messages = self._conversation.messages
        ends = [
            size for size in range(1, min(len(rest), len(upto.text), LONGEST_END)) if upto.text.endswith(rest[:size])
        ]
        yield rest[: ends[-1]] if ends else ""
        before = self._or_none(messages[:index])
        opening = head.text.removeprefix(before.text) if before is not None else head.text
        if opening and opening != head.text and (continued := self._or_none(messages[: index + 1], True)) is not None:
            end = continued.end_of(index, 0)
            if end is not None and continued.text.endswith(opening):
                ending = continued.text[end:].removesuffix(opening)
                yield ending if rest.startswith(ending) else ""
        if (end := upto.end_of(index, 0)) is not None:
            yield self._common_beginning(rest, upto.text[end:])

    def _common_beginning(self, first: str, second: str) -> str:
        """Return the common prefix of two texts, without a special token or thought tag that is cut in either."""
        length = next(
            (position for position, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        cut = [
            match.start()
            for text in (first, second)
            for match in self._token.finditer(text)
            if match.start() < length < match.end()
        ]
        return first[: min(cut, default=length)]

    def _end_of_turn(self, index: int, start: int, end: int, head: Rendering) -> int:
        """Return ``end`` without parts that the model never generates: white space, text after the last token, opening tokens."""
        text = self._conversation.text[:end]
        words = self._conversation.end_of(index, start)
        if words is not None and words <= end and "tool_calls" not in self._conversation.messages[index]:
            closing = self._closing.match(text, words)
            text = text if closing is None else text[: closing.end()]
        stripped = text.rstrip()
        while token := next((token for token in self._special if stripped.endswith(token, start)), ""):
            rest = stripped.removesuffix(token).rstrip()
            # If the words themselves end with a special token, it does not end the turn: the next one does.
            closed = rest.endswith(self._special, start if words is None else max(start, words))
            opens = token == self._bos or (closed and token in self._openers(index, head))
            if token == self._eos or not opens:
                break
            text = stripped = rest
        return len(stripped) if token and len(stripped) > start else max(start, len(text))

    def _openers(self, index: int, head: Rendering) -> set[str]:
        """Return tokens that open turns: in the generation prompt, and the last one before the words of other messages."""
        words = max((head.words_of(number)[-1:] for number in range(index)), default=[])
        openers = [match[0] for match in self._token.finditer(head.text, *words)][1:]
        text, messages = self._conversation.text, self._conversation.messages
        begins = [
            begin
            for marked in self._conversation.texts
            if marked.part == "words" and messages[marked.message]["role"] != "assistant"
            for begin in marked.begins
        ]
        before = [list(self._token.finditer(text, max(0, begin - LONGEST_END), begin))[-1:] for begin in begins]
        return {*openers, *(match[0] for matches in before for match in matches)}

    def _or_none(self, messages: Sequence[Message], prompt: bool = False) -> Rendering | None:
        try:
            return self._conversation.cut(messages, prompt=prompt)
        except DataError:
            return None
