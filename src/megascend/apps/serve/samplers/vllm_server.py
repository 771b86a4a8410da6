"""Client of a vLLM server's OpenAI-compatible API, by token ids.

Written for vLLM 0.32 (docs.vllm.ai: "OpenAI-Compatible Server", "LoRA Adapters"). The server must report log-probabilities of the
unmodified distribution (``--logprobs-mode raw_logprobs``, vLLM's default).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megascend.apps.rl.rollout.http_client import EngineServer, UnreadableAnswerError
from megascend.apps.sampling.request import SampledSequence, SampleRequest, SampleResult, TopLogprobs
from megascend.errors import EngineError

CONTROL_S = 60.0
LOAD_S = 300.0
HEALTH_S = 10.0
MAX_SHOWN = 500
"""Maximum characters of an answer quoted in an error."""


class RefusedError(EngineError):
    """The server refused the request (status 400 or 422)."""


class UnknownModelError(EngineError):
    """The server has no model or adapter of that name, for example after a restart."""


class ServerFailedError(EngineError):
    """The server failed: a status that is not the request's fault, or an unreadable answer."""


class VllmServer:
    """One vLLM server, possibly shared with other clients. Every call has a deadline; connections are not reused.

    Args:
        address: ``http://HOST:PORT``.
        key: its ``--api-key``, if any.
        answer_s: deadline of a sampling request in seconds, including the wait in the server's queue.
    """

    def __init__(self, address: str, key: str | None = None, answer_s: float = 1800.0) -> None:
        self._server = EngineServer("vLLM", address)
        self.name = self._server.name
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._answer_s = answer_s

    async def models(self) -> list[dict[str, Any]]:
        """List models and adapters: ``id``, ``root``, ``parent``, ``max_model_len``."""
        models = (await self._ask("GET", "/v1/models", None, CONTROL_S)).get("data")
        if not isinstance(models, list) or not all(isinstance(model, dict) and "id" in model for model in models):
            raise EngineError(f"{self.name}: /v1/models: not a list of models: {str(models)[:MAX_SHOWN]}")
        return models

    async def check_health(self) -> None:
        """Raise an error unless the server reports a healthy engine within ``HEALTH_S``."""
        await self._ask("GET", "/health", None, HEALTH_S)

    async def load_adapter(self, name: str, directory: str) -> None:
        """Have the server load an adapter from ``directory``; an adapter already loaded under that name is kept."""
        try:
            await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": directory}, LOAD_S)
        except (RefusedError, UnknownModelError, ServerFailedError) as error:
            # Loaded before a connection broke: the prefix of the name is this process's, so it is this adapter.
            if "already been loaded" not in str(error):
                kind = EngineError if isinstance(error, UnknownModelError) else type(error)
                raise kind(
                    f"{error}. It needs --enable-lora, --max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and storage "
                    "at the same path as megascend serve"
                ) from error

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; a missing one is ignored."""
        try:
            await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, CONTROL_S)
        except UnknownModelError:
            return

    async def sample(self, request: SampleRequest, model: str, ends: Sequence[int] = ()) -> SampleResult:
        """Sample responses to a request.

        Args:
            model: name of the model or adapter.
            ends: tokens that end every response.

        Raises:
            UnknownModelError: unknown model.
            RefusedError: the server refused the request.
            ServerFailedError: any other status than 200, or an unreadable answer.
        """
        answer = await self._ask("POST", "/v1/completions", body_of(request, model, ends), self._answer_s)
        try:
            return await asyncio.to_thread(result_of, request, answer)  # takes time for every token
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerFailedError(
                f"{self.name}: the answer cannot be read ({error!r}): {str(answer)[:MAX_SHOWN]}"
            ) from error

    async def _ask(self, method: str, target: str, fields: Any, timeout_s: float) -> dict[str, Any]:
        body = b"" if fields is None else json.dumps(fields).encode()
        try:
            answer = await self._server.ask(target, body, self._headers, timeout_s, method=method)
        except UnreadableAnswerError as error:
            raise ServerFailedError(str(error)) from error
        if answer.status != 200:
            # 400 and 422 are the request's fault and would fail on every server; others are worth another server.
            kind = {400: RefusedError, 404: UnknownModelError, 422: RefusedError}.get(answer.status, ServerFailedError)
            message = message_of(answer.body.decode("utf-8", "replace"))
            raise kind(f"{self.name}: {target}: status {answer.status}: {message[:MAX_SHOWN]}")
        content = await asyncio.to_thread(answer.json)
        return content if isinstance(content, dict) else {"text": content}


def message_of(text: str) -> str:
    """Return the message in an error body, in vLLM's format or any other. Pure."""
    try:
        content = json.loads(text)
        inner = content.get("error", content)
        return str(inner.get("message", text) if isinstance(inner, Mapping) else inner)
    except (ValueError, AttributeError):
        return text


def body_of(request: SampleRequest, model: str, ends: Sequence[int] = ()) -> dict[str, Any]:
    """Build the body of ``/v1/completions``. Pure.

    Every setting is sent, because the server would take omitted ones from the model's generation_config.json.
    """
    params = request.params
    stops = [stop for stop in params.stop if isinstance(stop, str)]
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt),
        "n": request.num_samples,
        "max_tokens": max(params.max_tokens, 1),  # vLLM refuses 0; result_of drops the token
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": stops,
        # The tokens of a stop were sampled as well: an answer without them would not be what training computes.
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted({*ends, *(stop for stop in params.stop if isinstance(stop, int))}),
        "skip_special_tokens": False,
        "logprobs": request.topk_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # in top_logprobs, whose keys would be texts: several tokens may have the same
    }
    if params.seed is not None:
        # vLLM counts up from it for the responses of a request: those of the next seed must not be the same.
        body["seed"] = params.seed * 1_327_213_345 % 2**31  # as for the prompts of megascend.apps.rl.rollout.collector
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        body["prompt_logprobs"] = request.topk_prompt_logprobs
    return body


def result_of(request: SampleRequest, answer: Mapping[str, Any]) -> SampleResult:
    """Parse the server's answer. Pure."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != request.num_samples:
        raise ValueError(f"{len(choices)} responses instead of {request.num_samples}")
    samples = tuple(_sequence(request, choice) for choice in choices)
    prompt, top = None, None
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        entries = choices[0]["prompt_logprobs"]
        # A list of another length would assign values to the wrong tokens.
        if len(entries) != len(request.prompt):
            raise ValueError(f"log-probabilities of {len(entries)} prompt tokens, not {len(request.prompt)}")
        if request.prompt_logprobs:
            pairs = zip(entries, request.prompt, strict=True)
            prompt = tuple(None if entry is None else float(entry[str(token)]["logprob"]) for entry, token in pairs)
        if count := request.topk_prompt_logprobs:
            by_token = [
                None if entry is None else {int(token): float(v["logprob"]) for token, v in entry.items()}
                for entry in entries
            ]
            top = tuple(None if values is None else _likeliest(values, count) for values in by_token)
    return SampleResult(samples, prompt, top)


def _sequence(request: SampleRequest, choice: Mapping[str, Any]) -> SampledSequence:
    details = choice["logprobs"]
    tokens, logprobs = tuple(map(int, choice["token_ids"])), tuple(map(float, details["token_logprobs"]))
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probabilities")
    if request.params.max_tokens == 0:
        tokens, logprobs = (), ()
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r}")
    top = None
    if count := request.topk_logprobs:
        entries = details["top_logprobs"][: len(tokens)]
        top = tuple(_likeliest({_token(text): float(v) for text, v in entry.items()}, count) for entry in entries)
    return SampledSequence(tokens, logprobs, "length" if request.params.max_tokens == 0 else reason, top)


def _likeliest(values: Mapping[int, float], count: int) -> TopLogprobs:
    """Return the ``count`` likeliest tokens; vLLM adds the actual token if it is not among them."""
    # Ties by token id: the order of the answer's entries is the server's choice.
    return tuple(sorted(values.items(), key=lambda pair: (-pair[1], pair[0]))[:count])


def _token(text: str) -> int:
    """Parse ``token_id:123``."""
    name, _, number = text.partition(":")
    if name != "token_id":
        raise ValueError(f"{text!r} is not a token id")
    return int(number)
