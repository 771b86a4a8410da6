"""What is asked of the sampler, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Stop = str | int | tuple[int, ...]
"""A text, a token id, or token ids in a row."""

StopReason = Literal["stop", "length", "cancelled"]

TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-probability) of the likeliest tokens of one position, the likeliest first."""


MAX_PICKS = 64
"""Most tokens that are named, or drawn, for one place of a prompt."""


@dataclass(frozen=True)
class SamplingParams:
    """How a response is sampled.

    Attributes:
        max_tokens: longest response in tokens; 0 samples nothing.
        temperature: what logits are divided by before a token is drawn; 0 takes the likeliest token.
        top_p: draw among the likeliest tokens only, as many as it takes to have this probability together; 1: among all.
        top_k: draw among so many of the likeliest tokens only; 0 or less: among all.
        seed: the same seed and prompt give the same responses, alone or beside others; None: a new one each time.
        stop: what ends a response, of which it is then the end: texts, token ids, or token ids in a row.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[Stop, ...] = ()

    @property
    def problem(self) -> str | None:
        """What is wrong with these settings, or None."""
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
    """Responses to one prompt.

    Attributes:
        prompt: token ids.
        adapter: whose responses these are; None: the model's alone.
        num_samples: how many responses.
        prompt_logprobs: also give the log-probability of each of the prompt's tokens.
        topk_prompt_logprobs: also give so many of the likeliest tokens at each place of the prompt, with their log-probabilities.
        topk_logprobs: the same at each place of the responses.
        target_tokens: for each of the prompt's tokens but the first, token ids whose log-probabilities in its place are wanted,
            as many in every row; -1: none.
        prompt_draws: also draw so many tokens in the place of each of the prompt's but the first, at the request's temperature,
            from all tokens, each draw by itself.
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

    def refusal(self, adapters: Collection[str], vocab_size: int, limit: int, setting: str) -> str | None:
        """Why it cannot be answered, or None. Pure.

        Args:
            adapters: that there are.
            limit: most tokens of prompt and response together.
            setting: what sets that limit.
        """
        params, length = self.params, len(self.prompt)
        if params.problem is not None:
            return params.problem
        if not length or self.num_samples < 1:
            return f"{length} prompt tokens, num_samples={self.num_samples}: at least 1 of each"
        if self.adapter is not None and self.adapter not in adapters:
            return f"there is no adapter {self.adapter!r}; there are: {', '.join(sorted(adapters)) or 'none'}"
        outside = next((token for token in self.prompt if not 0 <= token < vocab_size), None)
        if outside is not None:
            return f"prompt token {outside} is not in [0, {vocab_size})"
        if length + params.max_tokens > limit:
            return (
                f"{length} prompt tokens and max_tokens={params.max_tokens} are together more than {limit} ({setting})"
            )
        most = max(self.topk_prompt_logprobs, self.topk_logprobs)
        if not 0 <= min(self.topk_prompt_logprobs, self.topk_logprobs) <= most <= vocab_size:
            return f"{most} of the likeliest tokens: at least 0, at most {vocab_size}"
        return self._refusal_of_picks(vocab_size)

    def _refusal_of_picks(self, vocab_size: int) -> str | None:
        rows, most = self.target_tokens, self.prompt_draws
        if not 0 <= most <= MAX_PICKS:
            return f"{most} draws at each place of the prompt: from 0 to {MAX_PICKS}"
        if rows is None:
            return None
        if len(rows) != len(self.prompt) - 1 or len({len(row) for row in rows}) > 1:
            return (
                f"target tokens for {len(rows)} places of a prompt of {len(self.prompt)}: a row for each but the first"
            )
        if rows and len(rows[0]) > MAX_PICKS:
            return f"{len(rows[0])} target tokens for a place of the prompt: at most {MAX_PICKS}"
        outside = next((token for row in rows for token in row if not -1 <= token < vocab_size), None)
        return None if outside is None else f"target token {outside} is not in [0, {vocab_size})"


@dataclass(frozen=True)
class SampledSequence:
    """One response.

    Attributes:
        tokens: token ids, with what ended it.
        logprobs: natural logarithm of each token's probability in the model's own distribution, that at temperature 1 over the
            whole vocabulary, whatever the token was drawn from: what ``backend.forward`` gives for the same tokens.
        stop_reason: ``stop`` if something of ``stop`` ended it, ``length`` if ``max_tokens`` did.
        topk_logprobs: at each place, if asked for.
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
        prompt_logprobs: of each of the prompt's tokens, None for the first; if asked for.
        topk_prompt_logprobs: at each place of the prompt, None for the first; if asked for.
        target_logprobs: of ``target_tokens``, 0 in the place of -1; if asked for.
        prompt_draws: (token id, log-probability) of the draws for each of the prompt's tokens but the first; if asked for.
        error: why the request was refused, or None.
    """

    samples: tuple[SampledSequence, ...] = ()
    prompt_logprobs: tuple[float | None, ...] | None = None
    topk_prompt_logprobs: tuple[TopLogprobs | None, ...] | None = None
    target_logprobs: tuple[tuple[float, ...], ...] | None = None
    prompt_draws: tuple[TopLogprobs, ...] | None = None
    error: str | None = None
