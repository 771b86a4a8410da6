"""Sample token ids from vLLM with log-probabilities and weight versions; compute log-probabilities of given tokens."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weightwire.engine import Completion, RoutedExperts, Sampling, TopLogprobs
from weightwire.errors import UnsupportedCallError, WireError
from weightwire.vllm import contract

TIES = 32
"""Tokens beyond top_k that are requested: vLLM allows all that are as likely as the last one."""
MASS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class LoadedAdapter:
    """One version of an adapter. Each has its own number and name in vLLM, so that no cache mixes versions."""

    name: str
    version: int
    number: int
    path: str

    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"{self.name}@{self.version}", self.number, self.path)


async def generate(
    engine: Any,
    prompt: Sequence[int],
    sampling: Sampling,
    n: int,
    adapter: LoadedAdapter | None,
    version: Callable[[], int],
) -> list[Completion]:
    """Sample responses.

    Args:
        engine: vLLM's engine client.
        version: returns the active version of the model.

    Raises:
        UnsupportedCallError: routed experts are requested, and vLLM does not return or does not record them.
        WireError: vLLM refuses the request.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    if sampling.routed_experts and not contract.returns_routed_experts(engine.vllm_config):
        raise UnsupportedCallError(
            "generate: this vLLM does not return routed experts: start it with --enable-return-routed-experts"
        )
    if sampling.truncates:
        mode = str(getattr(engine.vllm_config.model_config, "logprobs_mode", ""))
        if "processed_logprobs" not in mode:
            raise UnsupportedCallError(
                f"generate: top_p and top_k need --logprobs-mode processed_logprobs, which says what was allowed; it is {mode}"
            )
        if not sampling.top_k:
            raise UnsupportedCallError("generate: top_p needs top_k, which bounds the allowed tokens that are returned")
    params = SamplingParams(
        n=n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        logprobs=sampling.top_k + TIES if sampling.truncates else 0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    before = version() if adapter is None else adapter.version
    final = await _last(engine, prompt, params, adapter)
    # An update may have become active meanwhile.
    after = version() if adapter is None else adapter.version
    experts: list[RoutedExperts | None] = [None] * len(final.outputs)
    if sampling.routed_experts:
        experts = [_routed_experts(output, len(prompt)) for output in final.outputs]
    return [
        _completion(output, before, after, adapter, routed, sampling)
        for output, routed in zip(final.outputs, experts, strict=True)
    ]


async def logprobs(engine: Any, tokens: Sequence[int], adapter: LoadedAdapter | None) -> list[float]:
    """Return log p(token | preceding tokens) of all tokens but the first, at temperature 1."""
    rows = await _prompt_logprobs(engine, tokens, 0, adapter)
    return [row[token].logprob for token, row in zip(tokens[1:], rows, strict=True)]


async def top_logprobs(engine: Any, tokens: Sequence[int], count: int, adapter: LoadedAdapter | None) -> TopLogprobs:
    """Return log-probabilities of all tokens but the first, and the ``count`` likeliest tokens in the place of each."""
    rows = await _prompt_logprobs(engine, tokens, count, adapter)
    # vLLM adds the sequence's own token to a row, whatever its rank.
    top = [sorted(row.items(), key=lambda entry: entry[1].rank)[:count] for row in rows]
    return TopLogprobs(
        tuple(row[token].logprob for token, row in zip(tokens[1:], rows, strict=True)),
        tuple(tuple(token for token, _ in entries) for entries in top),
        tuple(tuple(entry.logprob for _, entry in entries) for entries in top),
    )


async def _prompt_logprobs(
    engine: Any, tokens: Sequence[int], count: int, adapter: LoadedAdapter | None
) -> list[dict[int, Any]]:
    """Return vLLM's rows of log-probabilities by token, for all tokens but the first."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=1, prompt_logprobs=count, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    final = await _last(engine, tokens, params, adapter)
    # The first token has no preceding ones, and vLLM reports None for it.
    return list(final.prompt_logprobs)[1:]


async def _last(engine: Any, prompt: Sequence[int], params: Any, adapter: LoadedAdapter | None) -> Any:
    """Return the finished output. If the caller is cancelled, so is the request."""
    # Unique: vLLM refuses an id that is in use.
    final, request = None, f"weightwire-{uuid.uuid4().hex}"
    lora = None if adapter is None else adapter.request()
    try:
        async for output in engine.generate({"prompt_token_ids": list(prompt)}, params, request, lora_request=lora):
            final = output
    except ValueError as error:  # vLLM refuses the request: too long, a token outside the vocabulary
        raise WireError(f"generate: {error}") from error
    if final is None or not final.finished:
        raise WireError("the engine ended a request without an output")
    return final


def _routed_experts(output: Any, prompt_length: int) -> RoutedExperts:
    """Encode the experts of a response and its prompt, which the engine must have for each token but the last."""
    indices = contract.routed_experts(output)
    expected = prompt_length + len(output.token_ids) - 1
    if indices is None or len(indices) != expected:
        rows = "none" if indices is None else len(indices)
        raise WireError(
            f"generate: vLLM returned routed experts of {rows} tokens; a prompt of {prompt_length} and a response of "
            f"{len(output.token_ids)} tokens have {expected}"
        )
    # A model has more than one layer and expert: only where nothing was recorded is everything 0.
    if not indices.any():
        raise UnsupportedCallError(
            "generate: vLLM returned 0 for all routed experts: its kernel routes tokens without reporting it; start vLLM with "
            "another --moe-backend"
        )
    return RoutedExperts.of(indices)


def _completion(
    output: Any,
    before: int,
    after: int,
    adapter: LoadedAdapter | None,
    experts: RoutedExperts | None,
    sampling: Sampling,
) -> Completion:
    first, last = (before, after) if adapter is not None else contract.first_and_last_version(output, before, after)
    tokens = tuple(output.token_ids)
    logprobs = tuple(row[token].logprob for token, row in zip(tokens, output.logprobs, strict=True))
    allowed = tuple(map(_allowed, output.logprobs)) if sampling.truncates else None
    return Completion(tokens, logprobs, output.finish_reason, first, last, experts, allowed)


def _allowed(row: dict[int, Any]) -> tuple[int, ...]:
    """Return the tokens that could be drawn: vLLM gives all others the log-probability minus infinity."""
    possible = {token: entry.logprob for token, entry in row.items() if entry.logprob > -math.inf}
    mass = math.fsum(map(math.exp, possible.values()))
    if abs(mass - 1) > MASS_TOLERANCE:
        raise WireError(
            f"generate: the {len(possible)} tokens that vLLM reports as allowed have the probability {mass:.4f} together, not 1"
        )
    return tuple(sorted(possible))
