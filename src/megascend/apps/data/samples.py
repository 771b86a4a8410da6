"""Convert documents to token samples: the chat template, the loss weight of each token, and the length limit."""

from __future__ import annotations

import contextlib
import copy
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from megascend.apps.data.chat import ChatTemplate
from megascend.apps.data.document import Document, Messages
from megascend.apps.data.findings import Findings
from megascend.apps.data.images import ANY_PLACEHOLDER, EncodedImages, ImageProcessor, folder_of, sources_of
from megascend.apps.data.labels import LabelSet
from megascend.apps.data.rendering import Span
from megascend.errors import DataError
from megascend.training.batch.candidates import Candidates
from megascend.training.batch.image_sources import ImageSources
from megascend.training.batch.loss import MARGIN
from megascend.training.batch.packing import round_up
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokens(NamedTuple):
    """Token ids with the weight of each as a target, and the images among them or a teacher's candidates for each."""

    ids: list[int]
    weights: list[float]
    images: ImageSources | None = None
    candidates: Candidates | None = None

    def upto(self, length: int) -> Tokens:
        candidates = None if self.candidates is None else self.candidates[:length]
        return Tokens(self.ids[:length], self.weights[:length], self.images, candidates)


TooLong = Literal["error", "truncate", "skip"]
WeightedSpan = tuple[int, int, float]

NOTHING_LEARNED = (
    "no assistant turn to learn from, or none whose loss counts; add one, or set data.train_on_prompt: true"
)
SHARED_TOKEN = (
    "the beginning of the completion is not learned, as it shares a token with the end of the prompt; put the space between "
    "them at the beginning of the completion, not at the end of the prompt"
)
SHARED_WITH_TEMPLATE = (
    "the beginning of some of the assistant's turns is not learned, as it shares a token with what the chat template writes "
    "before it; use a template whose generation prompt does not end with a space (data.chat_template)"
)


@dataclass(frozen=True)
class SampleLimits:
    """Limits on the samples of a run.

    Attributes:
        length: longest sample, in tokens.
        setting: setting that the limit comes from, for messages.
        vocab_size: token ids must be below it; None: unknown.
        budget: maximum tokens of a preference pair, ``batching.micro_batch_tokens``; None: unlimited.
        multiple: each sample of a pair is padded to a multiple of it.
        packing: False if both are padded to the length of the longer.
        scored: samples are for a scalar head (:meth:`Sample.scored`), which has a value after their last token, too.
        padding: token that does not count at the end of a scored sample, as transformers' sequence classifiers have it.
        labels: labels of a classifier; None for other models.
    """

    length: int
    setting: str = "batching.max_length, by default the model's context"
    vocab_size: int | None = None
    budget: int | None = None
    multiple: int = 1
    packing: bool = True
    scored: bool = False
    padding: int | None = None
    labels: LabelSet | None = None

    @property
    def targets(self) -> int:
        """Return the tokens that a document needs beyond a sample's length: the last target, which is not an input."""
        return 0 if self.scored else 1

    def pair_tokens(self, lengths: Sequence[int]) -> int:
        """Return the tokens that a pair of samples takes in a micro batch."""
        padded = [round_up(length, self.multiple) for length in lengths]
        return sum(padded) if self.packing else max(padded) * len(padded)


class Encoder:
    """Converter of documents to samples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limits: SampleLimits,
        findings: Findings,
        *,
        train_on_prompt: bool = False,
        on_too_long: TooLong = "error",
        template_options: Mapping[str, Any] | None = None,
        template_date: date | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        """Report omitted and cut documents to ``findings``; texts are cut into pieces, whatever ``on_too_long`` says."""
        self._image_processor = image_processor
        self._tokenizer, self._limits, self._findings = with_whole_offsets(tokenizer), limits, findings
        self._train_on_prompt, self._on_too_long = train_on_prompt, on_too_long
        self._template = ChatTemplate(tokenizer, template_options, template_date)
        eos: Any = tokenizer.eos_token_id
        self.classifies = limits.labels is not None
        self._ends: set[int] = set() if eos is None else {eos}
        if tokenizer.chat_template:
            with contextlib.suppress(
                DataError
            ):  # a template that refuses the data's conversations, too, is reported there
                self._ends |= self._template.turn_ends()

    def encode(self, document: Document, number: int = 0) -> list[Sample]:
        """Return the samples of a document: one of a conversation, two of a pair or of a labelled completion, identified by
        ``number``, any number of a text.
        """
        try:
            if self._limits.labels is not None:
                return self._classified(document, self._limits.labels)
            self._check_label(document)
            if document.text is not None:
                return self._text(document, document.text)
            if document.is_pair:
                return self._pair(document, number)
            if document.label is not None:
                return self._labelled(document, number)
            return self._single(document)
        except DataError as error:
            if str(error).startswith(document.source):
                raise
            raise DataError(f"{document.source}: {error}") from error.__cause__

    # --- kinds of documents ---

    def _check_label(self, document: Document) -> None:
        """Refuse or remark on a label that only a classifier reads."""
        if document.class_label is None or document.label is not None:
            return
        if document.completion is None and not document.prompt_messages:
            self._findings.remark("'label' is not read: it is for classifiers (classification)", document.source)
            return
        raise DataError(
            f"'label' must be true (desirable) or false (undesirable), found {document.class_label!r:.60}; for a classifier set "
            "classification, else leave it out (data.columns)"
        )

    def _classified(self, document: Document, labels: LabelSet) -> list[Sample]:
        """Return a sample with its label, tokenised by the tokenizer or the chat template."""
        if document.is_pair:
            raise DataError(
                "a preference pair has no label: classification learns from texts, completions, conversations or token_ids with "
                "'label'"
            )
        if document.class_label is None:
            raise DataError(
                "no 'label', from which classification learns; name a column of another name with data.columns: {label: COLUMN, "
                "...}, with all others that are read"
            )
        label = labels.parse(document.class_label)
        if document.loss_weights is not None:
            raise DataError("'loss' and 'weight' have no meaning for a classifier: leave them out")
        # The first token is never a target: 0 by default.
        if document.candidates is not None or any(weight != 1 for weight in (document.token_weights or ())[1:]):
            columns = "'weights' and 'prompt_length'" if document.candidates is None else "'top_ids' and 'top_logprobs'"
            raise DataError(f"{columns} have no meaning for a classifier: leave them out (data.columns)")
        if document.messages is not None:
            kind, tokens = "conversation", self._conversation(document, document.messages, None, learn_all=True)
        elif document.token_ids is not None:
            kind, tokens = "sequence of tokens", Tokens(list(document.token_ids), [])
        else:
            text = document.text if document.text is not None else f"{document.prompt or ''}{document.completion or ''}"
            kind, tokens = "text", Tokens(self._ids(text)[0], [])
        tokens = tokens._replace(weights=[1.0] * len(tokens.ids))
        samples = self._within_limit(tokens, kind, document.source)
        for sample in samples:
            sample.label = label if isinstance(label, int) else torch.tensor(label)
        return samples

    def _text(self, document: Document, text: str) -> list[Sample]:
        """Cut a text into pieces; neighbours share one token, the last target of one being the first input of the next."""
        self._check_placeholders(document.source, text)
        if document.ends:
            tokens = self._closed(self._ids(text, special=document.begins)[0])
        else:
            tokens = opening_tokens(text, self._tokenizer) if document.begins else self._ids(text, special=False)[0]
        if document.ends:
            self._check_end(tokens, "texts", document.source)
        self._check_vocabulary(tokens)
        self._note_ends(tokens, [1.0] * len(tokens))
        # len - 1: a sample of n tokens needs n + 1 ids, and the last id alone has no target.
        starts = range(0, len(tokens) - 1, self._limits.length)
        if not starts:
            self._findings.remark("texts of fewer than two tokens have nothing to predict", document.source)
        return [Sample.causal(tokens[start : start + self._limits.length + 1]) for start in starts]

    def _single(self, document: Document) -> list[Sample]:
        if document.token_ids is not None:
            kind, weights = "sequence of tokens", list(document.token_weights or ())
            tokens = Tokens(list(document.token_ids), weights, candidates=document.candidates)
        elif document.messages is not None:
            kind, tokens = "conversation", self._conversation(document, document.messages, document.loss_weights)
        else:
            kind = "prompt with its completion"
            tokens = self._completion(document.prompt or "", document.completion or "", document.source)
        return self._within_limit(tokens, kind, document.source)

    def _response(self, document: Document, prompt: Any, answer: Any, first: int = 0) -> Tokens:
        """Encode an answer to a prompt, both text or both messages; of these only the assistant's from ``first`` on count."""
        if isinstance(prompt, str) and isinstance(answer, str):
            # Losses that average over a response's tokens would include the prompt's.
            return self._completion(prompt, answer, document.source, learn_prompt=False)
        assert not isinstance(answer, str), "with_mismatches() takes documents of one form"
        messages: Any = (*prompt, *(answer or ()))
        learned = [float(index >= first and message["role"] == "assistant") for index, message in enumerate(messages)]
        return self._conversation(document, messages, learned, learn_all=False)

    def _pair(self, document: Document, number: int) -> list[Sample]:
        is_text = isinstance(document.chosen, str)
        # The common beginning cancels out in the loss of a pair, so it gets no weight.
        shared = 0 if is_text else common_messages(document.chosen, document.rejected)
        samples: list[Sample] = []
        for side in (document.chosen, document.rejected):
            tokens = self._response(document, (document.prompt or "") if is_text else (), side, shared)
            sample = self._within_limit(tokens, "conversation of the pair", document.source)
            if not sample:
                return []
            samples += sample
        # Both sides must be in one micro batch, because the loss compares them.
        tokens, budget = self._limits.pair_tokens([len(sample) for sample in samples]), self._limits.budget
        if budget is not None and tokens > budget:
            problem = f"the pair takes {tokens} tokens and the limit is {budget} (batching.micro_batch_tokens)"
            if self._on_too_long != "skip":
                raise DataError(f"{problem}: shorten or remove it, raise the limit, or set data.on_too_long: skip")
            remark = "left out: the pair is longer than a micro batch (data.on_too_long: skip)"
            self._findings.remark(remark, document.source)
            return []
        if self._limits.scored and torch.equal(samples[0].input_ids, samples[1].input_ids):
            self._findings.remark("left out: both sides of the pair are the same tokens", document.source)
            return []
        if document.margin is not None and not self._limits.scored:
            self._findings.remark("'margin' is not read: it is for reward models", document.source)
        for sample, chosen in zip(samples, (True, False), strict=True):
            sample.pair, sample.chosen = number, chosen
            if document.margin is not None and self._limits.scored:
                sample.extra = {MARGIN: torch.full((len(sample),), float(document.margin))}
        return samples

    def _labelled(self, document: Document, number: int) -> list[Sample]:
        """Return the sample with its label, and the one of its prompt with another document's completion."""
        prompt, completion = document.parts
        samples: list[Sample] = []
        for answer in (completion, document.mismatch):
            tokens = self._response(document, prompt, answer, len(prompt))
            if samples:
                # It is used for an estimate only, for which the beginning suffices.
                tokens = tokens.upto(self._limits.length + 1)
                if not any(tokens.weights[1:]):
                    remark = "left out: the prompt leaves no room for another's completion, which kto needs"
                    self._findings.remark(remark, document.source)
                    return []
            sample = self._within_limit(tokens, "prompt with its completion", document.source)
            if not sample:
                return []
            samples += sample
        for sample, label in zip(samples, (int(bool(document.label)), None), strict=True):
            sample.pair, sample.label = number, label
        return samples

    # --- tokens and weights ---

    def _conversation(
        self,
        document: Document,
        messages: Messages,
        loss_weights: Sequence[float] | None,
        *,
        learn_all: bool | None = None,
    ) -> Tokens:
        """Encode messages; with ``learn_all``, by default ``train_on_prompt``, each of them is learned."""
        images = self._decoded(messages, document.source)
        learn_all = self._train_on_prompt if learn_all is None else learn_all
        spans: list[WeightedSpan] = []
        conversation = self._template.rendering(messages, document.tools, document.template_options)
        if not learn_all or loss_weights is not None:
            message_weights = list(loss_weights or [1.0] * len(messages))
            if not learn_all:
                message_weights[: document.prompt_messages] = [0.0] * document.prompt_messages
            pairs = zip(messages, message_weights, strict=True)
            separate = len({weight for message, weight in pairs if message["role"] == "assistant"}) > 1
            turns = self._template.assistant_spans(conversation, separate=separate)
            spans = [(start, end, message_weights[index]) for index, pieces in turns for start, end in pieces]
            weighted_turns = [(index, pieces) for index, pieces in turns if message_weights[index]]
            self._template.check_endings(conversation.text, weighted_turns, document.source, self._findings)
        self._template.check_written(conversation, document.source, self._findings)
        # Without special tokens: the chat template has written them.
        tokens, offsets = self._ids(conversation.text, special=False, offsets=True)
        if not learn_all and lies_within_a_token(offsets, [start for start, _, weight in spans if weight]):
            self._findings.remark(SHARED_WITH_TEMPLATE, document.source)
        weights = token_weights(offsets, spans, elsewhere=float(learn_all))
        if self._image_processor is None or images is None:
            return Tokens(tokens, weights)
        # After the weights: their spans are those of the template's text, which has one token for each image.
        tokens, weights = images.expand(tokens, weights, self._image_processor.layout.token)
        return Tokens(tokens, weights, images.sources if images.tokens else None)

    def _decoded(self, messages: Messages, source: str) -> EncodedImages | None:
        """Return the images of a conversation, each decoded once; None for a model of text."""
        sources, processor = sources_of(messages), self._image_processor
        if not sources:
            contents = [content for message in messages if isinstance(content := message.get("content"), str)]
            self._check_placeholders(source, *contents, refused=processor is not None)
        if processor is None:
            if sources:
                count = f"{len(sources)} image{'s' * (len(sources) > 1)}"
                raise DataError(f"the conversation has {count}, and this model takes none")
            return None
        return processor.encode(sources, folder_of(source))

    def _completion(self, prompt: str, completion: str, source: str, *, learn_prompt: bool | None = None) -> Tokens:
        """Encode both together, closed by the end of sequence; the prompt is learned, too, with ``learn_prompt``."""
        learn_prompt = self._train_on_prompt if learn_prompt is None else learn_prompt
        self._check_placeholders(source, prompt, completion)
        tokens, offsets = self._ids(prompt + completion, offsets=True)
        if not learn_prompt and lies_within_a_token(offsets, [len(prompt)]):
            self._findings.remark(SHARED_TOKEN, source)
        end = len(prompt) + len(completion)
        # Special tokens that the tokenizer adds have the offsets (0, 0); the closing one is weighted like the completion.
        weights = token_weights(offsets, [(len(prompt), end, 1.0)], elsewhere=float(learn_prompt))
        closed = self._closed(tokens)
        self._check_end(closed, "completions", source)
        weights += [1.0] * (len(closed) - len(tokens))
        # The end of sequence is always learned, also where the tokenizer itself has added it.
        weights[-1] = 1.0
        return Tokens(closed, weights)

    def _closed(self, tokens: list[int]) -> list[int]:
        eos = self._tokenizer.eos_token_id
        return tokens if eos is None or tokens[-1:] == [eos] else [*tokens, int(eos)]  # type: ignore[arg-type]

    def _check_end(self, tokens: list[int], kind: str, source: str) -> None:
        """Remark that documents do not end with a special token, so that the model does not learn to stop."""
        if tokens and self._tokenizer.eos_token_id is None and tokens[-1] not in self._tokenizer.all_special_ids:
            self._findings.remark(
                f"{kind} have no end to learn, as the tokenizer has no end token: set eos_token in tokenizer_config.json",
                source,
            )

    def _check_placeholders(self, source: str, *texts: str, refused: bool = False) -> None:
        """Refuse texts that have the place of an image, or remark that it is learned as it is written."""
        if match := next(filter(None, map(ANY_PLACEHOLDER.search, texts)), None):
            if refused:
                raise DataError(f"{match[0]} is in a text without images: add them, or make it a part of type 'text'")
            self._findings.remark(f"{match[0]} is learned as text, without an image", source)

    def _note_ends(self, tokens: Sequence[int], weights: Sequence[float]) -> None:
        """Keep which tokens that end an answer are learned, for the generation_config.json of exports."""
        for end in self._ends - self._findings.ends:
            if end in tokens and any(w for token, w in zip(tokens[1:], weights[1:], strict=True) if token == end):
                self._findings.ends.add(end)

    def _ids(self, text: str, *, special: bool = True, offsets: bool = False) -> tuple[list[int], list[Span]]:
        """Return token ids, and the span of characters of each."""
        check_characters(text)
        if offsets and not self._tokenizer.is_fast:
            name = type(self._tokenizer).__name__
            raise DataError(f"the tokenizer ({name}) gives no character offsets; a fast one is needed")
        # A text longer than the model's context is cut later, so the tokenizer's warning about it would only mislead.
        encoded: Any = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=offsets, verbose=False)
        # Data may contain the BOS token as text; the tokenizer adds another one.
        first = 1 if special and begins_twice(encoded["input_ids"], self._tokenizer) else 0
        return list(encoded["input_ids"])[first:], list(encoded["offset_mapping"])[first:] if offsets else []

    # --- limits ---

    def _within_limit(self, tokens: Tokens, kind: str, source: str) -> list[Sample]:
        """Return a sample, cut to the limit if allowed; none if it is skipped."""
        self._check_vocabulary(tokens.ids)
        if tokens.candidates is not None:
            self._check_vocabulary([int(tokens.candidates.ids.max())])
        if not self._learns(tokens):
            raise DataError(NOTHING_LEARNED)
        tokens = self._without_padding(tokens)
        targets, limit = self._limits.targets, self._limits.length
        length = len(tokens.ids) - targets
        if length <= limit:
            return [self._sample(tokens)]
        if self._on_too_long == "error":
            raise DataError(
                f"the {kind} has {length} tokens and the limit is {limit} ({self._limits.setting}): shorten or remove it, raise "
                "the limit, or set data.on_too_long: truncate or skip"
            )
        processor = self._image_processor
        cuts_image = (
            tokens.images is not None and processor is not None and processor.layout.token in tokens.ids[limit:]
        )
        # limit + 1 ids give `limit` inputs with a target each.
        tokens = self._without_padding(tokens.upto(limit + targets))
        # Truncation may cut off everything that is learned.
        if self._on_too_long == "skip" or cuts_image or not self._learns(tokens):
            effect = "an image would be cut" if cuts_image else "nothing to learn stays"
            setting = "skip" if self._on_too_long == "skip" else f"truncate, and {effect}"
            self._findings.remark(f"left out: more than {limit} tokens (data.on_too_long: {setting})", source)
            return []
        self._findings.remark(f"cut to {limit} tokens (data.on_too_long: truncate)", source)
        return [self._sample(tokens)]

    def _without_padding(self, tokens: Tokens) -> Tokens:
        """Return tokens of a scored sample up to the last one that is not padding."""
        count = len(tokens.ids)
        while self._limits.scored and count > 1 and tokens.ids[count - 1] == self._limits.padding:
            count -= 1
        return tokens.upto(count)

    def _learns(self, tokens: Tokens) -> bool:
        # The first token is never a target.
        return any(tokens.weights if self._limits.labels is not None else tokens.weights[1:])

    def _sample(self, tokens: Tokens) -> Sample:
        if self._limits.scored:  # engines refuse scalar heads on models that take images
            return Sample.scored(tokens.ids)
        self._note_ends(tokens.ids, tokens.weights)
        return Sample.causal(tokens.ids, weights=tokens.weights, images=tokens.images, candidates=tokens.candidates)

    def _check_vocabulary(self, tokens: list[int]) -> None:
        size = self._limits.vocab_size
        if size is not None and tokens and max(tokens) >= size:
            raise DataError(
                f"token id {max(tokens)} lies outside the model's vocabulary [0, {size}); does the tokenizer belong to this "
                "model?"
            )


def build_samples(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    train_on_prompt: bool = False,
    image_processor: ImageProcessor | None = None,
) -> list[Sample]:
    """Yield the samples of all documents, in order.

    A conversation becomes one sample, with loss on the assistant's turns (on everything with ``train_on_prompt``). A
    text, closed by the end-of-sequence token, becomes as many samples of at most ``max_length`` as it needs; every
    token of it but the first is a target exactly once. ``image_processor``: of a model that takes them.

    Raises:
        DataError: documents are longer than ``max_length``, have nothing to learn, or cannot be rendered; the message lists
            all of them.
    """
    findings = Findings()
    encoder = Encoder(
        tokenizer, SampleLimits(max_length), findings, train_on_prompt=train_on_prompt, image_processor=image_processor
    )
    samples: list[Sample] = []
    for number, document in enumerate(documents):
        with findings.collecting():
            samples += encoder.encode(document, number)
    findings.raise_problems()
    for sample in samples:
        if image_processor is not None and isinstance(sample.images, ImageSources):
            sample.images = image_processor.load(sample.images)
    if not samples:
        raise DataError("the training data holds no token to predict: every text is shorter than two tokens")
    return samples


def token_weights(offsets: Sequence[Span], spans: Sequence[WeightedSpan], elsewhere: float = 0.0) -> list[float]:
    """Return for each token the weight of the span (sorted) that contains its first character, else ``elsewhere``."""
    weights, remaining = [], list(spans)
    for first, _ in offsets:
        while remaining and first >= remaining[0][1]:
            remaining.pop(0)
        inside = bool(remaining) and first >= remaining[0][0]
        weights.append(remaining[0][2] if inside else elsewhere)
    return weights


def lies_within_a_token(offsets: Sequence[Span], boundaries: Sequence[int]) -> bool:
    """Return True if a token begins before one of ``boundaries`` and ends after it."""
    # Without special tokens, whose offsets are (0, 0).
    tokens = [(first, last) for first, last in offsets if first < last]
    firsts = [first for first, _ in tokens]
    before = [bisect_left(firsts, boundary) - 1 for boundary in boundaries]
    return any(index >= 0 and tokens[index][1] > boundary for index, boundary in zip(before, boundaries, strict=True))


def check_characters(text: str) -> None:
    """Raise DataError for what JSON can hold and a fast tokenizer refuses with an unrelated message: half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair ({text[error.start]!r}), not a character"
        raise DataError(f"character {error.start} is {half}") from None


def begins_twice(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Check whether the text starts with a BOS token and the tokenizer has added a second one."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokens[:2]) == [bos, bos]


def opening_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a plain text's token ids with the special tokens that a training sample begins with, without those at the end."""
    plain: Any = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    closed: Any = tokenizer(text, verbose=False)["input_ids"]
    places = range(len(closed) - len(plain) + 1)
    first = next((index for index in places if closed[index : index + len(plain)] == plain), None)
    tokens = list(plain if first is None else closed[: first + len(plain)])
    return tokens[1:] if begins_twice(tokens, tokenizer) else tokens


def common_messages(first: Any, second: Any) -> int:
    """Return the length of the common prefix of two conversations, in messages."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def with_whole_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or a copy of one that trims spaces from its offsets (``trim_offsets``), which does not.

    With trimmed offsets a token of spaces lies at its end, as if it belonged to what follows. Token ids are the same.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    processor = getattr(backend, "post_processor", None)
    if processor is None:
        return tokenizer
    # tokenizers gives a post-processor's settings only as its pickled state, which is JSON.
    state = processor.__getstate__()
    trimmed = state.replace(b'"trim_offsets":true', b'"trim_offsets":false')
    if trimmed == state:
        return tokenizer
    from tokenizers.processors import ByteLevel

    changed = ByteLevel()
    # __setstate__ turns it into a processor of the state's kind.
    changed.__setstate__(trimmed)
    untrimmed: Any = copy.deepcopy(tokenizer)
    untrimmed.backend_tokenizer.post_processor = changed
    return untrimmed
