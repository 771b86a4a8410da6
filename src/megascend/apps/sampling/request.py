"""Requests to the sampler and their results."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal

from megascend.training.batch.image_sources import ImageSources
from megascend.training.batch.images import SampleImages

Stop = str | int | tuple[int, ...]
"""A text, a token id, or a sequence of token ids."""

StopReason = Literal["stop", "length", "cancelled"]

TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-probability) of the likeliest tokens at one position, likeliest first."""


MAX_PICKS = 64
"""Most target tokens, and most draws, at one position of a prompt."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a response.

    Attributes:
        max_tokens: longest response in tokens; 0 samples nothing.
        temperature: divisor of the logits before a token is drawn; 0 takes the likeliest token.
        top_p: draw from the fewest likeliest tokens with at least this total probability; 1: from all.
        top_k: draw from this many of the likeliest tokens; 0 or less: from all.
        seed: the same seed and prompt give the same responses in any batch; None: a new seed every time.
        stop: texts, token ids or sequences of token ids that end a response; the response includes them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[Stop, ...] = ()

    @property
    def problem(self) -> str | None:
        """Error message if these settings are invalid, or None."""
        if self.max_tokens < 0:
            return f"max_tokens={self.max_tokens}: at least 0"
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            return f"temperature={self.temperature}: a finite number, at least 0"
        if not 0 < self.top_p <= 1:
            return f"top_p={self.top_p}: above 0, at most 1"
        if any(stop in ("", ()) for stop in self.stop):
            return "stop: an empty text or sequence would end every response"
        return None


@dataclass(frozen=True)
class SampleRequest:
    """Request for responses to one prompt.

    Attributes:
        prompt: token ids.
        adapter: name of the adapter to sample from; None: the base model.
        num_samples: number of responses.
        prompt_logprobs: also return the log-probability of each prompt token.
        topk_prompt_logprobs: also return this many of the likeliest tokens, with log-probabilities, at each prompt position.
        topk_logprobs: the same at each position of the responses.
        target_tokens: token ids to score at each prompt position but the first, equally many in every row; -1: none.
        prompt_draws: also draw this many independent tokens at each prompt position but the first, at the request's temperature
            and from the full vocabulary.
        images: images of the prompt, for a model that takes them; decoded before the sampler gets the request.
    """

    prompt: Sequence[int]
    params: SamplingParams
    adapter: str | None = None
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    target_tokens: tuple[tuple[int, ...], ...] | None = None
    prompt_draws: int = 0
    images: SampleImages | ImageSources | None = None

    @property
    def problem(self) -> str | None:
        """Error message if a value has the wrong type, such as a text in place of token ids, or None."""
        if not isinstance(self.params, SamplingParams):
            return f"params: megascend.SamplingParams is expected, got {type(self.params).__name__}"
        if not isinstance(self.adapter, str | None):
            return f"adapter: a name is expected, got {type(self.adapter).__name__}"
        try:
            for numbers in (self.prompt, *(self.target_tokens or ())):
                [index(number) for number in numbers]
            params = self.params
            counts = (self.num_samples, self.topk_prompt_logprobs, self.topk_logprobs, self.prompt_draws)
            [index(number) for number in (*counts, params.max_tokens, params.top_k, params.seed or 0)]
            return params.problem
        except TypeError as error:
            return f"the request needs token ids and numbers: {error} (prompt {self.prompt!r:.60})"

    def refusal(self, adapters: Collection[str], vocab_size: int, limit: int, setting: str) -> str | None:
        """Return why the request cannot be answered, or None. Pure.

        Args:
            adapters: names of the existing adapters.
            limit: most tokens of prompt and response together.
            setting: name of the setting behind ``limit``, for the message.
        """
        if self.problem is not None:
            return self.problem
        params, length = self.params, len(self.prompt)
        if not length or self.num_samples < 1:
            return f"{length} prompt tokens, num_samples={self.num_samples}: at least 1 of each"
        if self.adapter is not None and self.adapter not in adapters:
            return f"unknown adapter {self.adapter!r}; adapters: {', '.join(sorted(adapters)) or 'none'}"
        invalid = next((token for token in self.prompt if not 0 <= token < vocab_size), None)
        if invalid is not None:
            return f"prompt token {invalid} is not in [0, {vocab_size})"
        if length + params.max_tokens > limit:
            return (
                f"{length} prompt tokens and max_tokens={params.max_tokens} are together more than {limit} ({setting}); "
                "lower max_tokens"
            )
        largest = max(self.topk_prompt_logprobs, self.topk_logprobs)
        if not 0 <= min(self.topk_prompt_logprobs, self.topk_logprobs) <= largest <= vocab_size:
            return f"{largest} of the likeliest tokens: at least 0, at most {vocab_size}"
        return self._refusal_of_picks(vocab_size)

    def _refusal_of_picks(self, vocab_size: int) -> str | None:
        rows, draws = self.target_tokens, self.prompt_draws
        if not 0 <= draws <= MAX_PICKS:
            return f"{draws} draws at each position of the prompt: from 0 to {MAX_PICKS}"
        if rows is None:
            return None
        if len(rows) != len(self.prompt) - 1 or len({len(row) for row in rows}) > 1:
            return f"target tokens for {len(rows)} positions of a prompt of {len(self.prompt)}: a row for each but the first"
        if rows and len(rows[0]) > MAX_PICKS:
            return f"{len(rows[0])} target tokens for a position of the prompt: at most {MAX_PICKS}"
        invalid = next((token for row in rows for token in row if not -1 <= token < vocab_size), None)
        return None if invalid is None else f"target token {invalid} is not in [0, {vocab_size})"


@dataclass(frozen=True)
class SampledSequence:
    """One response.

    Attributes:
        tokens: token ids, including the stop that ended it.
        logprobs: natural logarithm of each token's probability in the model's distribution (temperature 1, full vocabulary),
            independent of the sampling settings: equal to ``backend.forward`` on the same tokens.
        stop_reason: ``stop`` if one of ``stop`` ended it, ``length`` if ``max_tokens`` did.
        topk_logprobs: likeliest tokens at each position, if requested.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    topk_logprobs: tuple[TopLogprobs, ...] | None = None


@dataclass(frozen=True)
class SampleResult:
    """Answer to a request.

    Attributes:
        samples: the responses; none if the request was refused.
        prompt_logprobs: log-probability of each prompt token, None for the first; if requested.
        topk_prompt_logprobs: likeliest tokens at each prompt position, None for the first; if requested.
        target_logprobs: log-probabilities of ``target_tokens``, 0 for -1; if requested.
        prompt_draws: (token id, log-probability) of the draws at each prompt position but the first; if requested.
        error: why the request was refused, or None.
    """

    samples: tuple[SampledSequence, ...] = ()
    prompt_logprobs: tuple[float | None, ...] | None = None
    topk_prompt_logprobs: tuple[TopLogprobs | None, ...] | None = None
    target_logprobs: tuple[tuple[float, ...], ...] | None = None
    prompt_draws: tuple[TopLogprobs, ...] | None = None
    error: str | None = None
