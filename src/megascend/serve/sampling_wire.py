"""Requests for responses as clients send them, and their answers: JSON, and the client's protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascend.errors import ConfigError, DataError
from megascend.sampling.request import SampledSequence, SampleRequest, SampleResult, SamplingParams, Stop, TopLogprobs
from megascend.serve.errors import RequestRefusedError
from megascend.serve.requests import flag, integer
from megascend.serve.wire import messages_of_client, tokens_of_json

MAX_SAMPLES = 1024
MAX_STOPS = 64
_ELSEWHERE = ("target_prompt_logprobs", "prompt_alt_tokens_k")


def sample_request_of(body: Mapping[str, Any], adapter: str | None, max_length: int) -> SampleRequest:
    """What a client wants sampled.

    Args:
        adapter: whose responses; None: the base model's.
        max_length: of prompt and response together, where the client sets no limit.

    Raises:
        RequestRefusedError, ConfigError, DataError: a value cannot be, or asks for what is not here.
    """
    asked = next((name for name in _ELSEWHERE if body.get(name)), None)
    if asked is not None:
        raise ConfigError(f"{asked} is not supported by this server")
    try:
        prompt = tokens_of_json(body["prompt"]).tolist()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"the prompt cannot be read: {type(error).__name__}") from None
    params = body.get("sampling_params")
    if not isinstance(params, Mapping):
        raise RequestRefusedError("sampling_params must be an object", 422)
    count = integer(body, "num_samples", 1)
    if not 1 <= count <= MAX_SAMPLES:
        raise ConfigError(f"num_samples={count}: from 1 to {MAX_SAMPLES}")
    return SampleRequest(
        prompt,
        SamplingParams(
            integer(params, "max_tokens", max(max_length - len(prompt), 0)),
            _number(params, "temperature", 1.0),
            _number(params, "top_p", 1.0),
            int(_number(params, "top_k", -1)),
            None if params.get("seed") is None else int(_number(params, "seed", 0)) % 2**62,
            _stops(params.get("stop")),
        ),
        adapter,
        count,
        prompt_logprobs=flag(body, "prompt_logprobs", False),
        topk_prompt_logprobs=integer(body, "topk_prompt_logprobs", 0),
        topk_logprobs=integer(body, "topk_sample_logprobs", 0),
    )


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        raise ConfigError(f"sampling_params: {name} must be a number, got {str(value)[:40]!r}")
    return value


def _stops(value: Any) -> tuple[Stop, ...]:
    found = [value] if isinstance(value, str) else value if value is not None else []
    kinds = all(isinstance(each, str) or (isinstance(each, int) and not isinstance(each, bool)) for each in found)
    if not isinstance(found, list) or not kinds or len(found) > MAX_STOPS:
        raise ConfigError(f"sampling_params: stop must be a text, or up to {MAX_STOPS} texts or token ids")
    return tuple(found)


@dataclass(frozen=True)
class SampleAnswer:
    """Responses to one prompt.

    Attributes:
        last_n: of the prompt's log-probabilities, leave out those of earlier tokens; None: of none.
    """

    result: SampleResult
    last_n: int | None = None

    def _prompt(self) -> list[float | None] | None:
        found = self.result.prompt_logprobs
        if found is None:
            return None
        first = 0 if self.last_n is None else max(len(found) - self.last_n, 0)
        return [value if place >= first else None for place, value in enumerate(found)]

    def json(self) -> dict[str, Any]:
        """As older clients read it."""
        return {
            "type": "sample",
            "sequences": [
                {"stop_reason": _reason(each), "tokens": list(each.tokens), "logprobs": list(each.logprobs)}
                for each in self.result.samples
            ],
            "prompt_logprobs": self._prompt(),
            "topk_prompt_logprobs": self.result.topk_prompt_logprobs,
        }

    def protobuf(self) -> bytes:
        """As newer clients read it."""
        messages = messages_of_client()
        answer = messages.SampleResponse()
        for each in self.result.samples:
            sequence = answer.sequences.add(
                stop_reason=messages.STOP_REASON_STOP if _reason(each) == "stop" else messages.STOP_REASON_LENGTH,
                tokens=np.asarray(each.tokens, np.int32).tobytes(),
                logprobs=np.asarray(each.logprobs, np.float32).tobytes(),
            )
            if each.topk_logprobs is not None and "topk_sampled_logprobs" in sequence.DESCRIPTOR.fields_by_name:
                _fill(sequence.topk_sampled_logprobs, each.topk_logprobs)
        prompt = self._prompt()
        if prompt is not None:
            values = [np.nan if value is None else value for value in prompt]
            answer.prompt_logprobs = np.asarray(values, np.float32).tobytes()
        if self.result.topk_prompt_logprobs is not None:
            _fill(answer.topk_prompt_logprobs, self.result.topk_prompt_logprobs)
        return answer.SerializeToString()


def _reason(sequence: SampledSequence) -> str:
    return "stop" if sequence.stop_reason == "stop" else "length"


def _fill(message: Any, top: Sequence[TopLogprobs | None]) -> None:
    """The likeliest tokens of every place; none: token 0 with no number."""
    width = max((len(each) for each in top if each is not None), default=0)
    ids, values = np.zeros((len(top), width), np.int32), np.full((len(top), width), np.nan, np.float32)
    for place, each in enumerate(top):
        for column, (token, logprob) in enumerate(each or ()):
            ids[place, column], values[place, column] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), values.tobytes()
    message.k, message.length = width, len(top)
