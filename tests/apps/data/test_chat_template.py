"""Loss masks of chat templates of several families, with and without generation blocks, tools, thoughts and parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.data.columns import parse_record
from megascend.apps.data.findings import Findings
from megascend.apps.data.samples import Encoder, SampleLimits
from megascend.errors import DataError
from support.loss_masks import encode, learned

OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"

# In the style of Qwen2.5: tools in the system's turn, calls as JSON in tags, their results in a turn of the user.
QWEN = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}{{ '<|im_start|>system\\n' }}
{{- messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}(OPEN)
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{% if call.function %}{% set call = call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}(CLOSE){{ '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# In the style of Qwen3: only turns after the last question keep their thoughts.
QWEN_THINKS = """{%- set last = namespace(question=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}(OPEN)
{%- if loop.index0 > last.question and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>' }}(CLOSE){{ '\\n' }}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# In the style of Qwen3.8: an effort in the system's turn, thoughts of all turns, and answers that begin with the end of thoughts.
QWEN_EFFORT = """{%- set effort = reasoning_effort | default('xhigh') %}
{%- if effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('no effort ' ~ effort) }}{% endif %}
{%- if enable_thinking | default(true) and effort != 'medium' %}
{{- '<|im_start|>system\\nThink: ' + effort + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{ '<think>\\n' }}
{%- if enable_thinking | default(true) %}(OPEN)
{{- (message.reasoning_content or '') + '\\n</think>\\n\\n' + message.content + '<|im_end|>' }}(CLOSE)
{%- else %}{{ '\\n</think>\\n\\n' }}(OPEN){{ message.content + '<|im_end|>' }}(CLOSE){% endif %}{{ '\\n' }}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if not enable_thinking | default(true) %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

# In the style of Llama 3.1: headers, one call a message, and the turn that calls ends with another token.
LLAMA = """{%- macro head(role) %}{{ '<|start|>' + role + '<|stop|>\\n\\n' }}{% endmacro %}
{{- '<|begin|>' }}{%- if tools %}{{ head('system') }}
{%- for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{{ '<|eot|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}{{ head('assistant') }}(OPEN){{ '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eom|>' }}(CLOSE)
{%- elif message.role == 'assistant' %}{{ head('assistant') }}(OPEN){{ message.content | trim + '<|eot|>' }}(CLOSE)
{%- elif message.role == 'tool' %}{{ head('ipython') + message.content | tojson + '<|eot|>' }}
{%- else %}{{ head(message.role) + message.content | trim + '<|eot|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

# In the style of Gemma: the assistant is the model, and the token that ends a turn is not the end of sequence.
GEMMA = """{{- '<bos>' }}{% for message in messages %}
{{- '<turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.role == 'assistant' %}(OPEN){{ message.content | trim + '</turn>' }}(CLOSE){{ '\\n' }}
{%- else %}{{ message.content | trim + '</turn>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

FAMILIES: dict[str, tuple[str, list[str], str]] = {
    "Qwen": (QWEN, [], "<|im_end|>"),
    "Qwen thinks": (QWEN_THINKS, [], "<|im_end|>"),
    "Qwen3.8": (QWEN_EFFORT, [], "<|im_end|>"),
    "Llama": (LLAMA, ["<|begin|>", "<|start|>", "<|stop|>", "<|eot|>", "<|eom|>"], "<|eot|>"),
    "Gemma": (GEMMA, ["<bos>", "<turn>", "</turn>", "<eos>"], "<eos>"),
}


def tokenizer_of(family: str, blocks: bool) -> PreTrainedTokenizerFast:
    """Build a byte tokenizer with a family's template and special tokens, with generation blocks or without."""
    template, special, eos = FAMILIES[family]
    tokenizer = byte_tokenizer(4096)
    tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    tokenizer.eos_token = eos
    tokenizer.chat_template = template.replace("(OPEN)", OPEN if blocks else "").replace(
        "(CLOSE)", CLOSE if blocks else ""
    )
    return tokenizer


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "zwei, 二, two"},
    {"role": "user", "content": "zwei, 二, two"},
    {"role": "assistant", "content": "drei"},
]
TOOLS = [
    {"role": "user", "content": "Which colour is the sky?"},
    {"role": "assistant", "content": "", "tool_calls": [call("look", where="up", how="<|im_start|>no")]},
    {"role": "tool", "content": "blue", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "Bye."},
]
THOUGHTS = [
    CHAT[0],
    CHAT[1] | {"reasoning_content": "count up"},
    CHAT[2],
    CHAT[3] | {"reasoning_content": "one more"},
]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen, chat": ("Qwen", {"messages": CHAT}),
    "Qwen, system": ("Qwen", {"messages": [SYSTEM, *CHAT]}),
    "Qwen, tools": ("Qwen", {"messages": [SYSTEM, *TOOLS], "tools": [TOOL]}),
    "Qwen thinks, chat": ("Qwen thinks", {"messages": CHAT}),
    "Qwen thinks, thoughts": ("Qwen thinks", {"messages": THOUGHTS}),
    "Qwen3.8, thoughts": ("Qwen3.8", {"messages": THOUGHTS}),
    "Qwen3.8, low effort": ("Qwen3.8", {"messages": THOUGHTS, "chat_template_kwargs": {"reasoning_effort": "low"}}),
    "Qwen3.8, no thoughts": ("Qwen3.8", {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}),
    "Llama, chat": ("Llama", {"messages": [SYSTEM, *CHAT]}),
    "Llama, tools": ("Llama", {"messages": TOOLS, "tools": [TOOL]}),
    "Gemma, chat": ("Gemma", {"messages": CHAT}),
}
LEARNED = {
    "Qwen, tools": [
        '\n<tool_call>\n{"name": "look", "arguments": {"where": "up", "how": "<|im_start|>no"}}\n</tool_call><|im_end|>',
        "Blue.<|im_end|>",
        "Bye.<|im_end|>",
    ],
    "Qwen thinks, thoughts": ["zwei, 二, two<|im_end|>", "<think>\none more\n</think>\n\ndrei<|im_end|>"],
    "Qwen3.8, thoughts": ["count up\n</think>\n\nzwei, 二, two<|im_end|>", "one more\n</think>\n\ndrei<|im_end|>"],
    "Qwen3.8, no thoughts": ["zwei, 二, two<|im_end|>", "drei<|im_end|>"],
    "Llama, tools": [
        '{"name": "look", "parameters": {"where": "up", "how": "<|im_start|>no"}}<|eom|>',
        "Blue.<|eot|>",
        "Bye.<|eot|>",
    ],
    "Gemma, chat": ["zwei, 二, two</turn>", "drei</turn>"],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "prefixes"])
def test_tokens_and_mask_match_transformers(name: str, blocks: bool) -> None:
    """Compare both variants with transformers' mask for the template with generation blocks."""
    family, record = CASES[name]
    with_blocks = tokenizer_of(family, blocks=True)
    options = {"tools": record.get("tools")} | record.get("chat_template_kwargs", {})
    reference = with_blocks.apply_chat_template(
        record["messages"], return_dict=True, return_assistant_tokens_mask=True, **options
    )
    tokenizer = tokenizer_of(family, blocks)
    sample, remarks = encode(record, tokenizer)
    assert [int(sample.input_ids[0]), *sample.target_ids.tolist()] == reference["input_ids"]
    assert [0, *sample.weights.tolist()] == reference["assistant_masks"]
    if name in LEARNED:
        assert learned(sample, tokenizer) == LEARNED[name]
    dropped = ["f:1: the chat template leaves out the reasoning of some of the assistant's turns"]
    assert remarks == (dropped if name == "Qwen thinks, thoughts" else [])


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "prefixes"])
def test_turn_weights_are_applied(blocks: bool) -> None:
    messages = json.loads(json.dumps(TOOLS))
    messages[1]["loss"], messages[5]["weight"] = False, 0.5
    tokenizer = tokenizer_of("Llama", blocks)
    sample, _ = encode({"messages": messages, "tools": [TOOL]}, tokenizer)
    assert learned(sample, tokenizer) == ["Blue.<|eot|>", "Bye.<|eot|>"]
    assert sorted(set(sample.weights.tolist())) == [0.0, 0.5, 1.0]
    assert sample.weights.tolist().count(0.5) == len("Bye.") + 1


def test_several_generation_blocks_belong_to_one_message() -> None:
    """Use a template with separate blocks for a message's content and its end."""
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ ' ' }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    messages = [CHAT[0], CHAT[1] | {"loss": 0}, *CHAT[2:]]
    sample, _ = encode({"messages": messages}, tokenizer)
    assert learned(sample, tokenizer) == ["drei", "<|im_end|>"]


def test_empty_turn_takes_no_block_of_another_turn() -> None:
    """Give an empty turn no block when the other turn's thoughts and answer make as many blocks as turns."""
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}{{ '<think>' }}{% generation %}{{ m.reasoning_content }}{% endgeneration %}{{ '</think>' }}"
        "{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    )
    empty_turn = {"role": "assistant", "content": "", "loss": False}
    messages = [CHAT[0], empty_turn, CHAT[2], CHAT[3] | {"reasoning_content": "hm"}]
    sample, _ = encode({"messages": messages}, tokenizer)
    assert learned(sample, tokenizer) == ["hm", "drei"]


def test_text_parts_are_passed_as_list_or_as_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two?"}]
    record = {"messages": [{"role": "user", "content": parts}, CHAT[3]]}
    tokenizer = tokenizer_of("Qwen", blocks=False)
    sample, _ = encode(record, tokenizer)
    assert tokenizer.decode(sample.input_ids).startswith("<|im_start|>user\none\ntwo?<|im_end|>")
    for template in ("{{ m.content }}", "{{ m.content | string }}"):  # would write the list's repr
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: " + template + "<|im_end|>{% endfor %}"
        sample, _ = encode(record, tokenizer)
        assert tokenizer.decode(sample.input_ids).startswith("user: one\ntwo?<|im_end|>assistant: drei")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}/{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    sample, _ = encode(record, tokenizer)
    assert tokenizer.decode(sample.input_ids).startswith("user: one/two?/<|im_end|>assistant: drei")


BARE = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
REWRITING = "{{ messages | length }}" + BARE
MACRO = (
    "{% macro turn(m) %}{{ m.role + ': ' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
DRIFTING = (  # an earlier turn loses its block when a later one follows
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% generation %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}"
)
VANISHING = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% if messages | length == 2 %}{% generation %}<|im_end|>{% endgeneration %}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALLS_OUTSIDE = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% endfor %}{% generation %}{{ (m.content or '') + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
REFUSED: dict[str, tuple[str | dict[str, str] | None, dict[str, Any], str]] = {
    "calls outside of blocks": (
        CALLS_OUTSIDE,
        {"messages": [CHAT[0], CHAT[1] | {"tool_calls": [call("look")]}]},
        "do not hold the words of message 1",
    ),
    "tools that their own template leaves out": (
        {"default": BARE, "tool_use": "tools: " + BARE},
        {"messages": CHAT, "tools": [TOOL]},
        "'tools': the model's chat template does not write them",
    ),
    "tools": (
        BARE,
        {"messages": CHAT, "tools": [TOOL]},
        r"'tools': the model's chat template does not write them.*data.chat_template",
    ),
    "tool calls": (
        BARE,
        {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call("look")]}]},
        "'tool_calls': the model's chat template does not write them",
    ),
    "tool calls and no content": (
        BARE,
        {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [call("look")]}]},
        "the chat template refuses the conversation: UndefinedError",
    ),
    "thoughts": (BARE, {"messages": THOUGHTS}, "'reasoning_content': the model's chat template does not write them"),
    "a template that rewrites": (
        REWRITING,
        {"messages": CHAT},
        r"cannot tell where turn 1 .* \{% generation %\} blocks",
    ),
    "blocks in a macro": (MACRO, {"messages": CHAT}, "do not hold the words of message 1.*inside a macro"),
    "blocks that drift": (DRIFTING, {"messages": CHAT}, "do not hold the words of message 1"),
    "blocks that vanish": (
        VANISHING,
        {"messages": [CHAT[0], CHAT[1] | {"loss": 0}, *CHAT[2:]]},
        "cannot tell which generation blocks .* those of message 1",
    ),
    "the assistant begins": (
        "{{ messages[0].role[:0] }}" + BARE,
        {"messages": [CHAT[1], *CHAT]},
        "begins with the assistant, and the chat template writes no conversation without a message",
    ),
    "words that are not written": (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}",
        {"messages": CHAT},
        r"message 0 \(user\): the chat template does not write its words \(..'one\?'\); name another one with data.chat_template",
    ),
    "a system message that is not written": (
        BARE.replace("messages %}", "messages if m.role != 'system' %}"),
        {"messages": [SYSTEM, *CHAT]},
        r"message 0 \(system\): the chat template does not write its words",
    ),
    "an effort that Qwen3.8 does not have": (
        QWEN_EFFORT.replace("(OPEN)", "").replace("(CLOSE)", ""),
        {"messages": CHAT, "chat_template_kwargs": {"reasoning_effort": "high"}},
        "the chat template refuses the conversation: TemplateError: no effort high",
    ),
    "a template that refuses": (
        "{{ raise_exception('roles must alternate') }}",
        {"messages": CHAT},
        "roles must alternate",
    ),
    "no template": (None, {"messages": CHAT}, "need a chat template"),
    "a template with an error": (
        "{% for m in messages %}",
        {"messages": CHAT},
        "refuses the conversation: TemplateSyntaxError",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inexact_templates_raise_data_error(name: str) -> None:
    template, record, message = REFUSED[name]
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message) as caught:
        encode(record, tokenizer)
    assert str(caught.value).startswith("f:1: ")


LAST_BLOCK = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' and loop.last %}{% generation %}"
    "{{ SHOWN + '<|im_end|>' }}{% endgeneration %}{% else %}{{ SHOWN + '<|im_end|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("expression", ["m.content", "m.content | upper"], ids=["marked", "not to be marked"])
def test_answer_outside_of_blocks_raises_despite_an_equal_one_inside(expression: str) -> None:
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = LAST_BLOCK.replace("SHOWN", expression)
    yes = {"role": "assistant", "content": "YES"}
    with pytest.raises(DataError, match=r"generation blocks .*does the template use them inside a macro"):
        encode({"messages": [CHAT[0], yes, CHAT[0], yes]}, tokenizer)
    sample, _ = encode({"messages": [CHAT[0], yes]}, tokenizer)
    assert learned(sample, tokenizer) == ["YES<|im_end|>"]


FIRST_CALL = (  # as gpt-oss's template
    "{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name ~ SHOWN }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
)


@pytest.mark.parametrize(
    "expression", ["''", "m.tool_calls[0].function.name | length"], ids=["marked", "not to be marked"]
)
@pytest.mark.parametrize(
    "record",
    [
        {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [call("look"), call("listen")]}]},
        {
            "conversations": [
                {"from": "human", "value": "one?"},
                *({"from": "function_call", "value": json.dumps({"name": name})} for name in ("look", "listen")),
            ]
        },
    ],
    ids=["tool_calls", "ShareGPT"],
)
def test_omitted_parallel_calls_raise_data_error(record: dict[str, Any], expression: str) -> None:
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = FIRST_CALL.replace("SHOWN", expression)
    with pytest.raises(
        DataError,
        match=r"message 1 \(assistant\): .* all of its 2 tool calls \('look', 'listen'\); .*data.chat_template",
    ):
        encode(record, tokenizer)
    separate_calls = [CHAT[0], *({"role": "assistant", "tool_calls": [call(name)]} for name in ("look", "listen"))]
    sample, _ = encode({"messages": separate_calls}, tokenizer, train_on_prompt=True)
    assert "look" in (text := tokenizer.decode(sample.input_ids))
    assert "listen" in text


@pytest.mark.parametrize("family", ["Qwen", "Qwen thinks"])
def test_eos_within_an_answer_does_not_end_the_turn(family: str) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "say <|im_end|> now"}, *CHAT[2:]]
    tokenizer = tokenizer_of(family, blocks=False)
    sample, _ = encode({"messages": messages}, tokenizer)
    assert learned(sample, tokenizer)[0] == "say <|im_end|> now<|im_end|>"


def test_eos_at_the_end_of_an_answer_does_not_replace_the_end_of_turn() -> None:
    """Use a template like OpenChat's, whose end of turn is a special token other than eos."""
    tokenizer = byte_tokenizer(4096)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>", "<|end_of_turn|>"]})
    tokenizer.eos_token = "</s>"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'GPT4 ' + m.role + ': ' + m.content + '<|end_of_turn|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'GPT4 assistant: ' }}{% endif %}"
    )
    messages = [CHAT[0], {"role": "assistant", "content": "fine</s>"}, CHAT[0], CHAT[3]]
    for count in (2, 4):
        sample, _ = encode({"messages": messages[:count]}, tokenizer)
        assert learned(sample, tokenizer) == ["fine</s><|end_of_turn|>", "drei<|end_of_turn|>"][: count // 2]


def test_omitted_fields_and_missing_turn_ends_are_reported() -> None:
    tokenizer = tokenizer_of("Qwen", blocks=False)
    messages = [CHAT[0] | {"timestamp": 3}, CHAT[1] | {"name": "Ada"}]
    _, remarks = encode({"messages": messages}, tokenizer)
    assert remarks == ["f:1: 'timestamp' of messages is not read"]
    tokenizer.chat_template = BARE.replace("m.role", "m.timestamp | default('') | string + m.role")
    assert encode({"messages": messages}, tokenizer)[1] == []

    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    _, remarks = encode({"messages": CHAT}, tokenizer)
    assert remarks == [NO_END]
    tokenizer.chat_template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"  # as GLM's
    assert encode({"messages": CHAT}, tokenizer)[1] == [NO_END]


def test_turns_that_are_not_learned_need_no_end() -> None:
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ '<|im_end|>' if loop.last }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for loss, number in ((0, 0), (0.5, 1)):
        messages = [CHAT[0], CHAT[1] | {"loss": loss}, *CHAT[2:]]
        assert len(encode({"messages": messages}, tokenizer)[1]) == number


NO_END = (
    "f:1: no turn of the assistant ends with a special token that is trained on, so the model does not learn to stop; a template "
    "with {% generation %} blocks (data.chat_template) can say where turns end"
)


def test_call_arguments_are_passed_as_object_or_text() -> None:
    """Pass text where the template concatenates strings, as DeepSeek's do."""
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    )
    for arguments in ({"where": "öst"}, '{"where": "öst"}'):
        calls = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
        messages = [CHAT[0], {"role": "assistant", "content": "so ", "tool_calls": calls}]
        sample, _ = encode({"messages": messages}, tokenizer)
        assert learned(sample, tokenizer) == ['assistant: so look({"where": "öst"})<|im_end|>']


def test_block_outside_of_messages_carries_loss() -> None:
    """Use a template like TRL's training template of Phi-3, which marks the eos after the last turn."""
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
    )
    reference = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    sample, _ = encode({"messages": CHAT}, tokenizer)
    assert [0, *sample.weights.tolist()] == reference["assistant_masks"]
    assert learned(sample, tokenizer) == ["zwei, 二, two", "drei<|im_end|>"]
    with pytest.raises(
        DataError, match="do not hold the words of message 3"
    ):  # the owner of the middle block is ambiguous
        encode({"messages": [CHAT[0], CHAT[1] | {"loss": 0}, *CHAT[2:]]}, tokenizer)


def test_template_variables_of_settings_and_record() -> None:
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = "{{ mood | default('none') }}|" + BARE
    record = {"messages": CHAT}
    for settings, record_options, expected in (
        ({}, {}, "none"),
        ({"mood": "calm"}, {}, "calm"),
        ({"mood": "calm"}, {"mood": "wild"}, "wild"),
    ):
        options = {"chat_template_kwargs": record_options}
        sample, _ = encode(record | options, tokenizer, template_options=settings)
        assert tokenizer.decode(sample.input_ids).startswith(f"{expected}|user: one?")


def test_separate_tool_template_is_used() -> None:
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = {
        "default": BARE,
        "tool_use": "{% for t in tools %}{{ t.function.name }}{% endfor %}" + BARE,
    }
    sample, _ = encode({"messages": CHAT, "tools": [TOOL]}, tokenizer)
    assert tokenizer.decode(sample.input_ids).startswith("lookuser: one?")
    sample, _ = encode({"messages": CHAT}, tokenizer)
    assert tokenizer.decode(sample.input_ids).startswith("user: one?")


@pytest.mark.parametrize("record", [{"messages": CHAT}, {"messages": CHAT, "tools": [TOOL]}])
def test_named_templates_without_default_are_used_as_transformers_does(record: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(4096)
    tools = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + BARE
    tokenizer.chat_template = {"rag": BARE, "tool_use": tools}
    if "tools" in record:
        reference = tokenizer.apply_chat_template(CHAT, tools=[TOOL], return_dict=True)["input_ids"]
        assert encode(record, tokenizer)[0].input_ids.tolist() == reference[:-1]
        return
    with pytest.raises(ValueError, match="'rag', 'tool_use'"):
        tokenizer.apply_chat_template(CHAT)
    with pytest.raises(DataError, match="'rag', 'tool_use', and none is 'default'"):
        encode(record, tokenizer)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("family", ["Qwen", "Qwen thinks"])
def test_empty_reasoning_is_none(family: str, key: str) -> None:
    tokenizer = tokenizer_of(family, blocks=False)
    messages = [CHAT[0], CHAT[1] | {key: ""}]
    sample, remarks = encode({"messages": messages}, tokenizer)
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"][:-1]
    assert remarks == []


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        ("{{ m.content + '<|im_end|>' }}", {}, {"<|im_end|>"}),
        ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>", {}, set()),  # not learned
        ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>", {"train_on_prompt": True}, {"<|im_end|>"}),
        ("{{ m.content + eos_token }}", {}, {"<|endoftext|>"}),
        # The end of earlier turns is not that of the answer, as of gpt-oss.
        ("{{ m.content + ('<|return|>' if loop.last else '<|im_end|>') }}", {}, {"<|return|>"}),
    ],
)
def test_learned_ends_are_those_after_the_last_turn(template: str, settings: dict, expected: set[str]) -> None:
    tokenizer = byte_tokenizer(4096)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|return|>", "<|endoftext|>"]})
    tokenizer.eos_token = "<|endoftext|>"
    other = "{{ m.content + '<|im_end|>' }}"
    turn = f"{{% if m.role == 'assistant' %}}{template}{{% else %}}{other}{{% endif %}}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' }}" + turn + "{% endfor %}"
    findings = Findings()
    Encoder(tokenizer, SampleLimits(4096), findings, **settings).encode(parse_record({"messages": CHAT}, "f:1"))
    assert {tokenizer.decode([end]) for end in findings.ends} == expected


@pytest.mark.parametrize("record", [{"text": "one"}, {"prompt": "one", "completion": "two"}])
def test_text_without_an_end_token_is_reported(record: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(4096)
    for end, count in (("<|im_end|>", 0), (None, 1)):
        tokenizer.eos_token = end
        findings = Findings()
        Encoder(tokenizer, SampleLimits(4096), findings).encode(parse_record(record, "f:1"))
        assert ["have no end to learn" in line for line in findings.lines()] == [True] * count
        assert findings.ends == ({tokenizer.eos_token_id} if end else set())
