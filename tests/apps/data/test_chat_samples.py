"""Token weights, compared token by token with conversations written out by hand."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megascend.apps.cli.random_checkpoint import IM_END, SPECIAL_TOKENS, byte_characters, byte_tokenizer
from megascend.apps.data.document import Document
from megascend.apps.data.findings import Findings
from megascend.apps.data.samples import Encoder, SampleLimits, build_samples
from megascend.errors import DataError
from megascend.training.batch.sample import Sample

SPACE_BEFORE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SPACE_WITHIN = SPACE_BEFORE.replace("'assistant: '", "'assistant:'")


def chat(*turns: str) -> Document:
    """Build a conversation from turns as ``role: content``."""
    messages = [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]
    return Document("chat.jsonl:4", messages=tuple(messages))


def expected(*parts: tuple[str, float]) -> tuple[list[int], list[float]]:
    """Return ids and weights of texts with their weights; every byte or special token is one token."""
    ids, weights = [], []
    for text, weight in parts:
        while text:
            special = next((token for token in SPECIAL_TOKENS if text.startswith(token)), None)
            if special:
                piece, text = [256 + SPECIAL_TOKENS.index(special)], text[len(special) :]
            else:
                piece, text = list(text[0].encode()), text[1:]
            ids += piece
            weights += [weight] * len(piece)
    return ids, weights


def parts_of(sample: Sample) -> tuple[list[int], list[float]]:
    """Undo the shift by one; the first token has no weight because nothing predicts it."""
    assert sample.input_ids.tolist()[1:] == sample.target_ids.tolist()[:-1]
    return [int(sample.input_ids[0]), *sample.target_ids.tolist()], [0.0, *sample.weights.tolist()]


def test_several_turns_and_a_system_prompt() -> None:
    document = chat("system: be brief", "user: hé?", "assistant: 你 yes", "user: c", "assistant: d", "user: e")
    [sample] = build_samples([document], byte_tokenizer(256), 256)
    assert parts_of(sample) == expected(
        ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhé?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("你 yes<|im_end|>", 1),
        ("\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", 0),
        ("d<|im_end|>", 1),
        ("\n<|im_start|>user\ne<|im_end|>\n", 0),
    )


def test_training_on_the_prompt() -> None:
    [sample] = build_samples([chat("user: a", "assistant: b")], byte_tokenizer(256), 256, train_on_prompt=True)
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert parts_of(sample) == expected((text[:12], 0), (text[12:], 1))
    [only_user] = build_samples([chat("user: a")], byte_tokenizer(256), 256, train_on_prompt=True)
    assert float(only_user.weights.sum()) == len(only_user)


def test_text_is_cut_into_chunks_that_lose_no_target() -> None:
    tokenizer = byte_tokenizer(256)
    text = "0123456789"
    samples = build_samples([Document("a.txt", text=text)], tokenizer, 4)
    end = 256 + SPECIAL_TOKENS.index(IM_END)
    assert [sample.input_ids.tolist() for sample in samples] == [[*b"0123"], [*b"4567"], [*b"89"]]
    assert [sample.target_ids.tolist() for sample in samples] == [[*b"1234"], [*b"5678"], [*b"9", end]]
    assert all(bool((sample.weights == 1).all()) for sample in samples)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 10, 11, 50])
def test_every_token_but_the_first_is_a_target_once(limit: int) -> None:
    samples = build_samples([Document("a.txt", text="0123456789")], byte_tokenizer(256), limit)
    targets = [target for sample in samples for target in sample.target_ids.tolist()]
    assert targets == [*b"123456789", 257]
    assert all(1 <= len(sample) <= limit for sample in samples)


def encode(
    document: Document, limits: SampleLimits | None = None, **settings: object
) -> tuple[list[Sample], list[str]]:
    """Return the samples of a document and the remarks about it."""
    findings = Findings()
    encoder = Encoder(byte_tokenizer(256), limits or SampleLimits(256), findings, **settings)
    return encoder.encode(document, number=7), findings.lines()


def test_message_weights_are_applied() -> None:
    turns = chat("user: a", "assistant: b", "user: c", "assistant: d").messages
    document = Document("f:1", messages=turns, loss_weights=(0.0, 0.0, 0.0, 0.5))
    [sample], _ = encode(document)
    before = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    head = "<|im_start|>assistant\n"
    assert parts_of(sample) == expected((before + head, 0), ("d<|im_end|>", 0.5), ("\n", 0))
    [sample], _ = encode(document, train_on_prompt=True)
    assert parts_of(sample) == expected(
        ("<|im_start|>", 0),
        ("user\na<|im_end|>\n<|im_start|>assistant\n", 1),
        ("b<|im_end|>", 0),
        ("\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", 1),
        ("d<|im_end|>", 0.5),
        ("\n", 1),
    )
    with pytest.raises(DataError, match=r"^f:1: no assistant turn to learn from, or none whose loss counts"):
        encode(Document("f:1", messages=turns, loss_weights=(0.0,) * 4))


def test_completion_carries_loss_and_prompt_does_not() -> None:
    [sample], _ = encode(Document("f:1", prompt="1 + 1 =", completion=" 2é"))
    assert parts_of(sample) == expected(("1 + 1 =", 0), (" 2é<|im_end|>", 1))
    [sample], _ = encode(Document("f:1", prompt="ab", completion="c"), train_on_prompt=True)
    assert parts_of(sample) == expected(("a", 0), ("bc<|im_end|>", 1))


def test_completion_of_messages_carries_loss_and_prompt_if_configured() -> None:
    turns = chat("user: a", "assistant: b", "user: c", "assistant: d").messages
    before = (
        "user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    document = Document("f:1", messages=turns, prompt_messages=3)
    [sample], _ = encode(document)
    assert parts_of(sample) == expected(("<|im_start|>" + before, 0), ("d<|im_end|>", 1), ("\n", 0))
    [sample], _ = encode(document, train_on_prompt=True)
    assert parts_of(sample) == expected(("<|im_start|>", 0), (before + "d<|im_end|>\n", 1))


def test_token_shared_by_prompt_and_completion_is_reported() -> None:
    """Use a tokenizer like GPT-2's, with a token for " y"."""
    vocabulary = {**{character: byte for byte, character in enumerate(byte_characters())}, "\u0120y": 256}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u0120", "y")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    results = []
    for prompt, completion in (("a: ", "yes"), ("a:", " yes")):
        findings = Findings()
        [sample] = Encoder(tokenizer, SampleLimits(256), findings).encode(
            Document("f:1", prompt=prompt, completion=completion)
        )
        assert sample.target_ids.tolist()[1:] == [256, ord("e"), ord("s")]
        *lines, last = findings.lines()
        assert "have no end to learn" in last
        results.append((sample.weights.tolist()[1:], lines))
    assert results[1] == ([1, 1, 1], [])
    assert results[0][0] == [0, 1, 1]
    assert "the beginning of the completion is not learned" in results[0][1][0]
    turns = chat("user: a", "assistant: yes").messages
    for template, weights, lines in ((SPACE_BEFORE, [0, 1, 1], 2), (SPACE_WITHIN, [1, 1, 1], 1)):
        tokenizer.chat_template, findings = template, Findings()
        [sample] = Encoder(tokenizer, SampleLimits(256), findings).encode(Document("f:1", messages=turns))
        assert sample.weights.tolist()[-3:] == weights
        assert len(findings.lines()) == lines  # one of them: turns have no end


@pytest.mark.parametrize(
    "processor",
    [
        processors.ByteLevel(trim_offsets=True),
        processors.Sequence([processors.ByteLevel(trim_offsets=True)]),
    ],
    ids=["single", "sequence"],
)
def test_spaces_are_part_of_tokens_despite_trimmed_offsets(processor) -> None:
    """Handle tokenizers like GPT-NeoX's, whose offsets trim spaces: a token of spaces has an empty span."""
    trimming = byte_tokenizer(256)
    trimming.backend_tokenizer.post_processor = processor
    documents = [
        chat("user: a ", "assistant:  b\nc \n", "user:  ", "assistant: d "),
        Document("f:1", prompt="a: ", completion=" b\n\n"),
        Document("f:2", prompt="a:\n", completion="b "),
    ]
    for document in documents:
        [sample] = Encoder(trimming, SampleLimits(256), Findings()).encode(document)
        [reference] = Encoder(byte_tokenizer(256), SampleLimits(256), Findings()).encode(document)
        assert parts_of(sample) == parts_of(reference)
    offset_mapping = trimming("a: b", return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    assert offset_mapping[2] == (3, 3), "the caller's tokenizer is unchanged"


def test_pair_becomes_two_samples_whose_answers_carry_loss() -> None:
    shared = chat("user: a", "assistant: b", "user: c").messages or ()
    sides = [(*shared, {"role": "assistant", "content": answer}) for answer in ("yes", "no")]
    pairs = [
        (Document("f:1", chosen=sides[0], rejected=sides[1]), "<|im_end|>\n"),
        (Document("f:1", prompt="c", chosen="yes", rejected="no"), "<|im_end|>"),
    ]
    for document, end in pairs:
        pair_samples, _ = encode(document)
        for sample, answer in zip(pair_samples, ("yes", "no"), strict=True):
            ids, weights = parts_of(sample)
            learned = [token for token, weight in zip(ids, weights, strict=True) if weight]
            assert learned == expected((f"{answer}<|im_end|>", 1))[0]
            assert ids[-len(expected((f"{answer}{end}", 1))[0]) :] == expected((f"{answer}{end}", 1))[0]
        assert [(sample.pair, sample.chosen) for sample in pair_samples] == [(7, True), (7, False)]


LONG = chat("user: a", "assistant: " + "b" * 20)
PAIR = Document("f:1", prompt="p", chosen="c" * 20, rejected="r" * 10)


@pytest.mark.parametrize("document", [LONG, Document("f:1", prompt="a", completion="b" * 20), PAIR])
def test_too_long_documents_raise_or_are_cut_or_skipped(document: Document) -> None:
    longest = max(map(len, encode(document)[0]))
    for choice in ("error", "truncate", "skip"):
        samples, remarks = encode(document, SampleLimits(longest), on_too_long=choice)
        assert max(map(len, samples)) == longest
        assert remarks == []
    limits = SampleLimits(longest - 1, "batching.max_length: 5")
    with pytest.raises(
        DataError, match=rf"has {longest} tokens and the limit is {longest - 1} \(batching.max_length: 5\)"
    ):
        encode(document, limits)
    samples, remarks = encode(document, limits, on_too_long="skip")
    assert samples == []
    assert remarks == [f"{document.source}: left out: more than {longest - 1} tokens (data.on_too_long: skip)"]
    samples, remarks = encode(document, limits, on_too_long="truncate")
    assert max(map(len, samples)) == longest - 1
    assert remarks == [f"{document.source}: cut to {longest - 1} tokens (data.on_too_long: truncate)"]
    samples, remarks = encode(document, SampleLimits(1), on_too_long="truncate")
    if document is LONG:  # the answer is cut off
        assert samples == []
        assert remarks == [
            f"{document.source}: left out: more than 1 tokens (data.on_too_long: truncate, and nothing to learn stays)"
        ]


def test_pair_longer_than_a_micro_batch_raises_or_is_skipped() -> None:
    pair_samples, _ = encode(PAIR)
    assert [len(sample) for sample in pair_samples] == [21, 11]
    for settings, tokens in (({}, 32), ({"multiple": 4}, 36), ({"packing": False}, 42)):
        assert encode(PAIR, SampleLimits(256, budget=tokens, **settings))[0]
        with pytest.raises(
            DataError, match=rf"^f:1: the pair takes {tokens} tokens .* {tokens - 1} \(batching.micro_batch_tokens\)"
        ):
            encode(PAIR, SampleLimits(256, budget=tokens - 1, **settings))
        samples, [remark] = encode(PAIR, SampleLimits(256, budget=tokens - 1, **settings), on_too_long="skip")
        assert samples == []
        assert "longer than a micro batch" in remark


def test_invalid_characters_and_token_ids_raise_data_error() -> None:
    with pytest.raises(DataError, match=r"^f:1: character 1 is half of a surrogate pair"):
        encode(Document("f:1", text="a\ud800b"))
    with pytest.raises(DataError, match=r"^chat.jsonl:4: character \d+ is half of a surrogate pair"):
        encode(chat("user: a", "assistant: \udc00"))
    with pytest.raises(DataError, match=r"^f:1: token id 257 lies outside the model's vocabulary \[0, 257\)"):
        encode(Document("f:1", text="abc"), SampleLimits(256, vocab_size=257))
    assert encode(Document("f:1", text="abc"), SampleLimits(256, vocab_size=258))[0]
