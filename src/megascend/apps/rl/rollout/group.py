"""The trajectories of one prompt, with their rewards and weight versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from operator import index
from typing import Any

from megascend.errors import DataError
from weightwire.engine import RoutedExperts, response_fields


@dataclass(frozen=True)
class Trajectory:
    """Tokens of one rollout: a response to a prompt, or several with what an environment wrote between them.

    Attributes:
        prompt_tokens: token ids before the first sampled one.
        tokens: token ids after the prompt, as sampled, with stop tokens.
        logprobs: the engine's log-probability of each sampled token, under the distribution from which it was sampled; 0 for
            tokens that were not sampled.
        sampled: for each token, True if the model sampled it; the trainer learns from these only. None: all of them.
        rewards: parts of the reward by name, as the environment reports them.
        finish_reason: ``stop`` if the last response is complete, ``length`` if it was cut off.
        first_version, last_version: versions of the weights that sampled the first and the last token.
        routed_experts: experts of all tokens except for the last one; None: not requested.
        temperature: at which the tokens were sampled.
        allowed: ids from which each of ``tokens`` was drawn, none for tokens that were not sampled or drawn from all; None: no
            ``top_p`` or ``top_k`` excluded any.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    finish_reason: str
    first_version: int
    last_version: int
    sampled: tuple[bool, ...] | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    turns: int = 1
    engine: str = ""
    routed_experts: RoutedExperts | None = None
    temperature: float = 1.0
    allowed: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        # Numbers of NumPy and torch, as an environment may have, would end the run at its first save, which is JSON.
        kinds = {"prompt_tokens": index, "tokens": index, "logprobs": float, "sampled": bool}
        for name, kind in kinds.items():
            if (values := getattr(self, name)) is not None:
                try:
                    object.__setattr__(self, name, tuple(map(kind, values)))
                except (TypeError, ValueError) as error:
                    raise DataError(f"{name} of a trajectory: {error}") from None
        if not all(map(isfinite, self.logprobs)):
            raise DataError("the log-probabilities of a trajectory must be finite")
        # An engine that returns no log-probabilities would make importance weights wrong without an error.
        if not self.tokens or len(self.tokens) != len(self.logprobs):
            raise DataError(
                f"a response must have one log-probability a token and at least one token, got {len(self.tokens)} tokens and "
                f"{len(self.logprobs)} log-probabilities"
            )
        if not self.prompt_tokens:
            raise DataError("a trajectory must begin with a prompt of at least one token")
        if self.allowed is not None and len(self.allowed) != len(self.tokens):
            raise DataError(f"{len(self.tokens)} tokens were drawn from {len(self.allowed)} sets of allowed ones")
        if self.sampled is not None and (len(self.sampled) != len(self.tokens) or not any(self.sampled)):
            raise DataError(
                f"a trajectory must say of each token whether it was sampled, and one must be; got {len(self.tokens)} tokens and "
                f"{len(self.sampled)} marks, {sum(self.sampled)} of them true"
            )

    @property
    def mask(self) -> tuple[bool, ...]:
        """Return whether the model sampled each token."""
        return (True,) * len(self.tokens) if self.sampled is None else self.sampled

    @property
    def sampled_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True)
class TrajectoryGroup:
    """All trajectories of one prompt.

    Attributes:
        number: index of the prompt in the order of prompts.
        trajectories: at least one, except for an evaluation whose episodes failed.
        failed: episodes of the prompt without a trajectory.
    """

    number: int
    trajectories: tuple[Trajectory, ...]
    failed: int = 0

    @property
    def version(self) -> int:
        """Return the oldest version that sampled any of its tokens."""
        # The oldest: staleness is bounded for every token of the group.
        return min(trajectory.first_version for trajectory in self.trajectories)

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    def to_json(self) -> dict[str, Any]:
        """Return plain data; floats are exact in JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrajectoryGroup:
        return cls(values["number"], tuple(map(_trajectory, values["trajectories"])), values.get("failed", 0))


def _trajectory(values: Mapping[str, Any]) -> Trajectory:
    fields = response_fields(values)
    sampled = fields["sampled"]
    fields |= {
        "prompt_tokens": tuple(fields["prompt_tokens"]),
        "sampled": None if sampled is None else tuple(sampled),
    }
    return Trajectory(**fields)
