"""Answers of the model to prompts while it learns, on any engine and any layout, by the embedded sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.data.chat import ChatTemplate
from megascend.apps.data.images import ImageProcessor, sources_of
from megascend.apps.data.messages import parse_messages
from megascend.apps.data.samples import SampleLimits, opening_tokens
from megascend.apps.sampling.request import SampledSequence, SampleRequest, SamplingParams
from megascend.apps.sampling.sampler import Sampler
from megascend.config import Data, Generation, Prompt
from megascend.config.documents import load_json
from megascend.errors import ConfigError, DataError
from megascend.training.batch.images import SampleImages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.backend import Backend


@dataclass(frozen=True)
class PromptAnswer:
    """Answer of the model to a prompt.

    Attributes:
        prompt: readable form of the prompt; for a conversation, its messages.
        finish_reason: ``stop`` if the answer ended by itself, ``length`` if ``max_tokens`` cut it off.
    """

    prompt: str
    text: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class AnswerSampler:
    """Prompts of a run, and how answers to them are sampled."""

    settings: Generation
    titles: tuple[str, ...]
    requests: tuple[SampleRequest, ...]
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def prepare(
        cls,
        settings: Generation,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        limits: SampleLimits,
        model: Path,
        template_date: date | None = None,
    ) -> AnswerSampler:
        """Read the prompts of a run. Local.

        Args:
            tokenizer: tokenizer with the chat template that the data were rendered with.
            model: the model's directory, whose generation_config.json may name tokens that end an answer.
            template_date: date passed to the chat template; default: today.
        """
        if settings.chat and not tokenizer.chat_template:
            raise ConfigError(
                "generation: the model's tokenizer has no chat template; set generation.chat: false, or name a template with "
                "data.chat_template"
            )
        template = ChatTemplate(tokenizer, data.chat_template_options, template_date) if settings.chat else None
        image_processor = ImageProcessor.for_model(model, data.images)
        stops = tuple(sorted(stop_tokens(tokenizer, model, template)))
        requests = []
        for number, prompt in enumerate(settings.prompts):
            tokens, images = _tokens(prompt, template, tokenizer, image_processor)
            # Now: at its first turn, after hours, it would end the run.
            if len(tokens) + settings.max_tokens > limits.length:
                raise ConfigError(
                    f"generation: the prompt {_title(prompt)!r:.60} has {len(tokens)} tokens and generation.max_tokens is "
                    f"{settings.max_tokens}: together more than {limits.length} ({limits.setting})"
                )
            # The same seed at every turn: answers change with the model alone.
            seed = settings.seed + number
            sampling = SamplingParams(settings.max_tokens, settings.temperature, seed=seed, stop=stops)
            requests.append(SampleRequest(tuple(tokens), sampling, images=images))
        return cls(settings, tuple(map(_title, settings.prompts)), tuple(requests), tokenizer)

    def due(self, step: int, last: int) -> bool:
        return step % self.settings.every == 0 or step == last

    def answer(self, backend: Backend, adapter: str | None) -> list[PromptAnswer]:
        """Have the model answer all prompts; the same on every rank. Collective."""
        requests = [replace(request, adapter=adapter) for request in self.requests]
        answers = []
        for title, result in zip(self.titles, Sampler(backend).generate(requests), strict=True):
            if result.error is not None:
                raise ConfigError(f"generation: the prompt {title!r:.60}: {result.error}")
            (sequence,) = result.samples
            text = response_text(self.tokenizer, sequence)
            answers.append(PromptAnswer(title, text, len(sequence.tokens), sequence.stop_reason))
        return answers


def response_text(tokenizer: PreTrainedTokenizerBase, sequence: SampledSequence) -> str:
    """Return the text of a response, without special tokens."""
    # Without the token that ended it, which may be an ordinary one.
    tokens = sequence.tokens[:-1] if sequence.stop_reason == "stop" else sequence.tokens
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def stop_tokens(
    tokenizer: PreTrainedTokenizerBase | None, model: Path, template: ChatTemplate | None = None
) -> set[int]:
    """Return the tokens that end a response: every sampler's, as transformers and vLLM resolve them.

    They are the tokenizer's end of sequence, those of generation_config.json (without that file, of config.json), and what closes
    a turn of ``template``.
    """
    stops: list[Any] = [None if tokenizer is None else tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        try:
            settings = load_json((model / name).read_bytes())
            values = [part.get("eos_token_id") for part in (settings, settings.get("text_config") or {})]
        except (OSError, ValueError, AttributeError):
            continue  # many models have no generation_config.json
        for value in values:
            stops += value if isinstance(value, list) else [value]
        break
    if template is not None:
        stops += template.turn_ends()
    return {number for number in stops if type(number) is int}


def _tokens(
    prompt: Prompt,
    template: ChatTemplate | None,
    tokenizer: PreTrainedTokenizerBase,
    image_processor: ImageProcessor | None,
) -> tuple[list[int], SampleImages | None]:
    """Return the tokens of a prompt and its images, whose paths are relative to the working directory."""
    if template is None:
        assert isinstance(prompt, str)
        return opening_tokens(prompt, tokenizer), None
    raw: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    try:
        messages, _ = parse_messages(raw, "generation.prompts: messages", learned=False)
        text = template.rendering(messages, prompt=True).text
        tokens: list[int] = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # type: ignore[arg-type]
        sources = sources_of(messages)
        if not sources:
            return tokens, None
        if image_processor is None:
            count = f"{len(sources)} image{'s' * (len(sources) > 1)}"
            raise ConfigError(f"generation: a prompt has {count}, and this model takes none")
        if None in sources:
            raise ConfigError(
                'generation: a part of a prompt is an image without a source: {"type": "image", "image": PATH}'
            )
        chosen = image_processor.encode(sources, Path())
        tokens, _ = chosen.expand(tokens, [0.0] * len(tokens), image_processor.layout.token)
        return tokens, image_processor.load(chosen.sources)
    except DataError as error:
        raise ConfigError(f"generation: {error}") from error


def _title(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {_words(message.get('content'))}" for message in prompt)


def _words(content: str | list[dict[str, Any]] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    words = [part.get("text") or f"[{part.get('image') or part.get('path') or 'image'!s:.80}]" for part in content]
    return " ".join(map(str, words))
