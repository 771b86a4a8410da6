"""Documents to token samples: the chat template, which tokens carry loss, and the length limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megascend.app.data import Document
from megascend.batch.sample import Sample
from megascend.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]


def build_samples(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, max_length: int, train_on_prompt: bool = False
) -> list[Sample]:
    """Samples of all documents, in order.

    A conversation becomes one sample, with loss on the assistant's turns (on everything with ``train_on_prompt``). A
    text, closed by the end-of-sequence token, becomes as many samples of at most ``max_length`` as it needs; every
    token of it but the first is a target exactly once.

    Raises:
        DataError: a conversation is longer than ``max_length``, has nothing to learn, or cannot be rendered.
    """
    samples = []
    for document in documents:
        if document.messages is not None:
            samples.append(chat_sample(document, tokenizer, max_length, train_on_prompt))
        else:
            samples += text_samples(document, tokenizer, max_length)
    if not samples:
        raise DataError("the training data holds no token to predict: every text is shorter than two tokens")
    return samples


def text_samples(document: Document, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Sample]:
    """A text in chunks; neighbours share one token, the last target of one being the first input of the next."""
    # A text longer than the model's context is cut below, so the tokenizer's warning about it would only mislead.
    tokens = list(tokenizer(document.text or "", verbose=False)["input_ids"])  # type: ignore[arg-type]
    if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
        tokens.append(tokenizer.eos_token_id)  # type: ignore[arg-type]
    starts = range(0, len(tokens) - 1, max_length)
    return [Sample.causal(tokens[start : start + max_length + 1]) for start in starts]


def chat_sample(
    document: Document, tokenizer: PreTrainedTokenizerBase, max_length: int, train_on_prompt: bool
) -> Sample:
    """A conversation as the chat template writes it, weighted token by token."""
    messages = list(document.messages or ())
    if not tokenizer.chat_template:
        raise DataError(
            f"{document.source}: 'messages' need a chat template, and the model's tokenizer has none; "
            "add chat_template.jinja to the model directory or use 'text'"
        )
    rendered = render(tokenizer, messages, document.source)
    if train_on_prompt:
        spans = [(0, len(rendered))]
    else:
        spans = assistant_spans(tokenizer, messages, rendered, document.source)
    if not tokenizer.is_fast:
        raise DataError(f"the tokenizer ({type(tokenizer).__name__}) gives no character offsets; a fast one is needed")
    encoded: Any = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    weights = token_weights(encoded["offset_mapping"], spans)
    length = len(weights) - 1
    if length > max_length:
        raise DataError(
            f"{document.source}: the conversation has {length} tokens and the limit is {max_length} "
            "(batching.max_length, by default the model's context): shorten or remove it, or raise the limit"
        )
    if not any(weights[1:]):
        raise DataError(
            f"{document.source}: no assistant turn to learn from; add one, or set data.train_on_prompt: true"
        )
    return Sample.causal(encoded["input_ids"], weights=weights)


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], source: str, *, prompt: bool = False
) -> str:
    """The conversation as the chat template writes it; with ``prompt``, up to where the assistant would go on."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:
        raise DataError(
            f"{source}: the chat template refuses the conversation: {type(error).__name__}: {error}"
        ) from error


def assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], rendered: str, source: str
) -> list[Span]:
    """Character ranges of ``rendered`` that the assistant writes: from the generation prompt to the end of its turn.

    A turn starts where the same conversation, cut before it and rendered with a generation prompt, ends. It ends where
    the conversation cut after it ends; or, for templates that write a last turn differently (Qwen3 adds an empty
    thinking block to it), at the next end-of-sequence token. What follows that token (a newline in ChatML) is never
    generated, so it is left out.
    """
    eos = tokenizer.eos_token if isinstance(tokenizer.eos_token, str) else ""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head = render(tokenizer, messages[:index], source, prompt=True)
        upto = render(tokenizer, messages[: index + 1], source)
        start = len(head)
        if rendered.startswith(head) and rendered.startswith(upto):
            end = len(upto)
            last = rendered.rfind(eos, start, end) if eos else -1
            if last >= 0 and not rendered[last + len(eos) : end].strip():
                end = last + len(eos)
        elif rendered.startswith(head) and eos and (last := rendered.find(eos, start)) >= 0:
            end = last + len(eos)
        else:
            raise DataError(
                f"{source}: cannot tell where turn {index} of the assistant stands: the chat template rewrites earlier "
                "turns; set data.train_on_prompt: true, or use a template that only appends"
            )
        spans.append((start, end))
    return spans


def token_weights(offsets: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """1.0 for each token whose first character lies in one of ``spans`` (sorted), else 0.0."""
    weights, remaining = [], list(spans)
    for first, _ in offsets:
        while remaining and first >= remaining[0][1]:
            remaining.pop(0)
        weights.append(float(bool(remaining) and first >= remaining[0][0]))
    return weights
