"""Parsing of records: columns, messages, and errors for invalid ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megascend.apps.data.columns import parse_record
from megascend.apps.data.document import Document
from megascend.apps.data.findings import Findings
from megascend.errors import DataError

USER, ANSWER = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}
SYSTEM = {"role": "system", "content": "be brief"}
WORSE = {"role": "assistant", "content": "2"}
CHAT = (USER, ANSWER)
TOOL = {"name": "look", "parameters": {}}
WRAPPED = {"type": "function", "function": TOOL}
CALL = {"name": "look", "arguments": {"where": "sky"}}
WRAPPED_CALL = {"type": "function", "function": CALL}

RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"text": "x"}, {"text": "x"}),
    "chat": ({"messages": list(CHAT)}, {"messages": CHAT}),
    "margin of a table": (
        {"prompt": "p", "chosen": "a", "rejected": "b", "margin": "0.5"},
        {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5},
    ),
    "label of a table": (
        {"prompt": "p", "completion": "c", "label": "True"},
        {"prompt": "p", "completion": "c", "label": True, "class_label": "True"},
    ),
    "label of a classifier": ({"text": "t", "label": [0]}, {"text": "t", "class_label": [0]}),
    "chat as JSON": ({"messages": '[{"role": "user", "content": "one?"}]'}, {"messages": (USER,)}),
    "null columns": ({"messages": list(CHAT), "text": None, "tools": None}, {"messages": CHAT}),
    "tools": ({"messages": list(CHAT), "tools": [TOOL]}, {"messages": CHAT, "tools": (WRAPPED,)}),
    "tools as JSON": (
        {"messages": list(CHAT), "tools": '[{"name": "look", "parameters": {}}]'},
        {"messages": CHAT, "tools": (WRAPPED,)},
    ),
    "no tools": ({"messages": list(CHAT), "tools": []}, {"messages": CHAT}),
    "template options": (
        {"messages": list(CHAT), "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": CHAT, "template_options": {"enable_thinking": False}},
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "two"}], "system": "be brief"},
        {"messages": (SYSTEM, *CHAT)},
    ),
    "ShareGPT, tools": (
        {
            "conversations": [
                {"from": "human", "value": "one?"},
                {"from": "function_call", "value": '{"name": "look", "arguments": {"where": "sky"}}'},
                {"from": "observation", "value": "blue"},
                {"from": "gpt", "value": "two", "weight": 0},
            ]
        },
        {
            "messages": (
                USER,
                {"role": "assistant", "tool_calls": [WRAPPED_CALL]},
                {"role": "observation", "content": "blue"},
                ANSWER,
            ),
            "loss_weights": (0.0, 1.0, 0.0, 0.0),
        },
    ),
    "conversations with roles": ({"conversations": list(CHAT)}, {"messages": CHAT}),
    "prompt and completion": ({"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "1 + 1 =", "completion": " 2"}),
    "prompt and completion of messages": (
        {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
        {"messages": (*CHAT, *CHAT), "prompt_messages": 3},
    ),
    "completion that is JSON": (
        {"prompt": "[1, 2]", "completion": '[{"name": "f", "arguments": {}}]'},
        {"prompt": "[1, 2]", "completion": '[{"name": "f", "arguments": {}}]'},
    ),
    "pair of texts that are JSON": (
        {"prompt": "x", "chosen": "[1]", "rejected": "[]"},
        {"prompt": "x", "chosen": "[1]", "rejected": "[]"},
    ),
    "pair of conversations after a prompt that is JSON": (
        {"prompt": "[3, 1]", "chosen": [ANSWER], "rejected": [ANSWER | {"content": "no"}]},
        {
            "chosen": ({"role": "user", "content": "[3, 1]"}, ANSWER),
            "rejected": ({"role": "user", "content": "[3, 1]"}, ANSWER | {"content": "no"}),
        },
    ),
    "pair that goes on with a tool's message": (
        {
            "prompt": [USER, ANSWER],
            "chosen": [{"role": "tool", "content": "t"}, ANSWER],
            "rejected": [{"role": "tool", "content": "t"}, ANSWER | {"content": "no"}],
        },
        {
            "chosen": (*CHAT, {"role": "tool", "content": "t"}, ANSWER),
            "rejected": (*CHAT, {"role": "tool", "content": "t"}, ANSWER | {"content": "no"}),
        },
    ),
    "Alpaca": ({"instruction": "one?", "input": "", "output": "two"}, {"messages": CHAT}),
    "Alpaca with everything": (
        {"instruction": "add", "input": "1 1", "output": "two", "system": "be brief", "history": [["one?", "two"]]},
        {"messages": (SYSTEM, *CHAT, {"role": "user", "content": "add\n1 1"}, ANSWER)},
    ),
    "pair of text": (
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"prompt": "p", "chosen": "c", "rejected": "r"},
    ),
    "pair of conversations": (
        {"chosen": [*CHAT], "rejected": [USER, WORSE]},
        {"chosen": CHAT, "rejected": (USER, WORSE)},
    ),
    "pair of answers": (
        {"prompt": "one? ", "chosen": list(CHAT), "rejected": [USER, WORSE]},
        {"chosen": CHAT, "rejected": (USER, WORSE)},
    ),
    "pair with a prompt that both hold, as a list": (
        {"prompt": [USER], "chosen": [SYSTEM, *CHAT], "rejected": [SYSTEM, USER, WORSE]},
        {"chosen": (SYSTEM, *CHAT), "rejected": (SYSTEM, USER, WORSE)},
    ),
    "pair of answers after a text": (
        {"prompt": "one?", "chosen": [ANSWER], "rejected": [WORSE]},
        {"chosen": CHAT, "rejected": (USER, WORSE)},
    ),
    "pair of answers to messages": (
        {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [WORSE]},
        {"chosen": (SYSTEM, *CHAT), "rejected": (SYSTEM, USER, WORSE)},
    ),
    "arguments as JSON": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
                },
            ]
        },
        {
            "messages": (
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
                },
            )
        },
    ),
    "LLaMA-Factory, several calls at once": (
        {
            "conversations": [
                {"from": "human", "value": "one?"},
                {"from": "function_call", "value": json.dumps([CALL, CALL])},
                {"from": "observation", "value": "blue"},
                {"from": "gpt", "value": "two"},
            ],
            "tools": json.dumps([TOOL]),
        },
        {
            "messages": (
                USER,
                {"role": "assistant", "tool_calls": [WRAPPED_CALL] * 2},
                {"role": "observation", "content": "blue"},
                ANSWER,
            ),
            "tools": (WRAPPED,),
        },
    ),
    "calls as messages with roles": (
        {
            "messages": [
                USER,
                {"role": "tool_call", "content": json.dumps(CALL)},
                {"role": "tool_call", "content": json.dumps(CALL)},
                {"role": "tool_response", "content": "blue"},
                ANSWER | {"weight": 0},
            ]
        },
        {
            "messages": (
                USER,
                {"role": "assistant", "tool_calls": [WRAPPED_CALL] * 2},
                {"role": "tool_response", "content": "blue"},
                ANSWER,
            ),
            "loss_weights": (0.0, 1.0, 0.0, 0.0),
        },
    ),
    "a function call of OpenAI's earlier form": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
            ]
        },
        {
            "messages": (
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
                },
            )
        },
    ),
    "the id of a flat call": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"id": "c1"}]}]},
        {"messages": (USER, {"role": "assistant", "tool_calls": [WRAPPED_CALL | {"id": "c1"}]})},
    ),
    "a prompt with parallel calls": (
        {
            "prompt": [
                USER,
                {"role": "tool_call", "content": json.dumps(CALL)},
                {"role": "tool_call", "content": json.dumps(CALL)},
            ],
            "completion": [{"role": "tool_call", "content": json.dumps(CALL)}],
        },
        {
            "messages": (
                USER,
                {"role": "assistant", "tool_calls": [WRAPPED_CALL] * 2},
                {"role": "assistant", "tool_calls": [WRAPPED_CALL]},
            ),
            "prompt_messages": 2,
        },
    ),
    "an empty answer that is not learned": (
        {"messages": [USER, ANSWER | {"content": "", "loss": False}, USER, ANSWER]},
        {"messages": (USER, ANSWER | {"content": ""}, USER, ANSWER), "loss_weights": (0.0, 0.0, 0.0, 1.0)},
    ),
    "an empty answer with thoughts": (
        {"messages": [USER, ANSWER | {"content": "", "thinking": "hm"}]},
        {"messages": (USER, ANSWER | {"content": "", "thinking": "hm", "reasoning_content": "hm"})},
    ),
    "reasoning": (
        {"messages": [USER, ANSWER | {"reasoning": "hm"}]},
        {"messages": (USER, ANSWER | {"reasoning_content": "hm", "thinking": "hm"})},
    ),
    "loss of each message": (
        {"messages": [USER, ANSWER | {"loss": False}, USER, ANSWER, USER | {"weight": 0}, ANSWER | {"weight": 0.5}]},
        {"messages": (*CHAT, *CHAT, *CHAT), "loss_weights": (0.0, 0.0, 0.0, 1.0, 0.0, 0.5)},
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
        {"messages": ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},)},
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_becomes_a_document(name: str) -> None:
    record, fields = RECORDS[name]
    assert parse_record(record, "f:1") == Document("f:1", **fields)


def test_tokens_with_a_teachers_candidates_become_a_document() -> None:
    record = {
        "token_ids": [5, 9, 7],
        "prompt_length": 2,
        "top_ids": [[], [4], [7, 1]],
        "top_logprobs": [None, [-1], [-0.4, -1.5]],
    }
    document = parse_record(record, "f:1")
    assert (document.token_ids, document.token_weights) == ((5, 9, 7), (0.0, 0.0, 1.0))
    assert document.candidates is not None
    assert document.candidates.ids.tolist() == [[-1, -1], [4, -1], [7, 1]]
    assert document.candidates.logprobs.tolist() == [[0.0, 0.0], [-1.0, 0.0], pytest.approx([-0.4, -1.5])]
    plain = parse_record({"token_ids": "[5, 9]", "weights": [3, 0.5]}, "f:1")
    assert (plain.token_weights, plain.candidates) == ((0.0, 0.5), None)


@pytest.mark.parametrize(
    "text",
    ["Use [{'role': 'user', 'content': 'a'}].", '[{"id": 1, "level": "user", "content": "a"}]', '{"name": "user"}'],
)
def test_text_that_resembles_a_conversation_is_text(text: str) -> None:
    assert parse_record({"prompt": "q", "completion": text}, "f:1").completion == text


PART = {"type": "video", "video": "x"}
PRINTED = str([USER, ANSWER])
"""As pandas writes lists of messages into CSV."""
BAD_RECORDS: dict[str, tuple[Any, str]] = {
    **{
        f"{' and '.join(record)} as Python prints them": (record, "in Python's notation: write it as JSON")
        for record in (
            {"text": PRINTED},
            {"prompt": PRINTED.replace("}, {", "}\n {"), "completion": PRINTED},  # NumPy's
            {"instruction": "q", "output": PRINTED},
            {"text": f"array({PRINTED}, dtype=object)"},
            {"text": str([json.dumps(USER), json.dumps(ANSWER)])},
            {"text": json.dumps(json.dumps([USER, ANSWER]))},
            {"text": f"{json.dumps(USER)}\n{json.dumps(ANSWER)}"},
            {"text": json.dumps([USER, ANSWER])[:-9]},  # cut
        )
    },
    "conversation under text": ({"text": json.dumps([USER, ANSWER])}, "is a conversation, not a text"),
    "not an object": ([1], "found list"),
    "one token": ({"token_ids": [1]}, "'token_ids' must be a list of at least two token ids"),
    "long prompt": ({"token_ids": [1, 2], "prompt_length": 2}, r"'prompt_length' must be in \[0, 2\), found 2"),
    "weights of other tokens": ({"token_ids": [1, 2], "weights": [1]}, "'weights' must be 2 numbers"),
    "negative weight": ({"token_ids": [1, 2], "weights": [1, -1]}, "'weights' must be 2 numbers of at least 0"),
    "nothing learned": ({"token_ids": [1, 2], "weights": [1, 0]}, "no token is learned"),
    "ids alone": ({"token_ids": [1, 2], "top_ids": [[], [1]]}, "must be both there; only 'top_ids' is"),
    "rows": ({"token_ids": [1, 2], "top_ids": [[1]], "top_logprobs": [[-1]]}, "each of the 2 tokens, found 1 rows"),
    "flat rows": ({"token_ids": [1, 2], "top_ids": [1, 2], "top_logprobs": [-1, -1]}, "must be a list of lists"),
    "empty row": (
        {"token_ids": [1, 2], "top_ids": [[1], []], "top_logprobs": [[-1], []]},
        r"'top_ids'\[1\] is empty, and the token there is learned",
    ),
    "uneven rows": (
        {"token_ids": [1, 2], "top_ids": [[], [1, 2]], "top_logprobs": [[], [-1]]},
        "'top_ids' and 'top_logprobs': rows of candidates' ids and log-probabilities have different lengths",
    ),
    "probabilities": ({"token_ids": [1, 2], "top_ids": [[], [1]], "top_logprobs": [[], [0.5]]}, "at most 0"),
    "no key": ({"question": "x"}, "found: question"),
    "two forms": (
        {"text": "x", "messages": list(CHAT)},
        "exactly one.*found: messages, text; choose the ones to read with data.columns",
    ),
    "text is a number": ({"text": 3}, "found 3"),
    "no messages": ({"messages": []}, "messages must be a list that is not empty"),
    "message is a string": ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\] must have a string 'role'"),
    "content is null": ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\].*'content'"),
    "a video": (
        {"messages": [{"role": "user", "content": [PART]}]},
        r"content\[0\] is a part of type 'video'; only text and images",
    ),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r"content\[0\] is \{'type': 'text'\}",
    ),
    "a call without a name": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]},
        r"tool_calls\[0\] must name a function",
    ),
    "calls are a string": (
        {"messages": [USER, {"role": "assistant", "tool_calls": "f()"}]},
        "'tool_calls' must be a list",
    ),
    "arguments are no object": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x=1"}]}]},
        r"arguments of tool_calls\[0\] must be an object.*'x=1'",
    ),
    "arguments under another name": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "parameters": {"x": 1}}]}]},
        r"messages\[1\]: tool_calls\[0\], of 'f', has 'parameters' and no 'arguments'",
    ),
    "arguments beside the function": (
        {
            "conversations": [
                {"from": "human", "value": "x"},
                {"from": "function_call", "value": '{"function": {"name": "f"}, "arguments": "{\\"x\\": 1}"}'},
            ]
        },
        "has 'arguments' beside 'function'",
    ),
    "two system messages": (
        {"system": "be kind", "conversations": [SYSTEM, *CHAT]},
        "'system' is 'be kind', and the conversation begins with another system message, 'be brief'",
    ),
    "a call of the user": ({"messages": [USER | {"tool_calls": [CALL]}]}, "'tool_calls' belong to the assistant"),
    "two thoughts": ({"messages": [ANSWER | {"reasoning": "a", "thinking": "b"}]}, "must be one string"),
    "loss of the user": (
        {"messages": [USER | {"loss": True}, ANSWER]},
        r"messages\[0\]: only the assistant's messages can carry loss",
    ),
    "loss of 400 digits": ({"messages": [USER, ANSWER | {"loss": 10**400}]}, "a number from 0 on, found 1000"),
    "weight of 400 digits": (
        {"token_ids": [1, 2], "weights": [1, 10**400]},
        "'weights' must be 2 numbers of at least 0",
    ),
    "log-probability of 400 digits": (
        {"token_ids": [1, 2], "top_ids": [[1], [2]], "top_logprobs": [[-1], [-(10**400)]]},
        "'top_ids' and 'top_logprobs'",
    ),
    "loss below 0": ({"messages": [USER, ANSWER | {"weight": -1}]}, "a number from 0 on, found -1"),
    "loss and weight": (
        {"messages": [USER, ANSWER | {"weight": 1, "loss": False}]},
        "'loss' says False and 'weight' says 1",
    ),
    "tools are names": ({"messages": list(CHAT), "tools": ["look"]}, "tools must be a list of objects"),
    "options are a list": (
        {"messages": list(CHAT), "chat_template_kwargs": [1]},
        "'chat_template_kwargs' must be an object",
    ),
    "an empty answer": (
        {"messages": [USER, ANSWER | {"content": " \n"}]},
        r"messages\[1\]: the assistant's message is empty",
    ),
    "an empty answer of parts": (
        {"messages": [USER, ANSWER | {"content": [{"type": "text", "text": ""}]}]},
        "the assistant's message is empty",
    ),
    "a role with a capital": (
        {"messages": [USER | {"role": "User"}, ANSWER]},
        "role 'User' is unknown, did you mean 'user'",
    ),
    "a call that is no JSON": (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "look(sky)"}]},
        r"conversations\[1\]: tool_calls\[0\] must name a function, found 'look\(sky\)'",
    ),
    "an unknown speaker": ({"conversations": [{"from": "dog", "value": "woof"}]}, "'from' is 'dog'; known: human"),
    "a speaker is missing": (
        {"conversations": [{"from": "human", "value": "x"}, {"value": "y"}]},
        r"\[1\] must have 'from'",
    ),
    "prompt of messages, completion of text": ({"prompt": [USER], "completion": "x"}, "both strings or both lists"),
    "empty completion": ({"prompt": "x", "completion": ""}, "'completion' must be a string that is not empty"),
    "history of strings": ({"instruction": "x", "output": "y", "history": ["a"]}, "'history' must be a list of"),
    "a pair of equals": ({"prompt": "x", "chosen": "y", "rejected": "y"}, "are the same"),
    "a pair of text without a prompt": ({"chosen": "x", "rejected": "y"}, "'prompt' must be a string"),
    "a pair of answers without a prompt": (
        {"chosen": [ANSWER], "rejected": [WORSE]},
        "chosen begins with the assistant's message",
    ),
    "a pair whose prompt is another one": (
        {"prompt": "four?", "chosen": list(CHAT), "rejected": [USER, WORSE]},
        "chosen begins with the user's message, and what 'prompt' says is not in it",
    ),
    "a pair that ends with the user": ({"chosen": [USER], "rejected": [*CHAT]}, "chosen must end with the assistant's"),
    "a pair of two kinds": ({"prompt": "x", "chosen": "y", "rejected": [ANSWER]}, "both strings or both lists"),
    "a pair with weights": (
        {"chosen": [USER, ANSWER | {"loss": 1}], "rejected": [USER, WORSE]},
        "no meaning in preference pairs",
    ),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_bad_record_raises_data_error(name: str) -> None:
    record, message = BAD_RECORDS[name]
    with pytest.raises(DataError, match=message) as caught:
        parse_record(record, "data.jsonl:2")
    assert str(caught.value).startswith("data.jsonl:2: ")


def test_all_messages_of_a_record_are_checked() -> None:
    findings = Findings()
    bad = [
        USER | {"role": "User"},
        ANSWER | {"content": 3},
        USER | {"loss": 1},
        ANSWER | {"content": ""},
        {"role": "bot", "content": "a"},
    ]
    for number in (1, 2):
        with findings.collecting():
            parse_record({"messages": bad}, f"f:{number}")
    with findings.collecting():
        parse_record({"conversations": [{"from": "dog", "value": "a"}, {"from": "cat", "value": "b"}]}, "f:3")
    with pytest.raises(DataError) as caught:
        findings.raise_problems()
    heading, *lines = str(caught.value).split("\n  ")
    assert heading == "12 problems in the data, of 7 kinds:"
    for line, start in zip(
        lines,
        (
            "f:1 and 1 more (:2): messages[0]: the role 'User' is unknown",
            "f:1 and 1 more (:2): messages[1] must have a string 'content'",
            "f:1 and 1 more (:2): messages[2]: only the assistant's messages can carry loss",
            "f:1 and 1 more (:2): messages[3]: the assistant's message is empty",
            "f:1 and 1 more (:2): messages[4]: the role 'bot' is unknown",
            "f:3: conversations[0]: 'from' is 'dog'",
            "f:3: conversations[1]: 'from' is 'cat'",
        ),
        strict=True,
    ):
        assert line.startswith(start)


CALLING = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "blue"}, ANSWER]
ODD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({"messages": CALLING, "tools": [{"type": "function", "function": {"name": "look"}}]}, []),
    "flat tools": ({"messages": CALLING, "tools": [TOOL]}, ['tools are put into the form {"type": "function", "function": ...}']),
    "a tool without a type": (
        {"messages": CALLING, "tools": [{"function": TOOL}]},
        ['tools are put into the form {"type": "function", "function": ...}'],
    ),
    "a tool that is not declared": (
        {"messages": CALLING, "tools": [{"type": "function", "function": {"name": "see"}}]},
        ["'look' is called, and 'tools' does not declare it"],
    ),
    "no tools": ({"messages": CALLING}, ["'look' is called, and 'tools' are missing"]),
    "calls of a pair": (
        {"chosen": [USER, {"role": "assistant", "tool_calls": [CALL]}], "rejected": [*CHAT]},
        ["'look' is called, and 'tools' are missing"],
    ),
    "a schema without a type": (
        {"messages": [*CHAT], "tools": [{"type": "function", "function": {"name": "look", "parameters": {"properties": {}}}}]},
        ["the 'parameters' of tool 'look' have no 'type' (\"object\")"],
    ),
    "parameters without types": (
        {
            "messages": [*CHAT],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "look",
                        "parameters": {
                            "type": "object",
                            "properties": {"where": {"description": "x"}, "when": {"enum": ["now"]}, "how": {"type": "string"}},
                        },
                    },
                }
            ],
        },
        ["parameters of tool 'look' have no 'type': 'where'"],
    ),
    "a role of a template's own": (
        {"messages": [USER, {"role": "environment", "content": "rain"}, ANSWER]},
        [
            "the role 'environment' is none of system, developer, user, assistant, tool: its messages are not learned as the "
            "assistant's are"
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_unusual_tools_and_roles_are_reported(name: str) -> None:
    record, remarks = ODD[name]
    findings = Findings()
    parse_record(record, "f:1", None, findings)
    assert findings.lines() == [f"f:1: {remark}" for remark in remarks]


def test_renamed_columns_are_read() -> None:
    record = {"dialogue": list(CHAT), "text": "not this", "tools": 3}
    findings = Findings()
    columns = {"messages": "dialogue"}
    assert parse_record(record, "f:1", columns, findings) == Document("f:1", messages=CHAT)
    assert findings.lines() == ["f:1: 'text' is not read", "f:1: 'tools' is not read"]
    with pytest.raises(DataError, match=r"f:2: no 'dialogue' \(data.columns\); found: text"):
        parse_record({"text": "x"}, "f:2", columns)


@pytest.mark.parametrize(
    "record", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
)
def test_tools_and_options_of_plain_text_are_reported_as_ignored(record: dict[str, Any]) -> None:
    findings = Findings()
    parse_record(record | {"tools": [TOOL], "chat_template_kwargs": {"x": 1}}, "f:1", None, findings)
    reason = "is not read: only conversations of messages have a chat template"
    assert findings.lines() == [f"f:1: 'tools' {reason}", f"f:1: 'chat_template_kwargs' {reason}"]
    findings = Findings()
    parse_record(record | {"tools": [], "chat_template_kwargs": None}, "f:1", None, findings)
    assert findings.lines() == []
