"""Messages of a conversation: checked, and brought into the form that chat templates expect. Pure."""

from __future__ import annotations

import json
import math
from typing import Any

from megascend.data.document import Message, Messages
from megascend.errors import DataError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which data sets keep what the assistant thinks before it answers; templates read the first or the second."""
LOSS = ("loss", "weight")
"""Keys that say how much the loss counts a message."""

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def parse_messages(found: Any, where: str) -> tuple[Messages, tuple[float, ...] | None]:
    """Messages as ``{"role": ..., "content": ...}`` objects, and the loss weight of each if any says so.

    Args:
        where: begins every message of an error, ``file:line: messages``.

    Raises:
        DataError: one is not of the right form.
    """
    found = decoded(found)
    if not isinstance(found, list) or not found:
        raise DataError(f"{where} must be a list that is not empty, found {found!r:.60}")
    messages = tuple(parse_message(message, f"{where}[{index}]") for index, message in enumerate(found))
    given = [_loss_weight(message, f"{where}[{index}]") for index, message in enumerate(found)]
    if all(weight is None for weight in given):
        return messages, None
    weights = []
    for index, (message, weight) in enumerate(zip(messages, given, strict=True)):
        learned = message["role"] == "assistant"
        if weight and not learned:
            raise DataError(
                f"{where}[{index}]: only the assistant's messages can carry loss, this one is the {message['role']}'s; to learn "
                "all of a conversation set data.train_on_prompt: true"
            )
        weights.append(float(learned) if weight is None else weight)
    return messages, tuple(weights)


def parse_message(found: Any, where: str) -> Message:
    """One message, without its loss weight and without keys whose value is null.

    Raises:
        DataError: it is not of the right form.
    """
    if not isinstance(found, dict):
        raise DataError(f"{where} must be an object with 'role' and 'content', got {found!r:.60}")
    message = {key: value for key, value in found.items() if value is not None and key not in LOSS}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{where} must have a string 'role', found {role!r:.60}")
    if "tool_calls" in message:
        calls = _tool_calls(message["tool_calls"], where)
        message["tool_calls"] = calls
        if not calls:
            del message["tool_calls"]
        elif role != "assistant":
            raise DataError(f"{where}: 'tool_calls' belong to the assistant, this message is the {role}'s")
    thoughts = [message[key] for key in REASONING if key in message]
    if any(not isinstance(thought, str) for thought in thoughts) or len(set(thoughts)) > 1:
        raise DataError(f"{where}: {' and '.join(REASONING)} must be one string, found {thoughts!r:.60}")
    if thoughts:
        message["reasoning_content"] = message["thinking"] = thoughts[0]
        message.pop("reasoning", None)
    message |= _content(message, where)
    return message


def _content(message: Message, where: str) -> dict[str, Any]:
    """``{"content": ...}``, a string or a list of text parts; empty where there is none and need not be."""
    content = message.get("content")
    if content is None and ("tool_calls" in message or "reasoning_content" in message):
        return {}
    if isinstance(content, str):
        return {"content": content}
    if not isinstance(content, list) or not content:
        raise DataError(f"{where} must have a string 'content', or a list of parts, found {content!r:.60}")
    parts = []
    for number, part in enumerate(content):
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            found = f"a part of type {kind!r}" if kind not in (None, "text") else f"{part!r:.60}"
            raise DataError(
                f'{where}: content[{number}] is {found}; only text can be trained on: {{"type": "text", "text": ...}}'
            )
        parts.append({"type": "text", "text": part["text"]})
    return {"content": parts}


def _tool_calls(found: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects: templates write them as JSON, and a string would be quoted once more."""
    found = decoded(found)
    if not isinstance(found, list):
        raise DataError(f"{where}: 'tool_calls' must be a list, found {found!r:.60}")
    calls = []
    for number, call in enumerate(found):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise DataError(f"{where}: tool_calls[{number}] must name a function, found {call!r:.60}")
        arguments = decoded(inner.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise DataError(
                f"{where}: the arguments of tool_calls[{number}] must be an object, or one written as JSON, found "
                f"{inner['arguments']!r:.60}"
            )
        whole = inner | {"arguments": arguments}
        calls.append(call | {"function": whole} if "function" in call else whole)
    return calls


def with_arguments_as_text(message: Message) -> Message:
    """A message whose tool calls have their arguments written as JSON."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        inner = call.get("function", call)
        inner = inner | {"arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
        calls.append(call | {"function": inner} if "function" in call else inner)
    return message | {"tool_calls": calls}


def _loss_weight(message: Message, where: str) -> float | None:
    given = [message[key] for key in LOSS if message.get(key) is not None]
    if not given:
        return None
    if any(not isinstance(value, (bool, int, float)) or not math.isfinite(value) or value < 0 for value in given):
        raise DataError(f"{where}: 'loss' and 'weight' are true, false or a number from 0 on, found {given[0]!r:.60}")
    if len({float(value) for value in given}) > 1:
        raise DataError(f"{where}: 'loss' says {given[0]!r} and 'weight' says {given[1]!r}: leave one out")
    return float(given[0])


def parse_tools(found: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """The functions that a conversation may call, as JSON schemas; None where there are none.

    Raises:
        DataError: they are not a list of objects.
    """
    found = decoded(found)
    if found is None or found in ([], ""):
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise DataError(f"{where} must be a list of objects (JSON schemas of functions), found {found!r:.60}")
    return tuple(found)


def from_sharegpt(found: Any, where: str) -> Any:
    """``{"from": "human", "value": ...}`` as ``{"role": "user", "content": ...}``; messages of another form as they are.

    Raises:
        DataError: a role is unknown.
    """
    found = conversation_or_text(found)
    if not isinstance(found, list) or not any(isinstance(message, dict) and "from" in message for message in found):
        return found
    messages = []
    for index, message in enumerate(found):
        if not isinstance(message, dict) or "from" not in message:
            raise DataError(f"{where}[{index}] must have 'from' and 'value' like the others, found {message!r:.60}")
        role, value = message["from"], message.get("value")
        rest = {key: each for key, each in message.items() if key not in ("from", "value")}
        if role == "function_call":
            call = decoded(value)
            messages.append({"role": "assistant", "tool_calls": call if isinstance(call, list) else [call]} | rest)
            continue
        if not isinstance(role, str) or role not in SHAREGPT_ROLES:
            known = ", ".join([*SHAREGPT_ROLES, "function_call"])
            raise DataError(f"{where}[{index}]: 'from' is {role!r:.60}; known: {known}")
        messages.append({"role": SHAREGPT_ROLES[role], "content": value} | rest)
    return messages


def decoded(value: Any) -> Any:
    """What a string that holds a JSON list or object says; anything else as it is. Tables have no other way to hold lists."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def conversation_or_text(value: Any) -> Any:
    """As :func:`decoded` for lists of messages. Another list is a text that happens to be JSON, an answer with tool calls say."""
    found = decoded(value)
    is_conversation = isinstance(found, list) and all(
        isinstance(message, dict) and ("role" in message or "from" in message) for message in found
    )
    return found if found and is_conversation else value


def without_nulls(value: Any) -> Any:
    """``value`` without the keys whose value is None, at any depth: Arrow gives every object all keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
