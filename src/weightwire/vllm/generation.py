"""Responses of token ids with log-probabilities and versions of the weights, and log-probabilities of given tokens."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightwire.errors import WireError
from weightwire.vllm import contract

MOST_RESPONSES = 1024
MOST_STOP_TOKENS = 64


@dataclass(frozen=True)
class Adapter:
    """An adapter as the engine knows it: each version has a number and a name of its own, so that no cache mixes them."""

    name: str
    version: int
    number: int
    path: str

    def request(self) -> Any:
        """vLLM's."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"{self.name}@{self.version}", self.number, self.path)


async def generate(
    engine: Any, wanted: Mapping[str, Any], adapter: Adapter | None, version: Callable[[], int]
) -> list[dict[str, Any]]:
    """Sample responses.

    Args:
        wanted: ``prompt`` (token ids), ``max_tokens``; ``n``, ``temperature``, ``stop_token_ids``, ``seed``.
        version: of the weights in force.

    Raises:
        WireError: a field is missing, unknown, or out of bounds.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    fields = dict(wanted)
    prompt = _tokens(fields.pop("prompt", None), "prompt")
    params = SamplingParams(
        n=_number(fields.pop("n", 1), "n", 1, MOST_RESPONSES),
        max_tokens=_number(fields.pop("max_tokens", None), "max_tokens", 1, 2**24),
        temperature=_temperature(fields.pop("temperature", 1.0)),
        stop_token_ids=_tokens(fields.pop("stop_token_ids", []), "stop_token_ids", MOST_STOP_TOKENS),
        seed=fields.pop("seed", None),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    if fields:
        raise WireError(f"generate: unknown fields {', '.join(sorted(fields))[:200]}")
    before = version() if adapter is None else adapter.version
    final = await _last(engine, prompt, params, adapter)
    after = version() if adapter is None else adapter.version
    return [_completion(output, before, after, adapter) for output in final.outputs]


async def logprobs(engine: Any, tokens: Any, adapter: Adapter | None) -> list[float]:
    """log p(token | those before it) of all tokens but the first, at temperature 1."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    prompt = _tokens(tokens, "tokens")
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    final = await _last(engine, prompt, params, adapter)
    rows = list(final.prompt_logprobs)[1:]
    return [row[token].logprob for token, row in zip(prompt[1:], rows, strict=True)]


async def _last(engine: Any, prompt: Sequence[int], params: Any, adapter: Adapter | None) -> Any:
    """The finished output. If the caller is cancelled, so is the request."""
    final, request = None, f"weightwire-{uuid.uuid4().hex}"
    lora = None if adapter is None else adapter.request()
    try:
        async for output in engine.generate({"prompt_token_ids": list(prompt)}, params, request, lora_request=lora):
            final = output
    except ValueError as error:  # what vLLM refuses: too long, a token outside the vocabulary
        raise WireError(f"generate: {error}") from error
    if final is None or not final.finished:
        raise WireError("the engine ended a request without an answer")
    return final


def _completion(output: Any, before: int, after: int, adapter: Adapter | None) -> dict[str, Any]:
    first, last = (before, after) if adapter is not None else contract.first_and_last_version(output, before, after)
    tokens = list(output.token_ids)
    return {
        "tokens": tokens,
        "logprobs": [row[token].logprob for token, row in zip(tokens, output.logprobs, strict=True)],
        "finish_reason": output.finish_reason,
        "first_version": first,
        "last_version": last,
    }


def _tokens(value: Any, name: str, most: int = 2**22) -> list[int]:
    if (
        not isinstance(value, list)
        or len(value) > most
        or not all(type(token) is int and 0 <= token < 2**31 for token in value)
    ):
        raise WireError(f"generate: {name} is not a list of at most {most} token ids")
    if name != "stop_token_ids" and not value:
        raise WireError(f"generate: {name} has no token")
    return value


def _number(value: Any, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise WireError(f"generate: {name} is {value!r:.40}, not a whole number from {least} to {most}")
    return value


def _temperature(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 100:
        raise WireError(f"generate: temperature is {value!r:.40}, not a number from 0 to 100")
    return float(value)
