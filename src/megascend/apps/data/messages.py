"""Messages of a conversation: checked, and brought into the form that chat templates expect. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from megascend.apps.data.document import Document, Message, Messages
from megascend.apps.data.images import image_part
from megascend.errors import DataError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys for the assistant's reasoning in data sets; templates read the first or the second."""
LARGEST_NUMBER = 3.4028234e38
"""Largest number of float32, in which losses are computed."""
LOSS = ("loss", "weight")
"""Keys for the loss weight of a message."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of OpenAI's form."""
CALLS = ("function_call", "tool_call")
"""Speakers of messages that are tool calls, written as JSON: of ShareGPT and LLaMA-Factory, and of ms-swift."""
RESULTS = ("observation", "function_response", "tool_response")
"""Speakers of messages that are a tool's answer; written as the role ``tool`` unless a chat template knows them."""
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    **dict(zip(RESULTS, RESULTS, strict=True)),
}
MISTAKEN = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Speakers of other formats, which chat templates do not know, and the roles that were probably meant."""


def parse_messages(values: Any, label: str, *, learned: bool = True) -> tuple[Messages, tuple[float, ...] | None]:
    """Return messages as ``{"role": ..., "content": ...}`` objects, and the loss weight of each if any has one.

    ``label`` begins every error, ``file:line: messages``; with ``learned`` none of the assistant's messages may be empty.
    """
    values = decoded(values)
    if not isinstance(values, list) or not values:
        raise DataError(f"{label} must be a list that is not empty, found {values!r:.60}")
    messages: list[Message] = []
    # All problems of a conversation are collected, so that a user sees them in one run.
    message_weights: list[float | None] = []
    problems: list[str] = []

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except DataError as error:
            problems.append(str(error))
            return None

    for index, raw in enumerate(values):
        location = f"{label}[{index}]"
        message = attempt(lambda raw=raw, location=location: parse_message(raw, location))
        if message is None:
            continue
        weight = attempt(lambda raw=raw, location=location: _loss_weight(raw, location))
        if weight and message["role"] != "assistant":
            advice = "; to learn all of a conversation set data.train_on_prompt: true" if learned else ""
            problems.append(
                f"{location}: only the assistant's messages can carry loss, this one is the {message['role']}'s{advice}"
            )
        if learned and weight != 0 and is_empty_answer(message):
            problems.append(f"{location}: {EMPTY_ANSWER}")
        if _continues_calls(messages, raw, message, weight, message_weights):
            messages[-1] = messages[-1] | {"tool_calls": [*messages[-1]["tool_calls"], *message["tool_calls"]]}
            continue
        messages.append(message)
        message_weights.append(weight)
    if problems:
        raise DataError("\n".join(problems))
    if all(weight is None for weight in message_weights):
        return tuple(messages), None
    weights = (
        float(message["role"] == "assistant") if weight is None else weight
        for message, weight in zip(messages, message_weights, strict=True)
    )
    return tuple(messages), tuple(weights)


EMPTY_ANSWER = (
    "the assistant's message is empty, so that only its end would be learned; remove it, or keep it out of the loss "
    '("loss": false)'
)


def is_empty_answer(message: Message) -> bool:
    """Check whether an assistant's message is empty: no text, no thoughts, no tool calls."""
    content = message.get("content", "")
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return (
        message["role"] == "assistant"
        and not text.strip()
        and "tool_calls" not in message
        and not str(message.get("reasoning_content", "")).strip()
    )


def _continues_calls(
    messages: list[Message], raw: Any, message: Message, weight: float | None, weights: list[float | None]
) -> bool:
    """Check whether a message with only tool calls follows another such message: parallel calls in separate messages."""
    return (
        isinstance(raw, dict)
        and raw.get("role") in CALLS
        and bool(messages)
        and set(messages[-1]) == set(message) == {"role", "tool_calls"}
        and weights[-1] == weight
    )


def parse_message(raw: Any, label: str) -> Message:
    """Return one message, without its loss weight and without keys whose value is null."""
    if not isinstance(raw, dict):
        raise DataError(f"{label} must be an object with 'role' and 'content', got {raw!r:.60}")
    message = {key: value for key, value in raw.items() if value is not None and key not in LOSS}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{label} must have a string 'role', found {role!r:.60}")
    role = message["role"] = _role(role, label)
    # The content of such a message is the call itself, as JSON.
    if role in CALLS:
        calls = decoded(message.pop("content", None))
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
        role = message["role"] = "assistant"
    if isinstance(message.get("function_call"), dict) and "tool_calls" not in message:  # OpenAI's earlier form
        message["tool_calls"] = [message.pop("function_call")]
    if "tool_calls" in message:
        calls = _tool_calls(message["tool_calls"], label)
        message["tool_calls"] = calls
        if not calls:
            del message["tool_calls"]
        elif role != "assistant":
            raise DataError(f"{label}: 'tool_calls' belong to the assistant, this message is the {role}'s")
    # None are "" in many data sets, which is not content that a template must write.
    thoughts = [message[key] for key in REASONING if message.get(key, "") != ""]
    if any(not isinstance(reasoning, str) for reasoning in thoughts) or len(set(thoughts)) > 1:
        raise DataError(f"{label}: {' and '.join(REASONING)} must be one string, found {thoughts!r:.60}")
    if thoughts:
        # Under both names, since templates read different ones; "reasoning" is read by none.
        message["reasoning_content"] = message["thinking"] = thoughts[0]
        message.pop("reasoning", None)
    message |= _content(message, label)
    return message


def _role(role: str, label: str) -> str:
    """Return a role unchanged, unless it looks like a misspelt one."""
    roles = (*ROLES, *CALLS, *RESULTS)
    if role in roles:
        return role
    plain = role.strip().lower()
    suggestion = (
        plain if plain in roles else MISTAKEN.get(plain) or next(iter(get_close_matches(plain, ROLES, 1, 0.8)), None)
    )
    # An unknown role is allowed, as templates may have their own; one that resembles a known role would lose its loss silently.
    if suggestion is not None:
        raise DataError(f"{label}: the role {role!r} is unknown, did you mean {suggestion!r}?")
    return role


def _content(message: Message, label: str) -> dict[str, Any]:
    """Return ``{"content": ...}``, a string or a list of texts and images; empty if there is none and none is required."""
    content = message.get("content")
    if content is None and ("tool_calls" in message or "reasoning_content" in message):
        return {}
    if isinstance(content, str):
        return {"content": content}
    if not isinstance(content, list) or not content:
        raise DataError(f"{label} must have a string 'content', or a list of parts, found {content!r:.60}")
    parts = []
    for number, part in enumerate(content):
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url"):
            parts.append(image_part(part, f"{label}: content[{number}]"))
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            description = f"a part of type {kind!r}" if kind not in (None, "text") else f"{part!r:.60}"
            raise DataError(
                f"{label}: content[{number}] is {description}; only text and images can be trained on: "
                '{"type": "text", "text": ...} and {"type": "image", "image": PATH}'
            )
        parts.append({"type": "text", "text": part["text"]})
    return {"content": parts}


def _tool_calls(raw: Any, label: str) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form, with arguments as objects: templates write them as JSON and would quote a string."""
    raw = decoded(raw)
    if not isinstance(raw, list):
        raise DataError(f"{label}: 'tool_calls' must be a list, found {raw!r:.60}")
    calls = []
    for number, call in enumerate(raw):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise DataError(f"{label}: tool_calls[{number}] must name a function, found {call!r:.60}")
        if inner.get("arguments") is None and (other := _other_arguments(call, inner)):
            raise DataError(
                f"{label}: tool_calls[{number}], of {inner['name']!r}, has {other}, so that a call without arguments would be "
                "learned: put them into 'arguments' of the function"
            )
        arguments = decoded(inner.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise DataError(
                f"{label}: the arguments of tool_calls[{number}] must be an object, or one written as JSON, found "
                f"{inner['arguments']!r:.60}"
            )
        # Calls without the "function" wrapper keep their id, which answers of tools refer to.
        outer = call if "function" in call else {key: value for key, value in call.items() if key in ("id", "type")}
        function = {key: value for key, value in inner.items() if "function" in call or key not in ("id", "type")}
        # "type" is part of OpenAI's form.
        calls.append({"type": "function"} | outer | {"function": function | {"arguments": arguments}})
    return calls


def _other_arguments(call: dict[str, Any], function: dict[str, Any]) -> str | None:
    """Say where a call without ``arguments`` seems to have them: under another key whose value is an object; or None."""
    outer = {} if function is call else {key: value for key, value in call.items() if key != "function"}
    for part, relation in ((function, "and no 'arguments'"), (outer, "beside 'function'")):
        if key := next((key for key, value in part.items() if value and isinstance(decoded(value), dict)), None):
            return f"{key!r} {relation}"
    return None


def with_arguments_as_text(message: Message) -> Message:
    """Return a message with the arguments of its tool calls serialized as JSON."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        inner = call.get("function", call)
        inner = inner | {"arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
        calls.append(call | {"function": inner} if "function" in call else inner)
    return message | {"tool_calls": calls}


def _loss_weight(message: Message, label: str) -> float | None:
    weights = [message[key] for key in LOSS if message.get(key) is not None]
    if not weights:
        return None
    # False for NaN too; an integer may be too large to become a float.
    if not all(isinstance(value, (bool, int, float)) and 0 <= value <= LARGEST_NUMBER for value in weights):
        raise DataError(f"{label}: 'loss' and 'weight' are true, false or a number from 0 on, found {weights[0]!r:.60}")
    if len({float(value) for value in weights}) > 1:
        raise DataError(f"{label}: 'loss' says {weights[0]!r} and 'weight' says {weights[1]!r}: leave one out")
    return float(weights[0])


def parse_tools(value: Any, label: str) -> tuple[dict[str, Any], ...] | None:
    """Return the functions that a conversation may call, in OpenAI's form; None without any."""
    value = decoded(value)
    if value is None or value in ([], ""):
        return None
    if not isinstance(value, list) or not all(isinstance(decoded(tool), dict) for tool in value):
        raise DataError(f"{label} must be a list of objects (JSON schemas of functions), found {value!r:.60}")
    return tuple(_wrapped(decoded(tool)) for tool in value)


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form; one without a function, perhaps in a template's own form, is returned unchanged."""
    if isinstance(tool.get("function"), dict):
        return {"type": "function"} | tool
    if isinstance(tool.get("name"), str) and tool.get("type", "function") == "function":
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


def tool_remarks(raw_tools: Any, document: Document) -> list[str]:
    """Return remarks on a document's tools and calls, which do not prevent training; ``raw_tools``: as in the data."""
    remarks = []
    tools, raw = document.tools or (), decoded(raw_tools)
    if isinstance(raw, list) and [decoded(tool) for tool in raw] != list(tools):
        remarks.append('tools are put into the form {"type": "function", "function": ...}')
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    for function in functions:
        name, schema = function.get("name"), function.get("parameters")
        if schema is not None and not isinstance(schema, dict):
            remarks.append(f"the 'parameters' of tool {name!r} are no JSON schema")
            continue
        if schema and "type" not in schema:
            remarks.append(f"the 'parameters' of tool {name!r} have no 'type' (\"object\")")
        properties = (schema or {}).get("properties")
        properties = properties if isinstance(properties, dict) else {}
        typed = [key for key, value in properties.items() if isinstance(value, dict) and TYPED & value.keys()]
        if untyped := [repr(key) for key in properties if key not in typed]:
            remarks.append(f"parameters of tool {name!r} have no 'type': {', '.join(untyped)}")
    sides = (document.messages, document.chosen, document.rejected)
    messages = [message for side in sides if isinstance(side, tuple) for message in side]
    called_names = dict.fromkeys(
        call["function"]["name"] for message in messages for call in message.get("tool_calls", ())
    )
    declared = {function.get("name") for function in functions} | {tool.get("name") for tool in tools}
    remarks += [
        f"{name!r} is called, and 'tools' {'does not declare it' if tools else 'are missing'}"
        for name in called_names
        if name not in declared
    ]
    roles = dict.fromkeys(message["role"] for message in messages)
    remarks += [
        f"the role {role!r} is none of {', '.join(ROLES)}: its messages are not learned as the assistant's are"
        for role in roles
        if role not in (*ROLES, *RESULTS)
    ]
    return remarks


TYPED = {"type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"}
"""Keys of a JSON schema that determine a value's type."""


def from_sharegpt(raw: Any, label: str) -> Any:
    """Convert ``{"from": "human", "value": ...}`` to ``{"role": "user", "content": ...}``; leave other forms unchanged."""
    raw = conversation_or_text(raw)
    if not isinstance(raw, list) or not any(isinstance(message, dict) and "from" in message for message in raw):
        return raw
    messages, problems = [], []
    for index, message in enumerate(raw):
        if not isinstance(message, dict) or "from" not in message:
            problems.append(f"{label}[{index}] must have 'from' and 'value' like the others, found {message!r:.60}")
            continue
        role, value = message["from"], message.get("value")
        # Other keys, such as a loss weight, are kept.
        rest = {key: entry for key, entry in message.items() if key not in ("from", "value")}
        if not isinstance(role, str) or role not in (*SHAREGPT_ROLES, *CALLS):
            speakers = ", ".join([*SHAREGPT_ROLES, *CALLS])
            problems.append(f"{label}[{index}]: 'from' is {role!r:.60}; known: {speakers}")
            continue
        messages.append({"role": SHAREGPT_ROLES.get(role, role), "content": value} | rest)
    if problems:
        raise DataError("\n".join(problems))
    return messages


def decoded(value: Any) -> Any:
    """Parse a string that holds a JSON list or object, as in tables; return anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def conversation_or_text(value: Any) -> Any:
    """Apply :func:`decoded` to lists of messages. Any other list is text that happens to be JSON."""
    parsed = decoded(value)
    is_conversation = isinstance(parsed, list) and all(
        isinstance(message, dict) and ("role" in message or "from" in message) for message in parsed
    )
    return parsed if parsed and is_conversation else value
