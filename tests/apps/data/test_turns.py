"""Loss masks of templates without generation blocks, with the structure of many families' templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.data.columns import parse_record
from megascend.apps.data.findings import Findings
from megascend.apps.data.samples import Encoder, SampleLimits
from megascend.errors import DataError
from support.loss_masks import encode, learned


@dataclass
class Family:
    """A chat template composed of expressions for its roles.

    Attributes:
        system, user, assistant: Jinja expressions over ``c``, the content; None: the role is refused.
        prompt: the generation prompt; with ``always`` it is written even if not requested.
        begin, end: written once; ``end`` not together with a generation prompt.
        learned: text that carries loss for an answer ``@``, in earlier turns and in the last one; None: refused.
    """

    user: str
    assistant: str
    prompt: str
    learned: tuple[str, str] | None
    system: str | None = None
    begin: str = ""
    end: str = ""
    always: bool = False
    eos: str = "</s>"
    bos: str | None = None
    special: tuple[str, ...] = ()
    last: str | None = None
    """Like ``assistant``, for the last message."""
    refused: str = ""

    def template(self) -> str:
        """Return the template's text."""
        system = "{{ raise_exception('no system') }}" if self.system is None else "{{ " + self.system + " }}"
        answer = "{{ " + self.assistant + " }}"
        if self.last is not None:
            answer = (
                "{% if loop.last and not add_generation_prompt %}{{ "
                + self.last
                + " }}{% else %}"
                + answer
                + "{% endif %}"
            )
        prompt = "{{ " + repr(self.prompt) + " }}"
        tail = "{{ " + repr(self.end) + " }}"
        closing = (
            prompt if self.always else "{% if add_generation_prompt %}" + prompt + "{% else %}" + tail + "{% endif %}"
        )
        return (
            "{{ " + repr(self.begin) + " }}{% for m in messages %}{% set c = m.content | trim %}"
            "{% if m.role == 'system' %}" + system + "{% elif m.role == 'user' %}{{ " + self.user + " }}"
            "{% elif m.role == 'assistant' %}" + answer + "{% endif %}{% endfor %}" + closing
        )

    def tokenizer(self) -> Any:
        """Build a byte tokenizer with the template and its special tokens."""
        tokenizer = byte_tokenizer(4096)
        special = [*self.special, self.eos, *([self.bos] if self.bos else [])]
        tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
        tokenizer.eos_token, tokenizer.bos_token = self.eos, self.bos
        tokenizer.chat_template = self.template()
        return tokenizer


def tagged(system: str | None, user: str, assistant: str, close: str, **more: Any) -> Family:
    """Build a family whose roles are tags before the content, with one closing tag."""
    system_field = {"system": None if system is None else f"{system!r} + c + {close!r}"}
    return Family(
        **system_field,
        user=f"{user!r} + c + {close!r}",
        assistant=f"{assistant!r} + c + {close!r}",
        prompt=assistant,
        **more,
    )


def chatml(**more: Any) -> Family:
    """Build a ChatML family with further settings."""
    head = "<|im_start|>{}\n"
    settings = {"eos": "<|im_end|>", "special": ("<|im_start|>",), "learned": ("@<|im_end|>", "@<|im_end|>")} | more
    return tagged(head.format("system"), head.format("user"), head.format("assistant"), "<|im_end|>\n", **settings)


PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
FAMILIES = {
    "ChatML": chatml(),
    "ChatML, prompt always written": chatml(always=True),
    "ChatML, closed once": chatml(
        end="</s>", eos="</s>", special=("<|im_start|>", "<|im_end|>"),
        learned=("@<|im_end|>", "@<|im_end|>\n</s>"),
    ),
    "Phi-3": tagged(
        "<|system|>\n", "<|user|>\n", "<|assistant|>\n", "<|end|>\n", end="<|endoftext|>", eos="<|endoftext|>",
        special=PHI, learned=("@<|end|>", "@<|end|>\n<|endoftext|>"),
    ),
    "Phi-3, opening the next": Family(
        user="c + '<|end|>\n'", assistant="'<|assistant|>\n' + c + '<|end|>\n<|user|>\n'", prompt="<|assistant|>\n",
        begin="<|user|>\n", eos="<|endoftext|>", special=PHI, learned=("@<|end|>", "@<|end|>"),
    ),
    "gpt-oss": Family(
        system="'<|start|>developer<|message|>' + c + '<|end|>'", user="'<|start|>user<|message|>' + c + '<|end|>'",
        assistant="'<|start|>assistant<|channel|>final<|message|>' + c + '<|end|>'",
        last="'<|start|>assistant<|channel|>final<|message|>' + c + '<|return|>'", prompt="<|start|>assistant",
        begin="<|start|>system<|message|>Valid channels: final.<|end|>", eos="<|return|>",
        special=("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        learned=("<|channel|>final<|message|>@<|end|>", "<|channel|>final<|message|>@<|return|>"),
    ),
    "Llama-2": Family(
        user="bos_token + '[INST] ' + c + ' [/INST]'", assistant="' ' + c + ' ' + eos_token", prompt="", bos="<s>",
        learned=(" @ </s>", " @ </s>"),
    ),
    "Llama-2, closed once": Family(
        user="'[INST] ' + c + ' [/INST]'", assistant="' ' + c + ' '", prompt="", begin="<s>", end="</s>", bos="<s>",
        learned=(" @", " @ </s>"),
    ),
    "Llama-2, opening the next": Family(
        user="'[INST] ' + c + ' [/INST]'", assistant="' ' + c + ' ' + eos_token + bos_token", prompt="", bos="<s>",
        learned=(" @ </s>", " @ </s>"),
    ),
    "Mistral": Family(
        user="'[INST] ' + c + '[/INST]'", assistant="' ' + c + eos_token", prompt="", begin="<s>", bos="<s>",
        special=("[INST]", "[/INST]"), learned=(" @</s>", " @</s>"),
    ),
    "DeepSeek-R1": Family(
        system="c", user="'<User>' + c", assistant="'<Assistant>' + c.split('</think>')[-1] + eos_token",
        prompt="<Assistant><think>\n", begin="<s>", bos="<s>", special=("<User>", "<Assistant>"),
        learned=("@</s>", "@</s>"),
    ),
    "Qwen3": chatml(
        last="'<|im_start|>assistant\n<think>\n\n</think>\n\n' + c + '<|im_end|>\n'",
        learned=("@<|im_end|>", "<think>\n\n</think>\n\n@<|im_end|>"),
    ),
    "Qwen3, closed once": chatml(
        last="'<|im_start|>assistant\n<think>\n\n</think>\n\n' + c + '<|im_end|>\n'", end="</s>", eos="</s>",
        special=("<|im_start|>", "<|im_end|>"), learned=("@<|im_end|>", "<think>\n\n</think>\n\n@<|im_end|>\n</s>"),
    ),
    "Nemotron": Family(
        user="'<|im_start|>user\n' + c + '<|im_end|>\n'",
        assistant="'<|im_start|>assistant\n<think></think>' + c + '<|im_end|>\n'",
        prompt="<|im_start|>assistant\n<think>\n", eos="<|im_end|>", special=("<|im_start|>",),
        learned=("</think>@<|im_end|>", "</think>@<|im_end|>"),
    ),
    "Qwen3 without thinking": Family(
        user="'<|im_start|>user\n' + c + '<|im_end|>\n'", assistant="'<|im_start|>assistant\n' + c + '<|im_end|>\n'",
        last="'<|im_start|>assistant\n<think>\n\n</think>\n\n' + c + '<|im_end|>\n'",
        prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n", eos="<|im_end|>", special=("<|im_start|>",),
        learned=("@<|im_end|>", "@<|im_end|>"),
    ),
    "GLM-4": Family(
        system="'<|system|>\n' + c", user="'<|user|>\n' + c", assistant="'<|assistant|>\n' + c", prompt="<|assistant|>",
        begin="[gMASK]<sop>", eos="<|endoftext|>", special=("[gMASK]", "<sop>", *PHI), learned=("\n@", "\n@"),
    ),
    "Hunyuan": Family(
        system="c + '<|extra_4|>'", user="c + '<|extra_0|>'", assistant="c + '<|eos|>'", prompt="", begin="<|startoftext|>",
        eos="<|eos|>", special=("<|startoftext|>", "<|extra_4|>", "<|extra_0|>"), learned=("@<|eos|>", "@<|eos|>"),
    ),
    "Command-R": tagged(
        "<|START|><|SYSTEM|>", "<|START|><|USER|>", "<|START|><|CHATBOT|><|START_RESPONSE|>", "<|END_RESPONSE|><|END|>",
        eos="<|END|>", special=("<|START|>", "<|SYSTEM|>", "<|USER|>", "<|CHATBOT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        learned=("@<|END_RESPONSE|><|END|>", "@<|END_RESPONSE|><|END|>"),
    ),
    "OLMo": Family(
        system="'<|system|>\n' + c + '\n'", user="'<|user|>\n' + c + '\n'",
        assistant="'<|assistant|>\n' + c + eos_token + '\n'", last="'<|assistant|>\n' + c + eos_token", prompt="<|assistant|>\n",
        begin="<|endoftext|>", eos="<|endoftext|>", bos="<|endoftext|>", learned=("@<|endoftext|>", "@<|endoftext|>"),
    ),
    "Vicuna": Family(
        system="c + ' '", user="'USER: ' + c + ' '", assistant="'ASSISTANT: ' + c + eos_token", prompt="ASSISTANT:",
        learned=(" @</s>", " @</s>"),
    ),
    "Vicuna, closed once": Family(
        system="c + '\n'", user="'USER: ' + c + '\n'", assistant="'ASSISTANT: ' + c + '\n'", prompt="ASSISTANT:", end="</s>",
        learned=(" @", " @\n</s>"),
    ),
    "counting": Family(
        user="(messages | length | string) + 'U' + c", assistant="'A' + c + eos_token", prompt="A", learned=None,
        refused="cannot tell where turn 1",
    ),
    "repeating the question": Family(
        user="'U' + c", assistant="'A' + messages[0].content + c + eos_token", prompt="A", learned=None,
        refused=r"turn 1 of the assistant stands: .* words of message 0 \(user\)",
    ),
}  # fmt: skip


def conversation(*answers: str, system: bool = False, last_question: bool = False) -> list[dict[str, Any]]:
    """Build questions that repeat the words of their answers, and the answers; an empty answer carries no loss."""
    messages = [{"role": "system", "content": "system, first second"}] if system else []
    for answer in answers:
        turn = {"role": "assistant", "content": answer} | ({} if answer else {"loss": False})
        messages += [{"role": "user", "content": f"what, {answer}?"}, turn]
    return messages + ([{"role": "user", "content": "and, first?"}] if last_question else [])


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_and_their_ends_carry_loss(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    if family.learned is None:
        with pytest.raises(DataError, match=family.refused):
            encode({"messages": conversation("first", "second")}, tokenizer)
        return
    earlier, last = family.learned

    for answers, extra in (
        (("first",), {}),
        (("first", "second"), {}),
        (("first", "", "third"), {}),
        (("first", "second"), {"last_question": True}),
        (("first", "second", "third"), {"system": True}),
    ):
        if extra.get("system") and family.system is None:
            continue
        sample, _ = encode({"messages": conversation(*answers, **extra)}, tokenizer)
        endings = [earlier] * len(answers) if extra.get("last_question") else [*[earlier] * (len(answers) - 1), last]
        expected = [pattern.replace("@", answer) for pattern, answer in zip(endings, answers, strict=True) if answer]
        assert learned(sample, tokenizer) == expected, (answers, extra)


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "arguments": arguments}}


def test_call_carries_loss_to_its_end_if_the_template_closes_once() -> None:
    """Repeat the call's name in the tool's message, and the user's words and a special token in its arguments."""
    tokenizer = FAMILIES["Phi-3"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].tool_calls[0]"
        ".function.name + ': ' }}{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name"
        " + ' ' + call.function.arguments | tojson + '</call>' }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    messages = [
        {"role": "user", "content": "up?"},
        {"role": "assistant", "content": "", "tool_calls": [call(where="up?", how="<|end|>")]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "Blue, look."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "look"},
    ]
    sample, remarks = encode({"messages": messages}, tokenizer)
    assert learned(sample, tokenizer) == [
        '<call>look {"where": "up?", "how": "<|end|>"}</call><|end|>',
        "Blue, look.<|end|>",
        "look<|end|>\n<|endoftext|>",
    ]
    assert remarks == []


def test_a_system_message_that_moves_to_the_last_question_keeps_turns_exact() -> None:
    """Move the system message to the last question, as Mistral's templates do."""
    family = FAMILIES["Mistral"]
    tokenizer = family.tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
        "{% if m == (messages | selectattr('role', 'equalto', 'user') | list | last) and messages[0].role == 'system' %}"
        "{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    sample, _ = encode({"messages": conversation("first", "second", system=True)}, tokenizer)
    assert learned(sample, tokenizer) == [" first</s>", " second</s>"]


@pytest.mark.parametrize("inline", [True, False], ids=["think tags", "reasoning_content"])
@pytest.mark.parametrize("scope", ["none", "last", "all"])
def test_omitted_thoughts_are_reported(scope: str, inline: bool) -> None:
    """Report omitted thoughts even if their words occur elsewhere in the text."""
    tokenizer = chatml().tokenizer()
    keeps = {"none": "false", "last": "loop.last", "all": "true"}[scope]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set c = m.content %}"
        "{% set t = m.reasoning_content or '' %}{% if '</think>' in c %}"
        "{% set t = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% set c = c.split('</think>')[-1].strip('\n') %}"
        "{% endif %}{% if t and " + keeps + " %}{{ '<think>\n' + t + '\n</think>\n\n' }}{% endif %}"
        "{{ c + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = conversation("first", "second")
    for message in messages[1::2]:
        if inline:
            message["content"] = f"<think>\nwhat\n</think>\n\n{message['content']}"
        else:
            message["reasoning_content"] = "what"
    sample, remarks = encode({"messages": messages}, tokenizer)
    reasoning = "<think>\nwhat\n</think>\n\n"
    assert learned(sample, tokenizer) == [
        (reasoning if scope == "all" else "") + "first<|im_end|>",
        ("" if scope == "none" else reasoning) + "second<|im_end|>",
    ]
    dropped = ["f:1: the chat template leaves out the reasoning of some of the assistant's turns"]
    assert remarks == ([] if scope == "all" else dropped)


BY_ROLE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
TOOL_ROLES = {
    "none that it knows": (BY_ROLE, (), "tool"),
    "a token of the role": (BY_ROLE, ("<|observation|>",), "observation"),  # as of GLM-4
    "the role by name": (BY_ROLE.replace("+ m.role", "+ {'observation': 'ipython'}.get(m.role, m.role)"), (), "ipython"),
    "tools under the role's token": (  # as of GLM-4.5
        BY_ROLE.replace("{{ '<|'", "{{ '<|observation|>' + m.content if m.role == 'tool' else '<|'"),
        ("<|observation|>",), "observation",
    ),
    "tools by name": (BY_ROLE.replace("+ m.role", "+ {'tool': 'ipython'}.get(m.role, m.role)"), ("<|observation|>",), "ipython"),
}  # fmt: skip


@pytest.mark.parametrize("sharegpt", [False, True], ids=["messages", "ShareGPT"])
@pytest.mark.parametrize("name", TOOL_ROLES)
def test_tool_answers_get_the_role_that_the_template_supports(name: str, sharegpt: bool) -> None:
    template, special, expected_role = TOOL_ROLES[name]
    tokenizer = byte_tokenizer(4096)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, "<|end|>"]})
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "up?"}, {"role": "observation", "content": "blue"}]
    messages.append({"role": "assistant", "content": "Blue."})
    speakers = {"user": "human", "assistant": "gpt"}
    turns = [{"from": speakers.get(m["role"], m["role"]), "value": m["content"]} for m in messages]
    sample, remarks = encode({"conversations": turns} if sharegpt else {"messages": messages}, tokenizer)
    assert f"<|user|>up?<|end|><|{expected_role}|>blue" in tokenizer.decode(
        [int(sample.input_ids[0]), *sample.target_ids.tolist()]
    )
    assert learned(sample, tokenizer)[0].endswith("Blue.<|end|>")
    renamed = ["f:1: messages of the role 'observation' are written as those of the role 'tool'"]
    assert remarks == (renamed if name not in ("a token of the role", "the role by name") else [])


CUT = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('[/THINK]')[-1] + '<|im_end|>\n' }}{% endfor %}"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "developer"])
def test_content_with_an_omitted_beginning_is_reported(role: str) -> None:
    """Cut content at tags that only the template knows; an assistant's omitted beginning counts as reasoning."""
    tokenizer = chatml().tokenizer()
    tokenizer.chat_template = CUT + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    messages = [{"role": "developer", "content": "d"}, *conversation("first", "second")]
    messages.insert(0, {"role": "system", "content": "s"})
    assert encode({"messages": messages}, tokenizer)[1] == []
    for message in messages:
        if message["role"] == role:
            message["content"] = f"[THINK]long[/THINK]{message['content']}"
    if role in ("system", "user"):
        with pytest.raises(
            DataError, match=rf"\({role}\): the chat template does not write the beginning of its words"
        ):
            encode({"messages": messages}, tokenizer)
        return
    sample, [remark] = encode({"messages": messages}, tokenizer)
    assert learned(sample, tokenizer) == ["first<|im_end|>", "second<|im_end|>"]
    kind = (
        "the reasoning of some of the assistant's turns" if role == "assistant" else "messages of the role 'developer'"
    )
    assert kind in remark


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "be brief"}, {"type": "text", "text": ""}],
        [{"type": "text", "text": " \n"}, {"type": "text", "text": "Think in <think></think>"}],
        "Think in <think></think>",
    ],
    ids=["empty last part", "parts", "closed thought"],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_omitted_messages_without_a_last_word_are_reported(role: str, content: Any) -> None:
    tokenizer = chatml().tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.role == 'system'", "m.role == 'system' and false")
    messages = [{"role": role, "content": content}, *conversation("first")]
    if role == "system":
        with pytest.raises(
            DataError, match=r"message 0 \(system\): the chat template does not write its words \(..'[^']"
        ):
            encode({"messages": messages}, tokenizer)
    else:
        assert "messages of the role 'developer' are left out" in encode({"messages": messages}, tokenizer)[1][0]


@pytest.mark.parametrize("role", ["developer", "tool", "function"])
def test_omitted_roles_are_reported(role: str) -> None:
    tokenizer = chatml().tokenizer()
    findings = Findings()
    encoder = Encoder(tokenizer, SampleLimits(4096), findings)
    messages = conversation("first", "second")
    # The omitted message has the same content as another one, which is written.
    silent = [*messages[:2], {"role": role, "content": "first"}, *messages[2:]]
    for number, record in enumerate((messages, silent, silent)):
        [sample] = encoder.encode(parse_record({"messages": record}, f"f:{number}", None, findings))
        assert learned(sample, tokenizer) == ["first<|im_end|>", "second<|im_end|>"]
    assert findings.lines()[
        role == "function" :
    ] == [  # function is not a role of OpenAI's format, which is a separate remark
        f"f:1 and 1 more: messages of the role {role!r} are left out: the chat template does not write them, so the model does "
        "not see them; rename the role, or name another template with data.chat_template"
    ]


def test_omitted_content_present_in_another_message_raises() -> None:
    tokenizer = chatml().tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.role == 'system'", "m.role == 'system' and false")
    messages = [{"role": "system", "content": "first"}, *conversation("first")]
    with pytest.raises(DataError, match=r"message 0 \(system\): the chat template does not write its words"):
        encode({"messages": messages}, tokenizer)


def test_templates_that_inspect_content_get_fewer_marks() -> None:
    """Use a template that omits an empty system message and tests the beginning of a question."""
    tokenizer = FAMILIES["ChatML, closed once"].tokenizer()
    plain = tokenizer.chat_template
    tokenizer.chat_template = plain.replace("m.role == 'system'", "m.role == 'system' and not c").replace(
        "{{ '<|im_start|>system\n' + c + '<|im_end|>\n' }}", "{{ raise_exception('empty') if c else '' }}"
    )
    assert tokenizer.chat_template != plain
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% elif m.role == 'user' %}", "{% elif m.role == 'user' %}{{ '' if c.startswith('what') else '?' }}"
    )
    messages = [{"role": "system", "content": ""}, *conversation("first", "second")]
    sample, _ = encode({"messages": messages}, tokenizer)
    assert learned(sample, tokenizer) == ["first<|im_end|>", "second<|im_end|>\n</s>"]


@pytest.mark.parametrize("icon", ["\ue000", "\ue001", "\ue0000\ue001", "\ue000\ue001\ue002\ue003", "\ue3a00\ue3a1"])
def test_private_use_characters_in_the_data_do_not_disable_the_check(icon: str) -> None:
    """Put private-use characters, such as font icons, into answers: the marks use delimiters that do not occur."""
    tokenizer = FAMILIES["ChatML, closed once"].tokenizer()
    sample, _ = encode({"messages": conversation(icon, "second")}, tokenizer)
    assert learned(sample, tokenizer) == [f"{icon}<|im_end|>", "second<|im_end|>\n</s>"]
    tokenizer = FAMILIES["repeating the question"].tokenizer()
    with pytest.raises(DataError, match=r"words of message 0 \(user\)"):
        encode({"messages": conversation(icon)}, tokenizer)


def test_content_in_tags_that_the_template_matches_is_marked_inside() -> None:
    """Use a template like Qwen3's, which tests a question for ``<tool_response>``."""
    tokenizer = FAMILIES["ChatML, closed once"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% elif m.role == 'user' %}",
        "{% elif m.role == 'user' and c.startswith('<tool_response>') and c.endswith('</tool_response>') %}"
        "{{ '<|im_start|>tool\n' + c + '<|im_end|>\n' }}{% elif m.role == 'user' %}",
    )
    messages = conversation("first", "second", "third")
    messages[2]["content"] = "<tool_response>\nfirst, blue\n</tool_response>"
    sample, remarks = encode({"messages": messages}, tokenizer)
    assert learned(sample, tokenizer) == ["first<|im_end|>", "second<|im_end|>", "third<|im_end|>\n</s>"]
    assert remarks == []
