"""Render conversations with a tokenizer's chat template, and find the characters that the assistant generates."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.data.document import Message
from megascend.apps.data.findings import Findings
from megascend.apps.data.messages import REASONING, RESULTS, with_arguments_as_text
from megascend.apps.data.rendering import Rendering, Span
from megascend.apps.data.turns import AppendedTurns
from megascend.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]] | None

KNOWN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
"""Keys of messages that templates may ignore without a remark; omitted reasoning is checked separately."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"
"""Function that transformers gives to chat templates for the date."""
# Guards the globals of compiled templates, which fixed_date() changes.
DATED = threading.RLock()
RANDOM = re.compile(r"\|\s*random\b|\blipsum\s*\(")
# Letters only: a template that quotes, trims or escapes its input leaves them unchanged.
PROBE = ("firstpartofaprobe", "secondpartofaprobe")


def check_template(text: str, path: Path) -> None:
    """Raise DataError, with the line, if a chat template cannot be compiled."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[[]], chat_template=text)
    except Exception as error:
        # Other errors may be due to the empty conversation; they are reported with a real one.
        if (line := syntax_error_line(error)) is not None:
            raise DataError(f"data.chat_template: {path}:{line}: not a template: {error}") from error


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Check whether a chat template may ask for the date. In transformers' sandbox only this function returns it."""
    templates = tokenizer.chat_template
    return CLOCK in str(list(templates.values()) if isinstance(templates, dict) else templates)


@contextlib.contextmanager
def fixed_date(template: str, day: date) -> Iterator[None]:
    """Give a template midnight of ``day`` as the present time. Compiled templates are process-wide: one thread at a time."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    with DATED:
        variables = _compile_jinja_template(template).globals
        # The date would otherwise be that of the day on which a sample is tokenised, and a resumed run would see other samples.
        # Not a variable of the call: transformers (5.24) passes templates plain data only, and the name of a function's type.
        clock = variables[CLOCK]
        variables[CLOCK] = datetime.combine(day, time()).strftime
        try:
            yield
        finally:
            variables[CLOCK] = clock


def syntax_error_line(error: Exception) -> int | None:
    """Return the line of a template's syntax error; None for other errors."""
    from jinja2 import TemplateSyntaxError

    return error.lineno if isinstance(error, TemplateSyntaxError) else None


class ChatTemplate:
    """The chat template of a tokenizer.

    Where the template marks what the assistant writes (``{% generation %}`` blocks), the marks count. Where it does not,
    each of the assistant's turns is found by comparing the conversation with its beginnings, see :class:`AppendedTurns`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | None = None,
        day: date | None = None,
    ) -> None:
        """
        Args:
            options: further variables of the template.
            day: date for the template, at midnight; default: today.
        """
        self._day = day or date.today()
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        # Added special tokens too: <|im_end|> and the like are often not among all_special_tokens.
        self._ends = [token for token in dict.fromkeys([*map(str, tokenizer.all_special_tokens), *added]) if token]
        self._bos, self._eos = str(tokenizer.bos_token or ""), str(tokenizer.eos_token or "")
        self._takes_parts: dict[str, bool] = {}

    def source(self, tools: Tools = None) -> str:
        """Return the template's text; a tokenizer may have one for conversations with tools."""
        if not self._tokenizer.chat_template:
            raise DataError("'messages' need a chat template, and the tokenizer has none; set data.chat_template")
        try:
            template = str(self._tokenizer.get_chat_template(None, list(tools) if tools else None))
        except ValueError:  # several templates, and no default
            names = ", ".join(map(repr, self._tokenizer.chat_template))
            raise DataError(
                f"the tokenizer's chat templates are {names}, and none is 'default'; name one with data.chat_template"
            ) from None
        if draw := RANDOM.search(template):
            raise DataError(
                f"the chat template draws at random ({draw[0].strip()}): every rank, and a resumed run, would see other samples; "
                "use a template without (data.chat_template)"
            )
        return template

    def rendering(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        options: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
    ) -> Rendering:
        """Render a conversation; with ``prompt``, up to where the assistant would continue."""
        template = self.source(tools)

        def render(conversation: Sequence[Message], tools: Tools, prompt: bool) -> tuple[str, list[Span]]:
            return self._render(template, conversation, tools, options, prompt=prompt)

        return Rendering(messages, tools, template, render, prompt=prompt)

    def _render(
        self,
        template: str,
        messages: Sequence[Message],
        tools: Tools = None,
        options: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text, and the spans of the template's generation blocks in it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        dated = fixed_date(template, self._day) if CLOCK in template else contextlib.nullcontext()
        variables = {**self._tokenizer.special_tokens_map, **self._options, **(options or {})}

        def attempt(conversation: Sequence[Message]) -> Any:
            return render_jinja_template(
                conversations=[list(conversation)],
                tools=list(tools) if tools else None,
                chat_template=template,
                # Also returns the generation blocks, as spans of characters.
                return_assistant_tokens_mask=bool(GENERATION.search(template)),
                add_generation_prompt=prompt,
                **variables,
            )

        conversation = [self._with_content(self._with_role(message, template), template) for message in messages]
        try:
            with dated:
                try:
                    rendered, marked = attempt(conversation)
                except Exception:
                    # Most templates serialize arguments themselves; some concatenate them as a string and fail on an object.
                    textual = [with_arguments_as_text(message) for message in conversation]
                    if textual == conversation:
                        raise
                    rendered, marked = attempt(textual)  # for example DeepSeek's templates
        except Exception as error:
            line = syntax_error_line(error)
            kind = type(error).__name__ if line is None else f"{type(error).__name__} in line {line}"
            raise DataError(f"the chat template refuses the conversation: {kind}: {error}") from error
        return str(rendered[0]), [(start, end) for start, end in (marked[0] if marked else []) if end > start]

    def _with_role(self, message: Message, template: str) -> Message:
        """Rename a tool's answer to role ``tool``, unless the template names its role, or has a token for it (GLM-4) and no
        ``tool``.
        """
        role = message["role"]
        if role not in RESULTS or _names(template, role):
            return message
        has_token = f"<|{role}|>" in self._ends and f"<|{role}|>" not in template
        return message if has_token and not _names(template, "tool") else message | {"role": "tool"}

    def _with_content(self, message: Message, template: str) -> Message:
        """Join a message's text parts by line breaks, unless the template takes parts."""
        content = message.get("content")
        if not isinstance(content, list):
            return message
        if any(part["type"] == "image" for part in content):
            # Without the image itself, which a template that prints the whole part would write.
            return message | {"content": [{"type": "image"} if part["type"] == "image" else part for part in content]}
        if template not in self._takes_parts:
            self._takes_parts[template] = self._writes_parts(template)
        if self._takes_parts[template]:
            return message
        return message | {"content": "\n".join(part["text"] for part in content)}

    def _writes_parts(self, template: str) -> bool:
        """Check whether a template writes the texts of a list of parts, and nothing else of it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        parts = [{"type": "text", "text": text} for text in PROBE]
        variables = {**self._tokenizer.special_tokens_map, **self._options}
        try:
            rendered, _ = render_jinja_template(
                conversations=[[{"role": "user", "content": parts}]], chat_template=template, **variables
            )
        except Exception:  # noqa: BLE001, whatever it is, the template does not take a list
            return False
        match = re.search(f"{PROBE[0]}(.*){PROBE[1]}", str(rendered[0]), re.DOTALL)
        # A template that prints the list itself would have the probes in it too, with its keys between them.
        return match is not None and "type" not in match[1]

    # --- the assistant's tokens ---

    def turn_ends(self) -> set[int]:
        """Return the special tokens that close the assistant's turn at the end of a conversation."""
        # Models differ in what closes a turn, and few name it: the templates are asked.
        templates = self._tokenizer.chat_template
        named = templates if isinstance(templates, dict) else {"default": None}
        # Added tokens, too: what closes a turn is often not among all_special_tokens (<|eot_id|> of a base model).
        special = {str(token): number for number, token in self._tokenizer.added_tokens_decoder.items()}
        special |= dict(zip(map(str, self._tokenizer.all_special_tokens), self._tokenizer.all_special_ids, strict=True))
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE[0]}]
        ends = set()
        for name, template in named.items():
            # Those with a name may need more than a conversation.
            with contextlib.nullcontext() if name == "default" else contextlib.suppress(DataError):
                behind = self._render(template or self.source(), turns)[0].rpartition(PROBE[0])[2].lstrip()
                ends |= {number for text, number in special.items() if text and behind.startswith(text)}
        return ends

    def assistant_spans(self, conversation: Rendering, *, separate: bool = True) -> list[tuple[int, list[Span]]]:
        """Return, by the index of each of the assistant's messages, the spans of characters that the assistant writes.

        They are the template's generation blocks, or else what lies between the end of the generation prompt and the end of the
        turn, by comparison with the conversation cut before and after it. Text after the special token that ends a turn (a line
        break in ChatML) is never generated, so it is left out. The spans contain no words of other messages. Unless they are to
        be ``separate``, those of all generation blocks go with the first message.
        """
        turns = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if GENERATION.search(conversation.template):
            whole = bool(turns) and not separate
            spans = [(turns[0], conversation.blocks)] if whole else self._turn_blocks(conversation, turns)
            self._check_words(conversation, turns, spans)
        else:
            appended = AppendedTurns(conversation, self._ends, self._bos, self._eos)
            spans = [(index, [appended.span(index)]) for index in turns]
        self._check_others(conversation, turns, spans)
        return spans

    @staticmethod
    def _check_others(conversation: Rendering, turns: Sequence[int], spans: Sequence[tuple[int, list[Span]]]) -> None:
        """Raise DataError if the spans of one of the assistant's messages contain words of another message."""
        for index, pieces in spans:
            owners = {index} if len(spans) == len(turns) else set(turns)
            for start, end in pieces:
                for other in sorted(conversation.others_within(index, start, end) - owners):
                    role = conversation.messages[other]["role"]
                    raise DataError(
                        f"cannot tell where turn {index} of the assistant stands: the chat template writes words of message "
                        f"{other} ({role}) into it; use another one (data.chat_template)"
                    )

    @staticmethod
    def _check_words(
        conversation: Rendering, turns: Sequence[int], turn_spans: Sequence[tuple[int, list[Span]]]
    ) -> None:
        """Raise DataError if words or calls of the assistant are outside the template's generation blocks."""
        all_spans = [span for _, spans in turn_spans for span in spans]
        blocks = dict(turn_spans) if len(turn_spans) == len(turns) else dict.fromkeys(turns, all_spans)
        rendered = conversation.text
        # Messages whose words could not be marked. Their words may occur elsewhere by chance, so blocks are also counted below.
        unproven = 0
        for index in turns:
            words = tail(conversation.messages[index])
            marked = [text for text in conversation.texts if text.message == index and text.part != "thought"]
            inside = all(
                any(start < offset <= end for start, end in blocks[index] for offset in text.ends)
                for text in marked
                if text.ends and not text.is_empty
            )
            if words and words in rendered and conversation.is_left_out(index, "words") is None:
                unproven += 1
                inside &= any(words in rendered[start:end] for start, end in blocks[index])
            if not inside:
                raise DataError(
                    f"the chat template's generation blocks do not hold the words of message {index}, which is the assistant's; "
                    "does the template use them inside a macro?"
                )
        if unproven > len(all_spans):
            raise DataError(
                f"the chat template has {len(all_spans)} generation blocks for {len(turns)} messages of the assistant: not all "
                "of them are within; does the template use them inside a macro?"
            )

    @staticmethod
    def _turn_blocks(conversation: Rendering, turns: list[int]) -> list[tuple[int, list[Span]]]:
        """Assign the template's generation blocks to messages."""
        blocks, messages = conversation.blocks, conversation.messages
        # A turn without words may have no block, and another one two. Then a turn has as many blocks as rendering it adds.
        if len(blocks) == len(turns) and all(tail(messages[index]) for index in turns):
            return [(index, [span]) for index, span in zip(turns, blocks, strict=True)]
        assigned, before = [], 0
        for index in turns:
            upto = len(blocks) if index == turns[-1] else len(conversation.cut(messages[: index + 1]).blocks)
            if upto < before or upto > len(blocks):
                raise DataError(
                    f"cannot tell which generation blocks of the chat template are those of message {index}: it has other "
                    "blocks when later messages follow"
                )
            assigned.append((index, blocks[before:upto]))
            before = upto
        return assigned

    # --- omissions of the template ---

    def check_written(self, conversation: Rendering, source: str, findings: Findings) -> None:
        """Report the parts of a conversation that the template omits."""
        messages, template = conversation.messages, conversation.template
        self._check_words_written(conversation, source, findings)
        if conversation.tools and conversation.is_written_without(messages, None):
            raise DataError(f"'tools': {UNWRITTEN}")
        if any("tool_calls" in message for message in messages):
            if conversation.is_written_without(list(map(_without_tool_calls, messages)), conversation.tools):
                raise DataError(f"'tool_calls': {UNWRITTEN}")
            self._check_calls_written(conversation)
        for role in dict.fromkeys(message["role"] for message in messages):
            if self._with_role({"role": role}, template)["role"] != role:
                findings.remark(f"messages of the role {role!r} are written as those of the role 'tool'", source)
        # By the template's text: whether it renders reasoning may depend on the position of a turn, see _drops_thought().
        thinks = any(message.get(key) for message in messages for key in REASONING)
        if thinks and not any(key in template for key in REASONING):
            raise DataError(f"'reasoning_content': {UNWRITTEN}")
        if any(self._drops_thought(conversation, index) for index in range(len(messages))):
            findings.remark("the chat template leaves out the reasoning of some of the assistant's turns", source)
        for key in dict.fromkeys(key for message in messages for key in message if key not in KNOWN_KEYS):
            # A key that the template does not mention cannot be in its output.
            if not re.search(rf"\b{re.escape(key)}\b", template):
                findings.remark(f"{key!r} of messages is not read", source)

    @staticmethod
    def _check_calls_written(conversation: Rendering) -> None:
        """Raise DataError if some of a message's calls are left out: by the marks of their names, or by taking each out."""
        messages = conversation.messages
        for index, message in enumerate(messages):
            calls = message.get("tool_calls", [])
            missing = conversation.is_left_out(index, "call")
            if missing is None:
                reduced = [calls[:number] + calls[number + 1 :] for number in range(len(calls))]
                fewer = [message | {"tool_calls": rest} if rest else _without_tool_calls(message) for rest in reduced]
                others = ([*messages[:index], candidate, *messages[index + 1 :]] for candidate in fewer)
                missing = any(conversation.is_written_without(rest, conversation.tools) for rest in others)
            if missing:
                names = ", ".join(repr(call.get("function", call)["name"]) for call in calls)
                raise DataError(
                    f"message {index} (assistant): the chat template does not write all of its {len(calls)} tool calls "
                    f"({names}); name another one with data.chat_template"
                )

    def _check_words_written(self, conversation: Rendering, source: str, findings: Findings) -> None:
        """Report messages of which nothing is written; DataError if they are of a role that every template knows."""
        silent: dict[str, None] = {}
        for index, message in enumerate(conversation.messages):
            words, role = tail(message), message["role"]
            unmarked = bool(words) and words not in conversation.text
            left_out = conversation.is_left_out(index, "words", unmarked)
            # An assistant's message may begin with its reasoning, in tags that templates remove from earlier turns.
            is_cut = role != "assistant" and conversation.is_cut(index, "words")
            if not left_out and not is_cut:
                continue
            if role in ("system", "user", "assistant"):
                missing = f"the beginning of its words, before ..{words!r}" if is_cut else f"its words (..{words!r})"
                raise DataError(
                    f"message {index} ({role}): the chat template does not write {missing}; name another one with "
                    "data.chat_template"
                )
            silent[role] = None
        for role in silent:
            findings.remark(
                f"messages of the role {role!r} are left out: the chat template does not write them, so the model does not see "
                "them; rename the role, or name another template with data.chat_template",
                source,
            )

    @staticmethod
    def _drops_thought(conversation: Rendering, index: int) -> bool:
        """Check whether the template omits the assistant's text before its answer, or under a key for thoughts."""
        message = conversation.messages[index]
        is_cut = conversation.is_cut
        if is_cut(index, "thought") or (message["role"] == "assistant" and is_cut(index, "words")):
            return True
        reasoning = str(message.get("reasoning_content", "")).strip()
        unmarked = bool(reasoning) and reasoning not in conversation.text
        return bool(conversation.is_left_out(index, "thought", unmarked))

    def check_endings(
        self, rendered: str, turns: Sequence[tuple[int, list[Span]]], source: str, findings: Findings
    ) -> None:
        """Remark that turns end without a special token, so that the model does not learn to stop."""
        # The last span of each turn: a turn may have several generation blocks.
        last = [max(pieces) for _, pieces in turns if pieces]
        ended = [rendered[start:end].rstrip().endswith(tuple(self._ends)) for start, end in last]
        if not all(ended):
            turns_end, then = "no turn of the assistant ends with", ""
            if any(ended):
                turns_end, then = "some of the assistant's turns end without", " after them"
            findings.remark(
                f"{turns_end} a special token that is trained on, so the model does not learn to stop{then}; a template with "
                "{% generation %} blocks (data.chat_template) can say where turns end",
                source,
            )


UNWRITTEN = (
    "the model's chat template does not write them, so the model would not see them; use a template that does "
    "(data.chat_template), or leave them out of the data"
)


def _names(template: str, role: str) -> bool:
    """Check whether a template compares roles with this one: names it in quotes."""
    return re.search(rf"""(['"]){re.escape(role)}\1""", template) is not None


def tail(message: Message) -> str:
    """Return the last words of a message's text, as a template that trims or cuts its beginning still writes them."""
    content = message.get("content", "")
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    text = next((text for text in reversed(texts) if text.strip()), "")
    if message["role"] == "assistant":  # templates may leave out the reasoning
        text = text.rpartition("</think>")[2]
    return text.strip()[-16:]


def _without_tool_calls(message: Message) -> Message:
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest if "content" in rest else rest | {"content": ""}
