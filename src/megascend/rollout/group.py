"""The responses to one prompt, with their rewards and weight versions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megascend.errors import DataError
from weightwire.engine import RoutedExperts, response_fields


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
        tokens: token ids, with the stop token if there is one.
        logprobs: the engine's log-probability of each token, under the distribution from which it was sampled.
        reward: result of the reward function.
        finish_reason: ``stop`` if the response is complete, ``length`` if it was cut off.
        first_version, last_version: versions of the weights that sampled the first and the last token.
        routed_experts: experts of the tokens of the prompt and of the response except for the last one; None: not requested.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    finish_reason: str
    first_version: int
    last_version: int
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        # An engine that returns no log-probabilities would make importance weights wrong without an error.
        if not self.tokens or len(self.tokens) != len(self.logprobs):
            raise DataError(
                f"a response must have one log-probability a token and at least one token, got {len(self.tokens)} tokens and "
                f"{len(self.logprobs)} log-probabilities"
            )


@dataclass(frozen=True)
class ResponseGroup:
    """All responses to one prompt.

    Attributes:
        number: index of the prompt in the order of prompts.
        prompt_tokens: token ids of the prompt.
        responses: sampled responses, at least one.
    """

    number: int
    prompt_tokens: tuple[int, ...]
    responses: tuple[Response, ...]

    @property
    def version(self) -> int:
        """Return the oldest version that sampled any of its tokens."""
        # The oldest: staleness is bounded for every token of the group.
        return min(response.first_version for response in self.responses)

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the responses, in order."""
        return [response.reward for response in self.responses]

    def to_json(self) -> dict[str, Any]:
        """Return plain data; floats are exact in JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ResponseGroup:
        """Rebuild a group from :meth:`to_json`."""
        responses = tuple(Response(**response_fields(fields)) for fields in values["responses"])
        return cls(values["number"], tuple(values["prompt_tokens"]), responses)
