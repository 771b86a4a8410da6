"""The responses to one prompt, with their rewards and the versions of the weights that made them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megascend.errors import DataError


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
        tokens: token ids, the closing one included if there is one.
        logprobs: the engine's own log-probability of each token, under the distribution that it was sampled from.
        reward: what the reward function gave.
        finish_reason: ``stop`` if the response is complete, ``length`` if it was cut off.
        first_version, last_version: weights that its first and its last token were sampled with.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    finish_reason: str
    first_version: int
    last_version: int

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.logprobs):
            raise DataError(
                f"a response must have one log-probability a token and at least one token, got {len(self.tokens)} tokens and "
                f"{len(self.logprobs)} log-probabilities"
            )


@dataclass(frozen=True)
class Group:
    """All responses to one prompt.

    Attributes:
        number: the prompt's place in the order of prompts, from 0.
        prompt_tokens: what the engine was given.
        responses: at least one.
    """

    number: int
    prompt_tokens: tuple[int, ...]
    responses: tuple[Response, ...]

    @property
    def version(self) -> int:
        """The oldest weights that any of its tokens was sampled with."""
        return min(response.first_version for response in self.responses)

    @property
    def rewards(self) -> list[float]:
        """Of the responses, in their order."""
        return [response.reward for response in self.responses]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; floats keep all their digits."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Group:
        """A group from :meth:`to_json`."""
        responses = tuple(
            Response(**{**one, "tokens": tuple(one["tokens"]), "logprobs": tuple(one["logprobs"])})
            for one in values["responses"]
        )
        return cls(values["number"], tuple(values["prompt_tokens"]), responses)
