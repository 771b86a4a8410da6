"""Convert records to documents by their columns, which docs/data.md describes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megascend.apps.data.document import Document, Messages
from megascend.apps.data.findings import Findings, of_source
from megascend.apps.data.images import with_images
from megascend.apps.data.messages import (
    CALLS,
    EMPTY_ANSWER,
    LARGEST_NUMBER,
    RESULTS,
    conversation_or_text,
    decoded,
    from_sharegpt,
    is_empty_answer,
    parse_messages,
    parse_tools,
    tool_remarks,
)
from megascend.errors import DataError

if TYPE_CHECKING:
    from megascend.training.batch.candidates import Candidates

Fields = dict[str, Any]
"""Fields of a document; an error about them does not name its source."""
CHAT_COLUMNS = ("tools", "chat_template_kwargs")
TOP = ("top_ids", "top_logprobs")
IMAGES = ("images", "image")
"""Columns with the images of a conversation: a list, or one."""
CONVERSATIONS = ("text", "prompt", "completion", "chosen", "rejected")
"""Columns of texts in place of which other data have conversations."""
PRINTED_MESSAGES = re.compile(
    r"""["\s]*(?:\{\\*['"](?:messages|conversations)\\*['"]\s*:\s*)?(?:array\()?(?:[\[(][\[(\s]*)?["']?\{\s*"""
    r"""(?=.*?['"](?:content|value|tool_calls|function_call)\\*['"]\s*:)"""
    r"""(?=\\*['"](?:role|content|from|value|name|weight|loss|tool_call\w*|reasoning\w*|thinking|id)\\*['"]\s*:).*?"""
    r"""['"](?:role|from)\\*['"]\s*:\s*\\*['"](?:system|developer|user|assistant|tool|human|gpt)\\*['"]""",
    re.DOTALL,
)
"""Beginning of a conversation in another form than a list in JSON: as Python or NumPy prints it, JSON in JSON, JSON Lines."""


def parse_record(
    record: Any, source: str, columns: Mapping[str, str] | None = None, findings: Findings | None = None
) -> Document:
    """Parse one record. ``columns``: the data's names by ours (others are not read); ``findings`` gets columns that are not
    read.
    """
    with of_source(source):
        return _parse(record, source, columns, findings or Findings())


def _parse(record: Any, source: str, columns: Mapping[str, str] | None, findings: Findings) -> Document:
    if not isinstance(record, dict):
        raise DataError(f"expected a JSON object with {KNOWN_FORMS}, found {type(record).__name__}")
    # Tables have every column in every row, with null where a record has none.
    values = {key: value for key, value in record.items() if value is not None}
    if columns:
        missing = [column for column in columns.values() if column not in record]
        if missing:
            found = ", ".join(map(str, record)) or "nothing"
            raise DataError(f"no {', '.join(map(repr, missing))} (data.columns); found: {found}")
        names = {column: name for name, column in columns.items()}
        values = {names.get(key, ""): value for key, value in values.items() if key in names}
    # A record that fits several forms is refused: guessing would train on the wrong columns.
    forms = [form for form in FORMS if all(column in values for column in form.must)]
    if len(forms) != 1:
        keys = ", ".join(sorted(map(str, record))) or "nothing"
        remedy = "choose the ones to read" if forms else "map columns of other names"
        advice = f"{remedy} with data.columns, such as {{text: YOURS}}"
        raise DataError(f"expected exactly one of the keys {KNOWN_FORMS}, found: {keys}; {advice}")
    form = forms[0]
    chat = () if form.must in (("text",), ("token_ids",)) else (*CHAT_COLUMNS, *IMAGES)
    read_columns = set(columns.values()) if columns else {*form.must, *form.may, *chat}
    for key in record:
        if key not in read_columns:
            findings.remark(f"{key!r} is not read", source)
    label = values.get("label") if "label" in form.may else None
    document = Document(source, class_label=label, **form.parse(values))
    if document.messages is None and not isinstance(document.chosen, tuple):
        for key in chat:
            if values.get(key):
                findings.remark(f"{key!r} is not read: only conversations of messages have a chat template", source)
        return document
    with_column = [name for name in IMAGES if values.get(name) not in (None, [])]
    if len(with_column) > 1:
        raise DataError(f"images are in {' and '.join(with_column)}: leave one out (data.columns)")
    document = with_images(document, decoded(values[with_column[0]]) if with_column else None)
    for remark in tool_remarks(values.get("tools"), document):
        findings.remark(remark, source)
    return document


def text_column(values: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    """Return a string column; ``empty``: it may be missing or blank."""
    text = values.get(name, "" if empty else None)
    is_list = isinstance(text, str) and isinstance(conversation_or_text(text), list)
    if is_list and name in CONVERSATIONS:
        raise DataError(f"{name!r} is a conversation, not a text: name its column 'messages' (data.columns)")
    if isinstance(text, str) and not is_list and PRINTED_MESSAGES.match(text):
        raise DataError(f"{name!r} is a conversation in Python's notation: write it as JSON (json.dumps)")
    if not isinstance(text, str) or not (empty or text.strip()):
        kind = "a string" if empty else "a string that is not empty"
        raise DataError(f"{name!r} must be {kind}, found {text!r:.60}")
    return text


def _parse_tokens(values: Mapping[str, Any]) -> Fields:
    tokens = decoded(values["token_ids"])
    if (
        not isinstance(tokens, list)
        or len(tokens) < 2
        or not all(type(token) is int and token >= 0 for token in tokens)
    ):
        raise DataError(f"'token_ids' must be a list of at least two token ids, found {tokens!r:.60}")
    prompt, weights = values.get("prompt_length", 0), decoded(values.get("weights", [1.0] * len(tokens)))
    if type(prompt) is not int or not 0 <= prompt < len(tokens):
        raise DataError(f"'prompt_length' must be in [0, {len(tokens)}), found {prompt!r:.60}")
    numbers = isinstance(weights, list) and all(
        type(weight) in (int, float) and 0 <= weight <= LARGEST_NUMBER for weight in weights
    )
    if not numbers or len(weights) != len(tokens):
        raise DataError(
            f"'weights' must be {len(tokens)} numbers of at least 0 (of float32), one for each token, "
            f"found {weights!r:.60}"
        )
    # The first token is never predicted.
    weights = [0.0] * max(prompt, 1) + [float(weight) for weight in weights[max(prompt, 1) :]]
    if not any(weights):
        raise DataError("no token is learned: 'prompt_length' or 'weights' exclude all")
    candidates = _candidates(values, weights)
    return {"token_ids": tuple(tokens), "token_weights": tuple(weights), "candidates": candidates}


def _candidates(values: Mapping[str, Any], weights: list[float]) -> Candidates | None:
    """Return the candidates of ``top_ids`` and ``top_logprobs``, a row for each token; None without them."""
    present = [name for name in TOP if name in values]
    if not present:
        return None
    if len(present) == 1:
        raise DataError(f"'top_ids' and 'top_logprobs' must be both there; only {present[0]!r} is")
    columns = []
    for name in TOP:
        rows = decoded(values[name])
        if not isinstance(rows, list) or len(rows) != len(weights):
            count = f"{len(rows)} rows" if isinstance(rows, list) else f"{rows!r:.60}"
            raise DataError(f"{name!r} must have a row for each of the {len(weights)} tokens, found {count}")
        rows = [[] if row is None else row for row in rows]
        if not all(isinstance(row, list) for row in rows):
            raise DataError(f"{name!r} must be a list of lists")
        columns.append(rows)
    for index, (weight, row) in enumerate(zip(weights, columns[0], strict=True)):
        if weight and not row:
            raise DataError(f"'top_ids'[{index}] is empty, and the token there is learned")
    # Imported here: reading a run file needs no torch.
    from megascend.training.batch.candidates import Candidates

    try:
        return Candidates.from_rows(*columns)
    except DataError as error:
        raise DataError(f"'top_ids' and 'top_logprobs': {error}") from None


def _parse_chat(values: Mapping[str, Any]) -> Fields:
    name = "messages" if "messages" in values else "conversations"
    messages = from_sharegpt(values[name], name)
    if isinstance(messages, list) and name == "conversations" and (system := text_column(values, "system", empty=True)):
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        if first.get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
        elif first.get("content") != system:
            raise DataError(
                f"'system' is {system!r:.60}, and the conversation begins with another system message, "
                f"{first.get('content')!r:.60}: leave one out (data.columns)"
            )
    return _conversation(messages, name, values)


def _parse_completion(values: Mapping[str, Any]) -> Fields:
    prompt, completion = (conversation_or_text(values[name]) for name in ("prompt", "completion"))
    if isinstance(prompt, list) != isinstance(completion, list):
        raise DataError("'prompt' and 'completion' must be both strings or both lists of messages")
    label = _number(values.get("label"))
    label = label if type(label) is bool else None  # classifiers have others, which the encoder checks
    if not isinstance(prompt, list):
        texts = {name: text_column(values, name) for name in ("prompt", "completion")}
        return {**texts, "label": label, **_chat(values)}
    if label is not None and not prompt:
        raise DataError("'prompt' is empty, and the completion is labelled")
    before, weights = parse_messages(prompt, "prompt", learned=False) if prompt else ((), None)
    answer, answer_weights = parse_messages(completion, "completion")
    messages = (*before, *answer)
    if label is not None and (weights is not None or answer_weights is not None):
        raise DataError("'loss' and 'weight' have no meaning in labelled completions: leave them out")
    # One side may have weights and the other not: the default weights fill the gap.
    plain = tuple(float(message["role"] == "assistant") for message in messages)
    loss_weights = (
        None
        if weights is answer_weights is None
        else (*(weights or plain[: len(before)]), *(answer_weights or plain[len(before) :]))
    )
    fields = {"messages": messages, "loss_weights": loss_weights, "prompt_messages": len(before), "label": label}
    return fields | _chat(values)


def _parse_alpaca(values: Mapping[str, Any]) -> Fields:
    messages = []
    if system := text_column(values, "system", empty=True):
        messages.append({"role": "system", "content": system})
    # In tables the list is JSON text.
    history = decoded(values.get("history", []))
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise DataError(f"'history' must be a list of [question, answer], found {history!r:.60}")
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    extra = text_column(values, "input", empty=True)
    question = text_column(values, "instruction") + (f"\n{extra}" if extra.strip() else "")
    messages += [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text_column(values, "output")},
    ]
    return _conversation(messages, "messages of instruction and output", values)


def _number(value: Any) -> Any:
    """Parse a string that is a JSON number or boolean, as tables may have them; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        number = json.loads(value.lower())  # pandas writes True
    except (ValueError, RecursionError):
        return value
    return number if isinstance(number, int | float) else value


def _parse_pair(values: Mapping[str, Any]) -> Fields:
    sides = {name: from_sharegpt(values[name], name) for name in ("chosen", "rejected")}
    lists = [isinstance(side, list) for side in sides.values()]
    margin = _number(values.get("margin"))
    if margin is not None and (type(margin) not in (int, float) or not abs(margin) <= LARGEST_NUMBER):
        raise DataError(
            f"'margin' must be a finite number (of float32), the least difference of both rewards, found "
            f"{margin!r:.60}; choose the columns to read with data.columns"
        )
    if not any(lists):
        chosen, rejected = (text_column(values, name) for name in sides)
        prompt = text_column(values, "prompt")
        if chosen == rejected:
            raise DataError("'chosen' and 'rejected' are the same")
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": margin, **_chat(values)}
    if not all(lists):
        raise DataError("'chosen' and 'rejected' must be both strings or both lists of messages")
    conversations = [_side(side, values.get("prompt"), name) for name, side in sides.items()]
    if conversations[0] == conversations[1]:
        raise DataError("'chosen' and 'rejected' are the same")
    return {"chosen": conversations[0], "rejected": conversations[1], "margin": margin, **_chat(values)}


def _side(side: list[Any], prompt: Any, label: str) -> Messages:
    """Return one side as a complete conversation; the prompt is put in front unless the side begins with a user or system."""
    first = side[0] if side else None
    role = first.get("role") if isinstance(first, dict) else "assistant"
    # TRL's data sets have both forms: a separate prompt, and one that is repeated in both sides.
    is_complete = role not in ("assistant", "tool", *CALLS, *RESULTS)
    prompt = from_sharegpt(prompt, label)
    before: list[Any] = []
    if not is_complete:
        before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if not prompt:
            raise DataError(f"{label} begins with the {role}'s message, and there is no 'prompt'")
    messages, weights = parse_messages([*before, *side], label, learned=False)
    if is_complete and prompt and not _holds(messages, prompt, label):
        raise DataError(
            f"{label} begins with the {role}'s message, and what 'prompt' says is not in it: begin with the assistant's message, "
            "or leave the prompt out (data.columns)"
        )
    if weights is not None:
        raise DataError(f"{label}: 'loss' and 'weight' have no meaning in preference pairs: leave them out")
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{label} must end with the assistant's message")
    if is_empty_answer(messages[-1]):
        raise DataError(f"{label}[{len(messages) - 1}]: {EMPTY_ANSWER}")
    return messages


def _holds(messages: Messages, prompt: Any, label: str) -> bool:
    """Return True if a conversation has the messages of ``prompt``, or the text, or a message whose text is a part of it."""
    if isinstance(prompt, list):
        prompt_messages, _ = parse_messages(prompt, f"{label}: prompt")
        return all(message in messages for message in prompt_messages)
    contents = [str(message.get("content", "")).strip() for message in messages[:-1]]
    return any(text and (text in str(prompt) or str(prompt).strip() in text) for text in contents)


def _conversation(messages: Any, label: str, values: Mapping[str, Any]) -> Fields:
    parsed, weights = parse_messages(messages, label)
    return {"messages": parsed, "loss_weights": weights, **_chat(values)}


def _chat(values: Mapping[str, Any]) -> Fields:
    """Return the chat template's variables other than the messages."""
    options = decoded(values.get("chat_template_kwargs") or {})
    if not isinstance(options, dict):
        raise DataError(f"'chat_template_kwargs' must be an object, found {options!r:.60}")
    return {"tools": parse_tools(values.get("tools"), "tools"), "template_options": options or None}


class Form(NamedTuple):
    """Columns that a form of record must have, those that it may have, and the function that reads them."""

    must: tuple[str, ...]
    may: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], Fields]


FORMS = (
    Form(("messages",), ("label",), _parse_chat),
    Form(("conversations",), ("system", "label"), _parse_chat),
    Form(("prompt", "completion"), ("label",), _parse_completion),
    Form(("instruction", "output"), ("input", "system", "history", "label"), _parse_alpaca),
    Form(("chosen", "rejected"), ("prompt", "margin"), _parse_pair),
    Form(("text",), ("label",), lambda values: {"text": text_column(values, "text")}),
    Form(("token_ids",), ("prompt_length", "weights", "top_ids", "top_logprobs", "label"), _parse_tokens),
)
_NAMES = [" and ".join(map(repr, form.must)) for form in FORMS]
KNOWN_FORMS = f"{', '.join(_NAMES[:-1])}, or {_NAMES[-1]}"
