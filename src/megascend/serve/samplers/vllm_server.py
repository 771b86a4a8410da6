"""A running vLLM server as what answers requests to sample: vLLM's OpenAI-compatible API, by token ids.

Written for vLLM 0.32 (docs.vllm.ai: "OpenAI-Compatible Server", "LoRA Adapters"). The server must report log-probabilities of the
model's own distribution (``--logprobs-mode raw_logprobs``, vLLM's default).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megascend.errors import EngineError
from megascend.rollout.http_client import EngineServer, UnreadableAnswerError
from megascend.sampling.request import SampledSequence, SampleRequest, SampleResult, TopLogprobs

CONTROL_S = 60.0
LOAD_S = 300.0
HEALTH_S = 10.0
SHOWN = 500
"""Characters of an answer that an error shows."""


class RefusedError(EngineError):
    """The server takes no such request (status 400 or 422)."""


class UnknownModelError(EngineError):
    """The server has no model or adapter of that name: it was started again, for example."""


class ServerFailedError(EngineError):
    """The server did not do what it should: a status that says nothing of the request, or an answer that cannot be read."""


class VllmServer:
    """One vLLM server, which others may use as well. Every call has a deadline; connections are not kept.

    Args:
        address: ``http://HOST:PORT``.
        key: its ``--api-key``, if it has one.
        answer_s: deadline of a request for responses, in seconds, its waiting in the server's queue included.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str, key: str | None = None, answer_s: float = 1800.0) -> None:
        self._server = EngineServer("vLLM", address)
        self.name = self._server.name
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._answer_s = answer_s

    async def models(self) -> list[dict[str, Any]]:
        """Its models, adapters among them: ``id``, ``root``, ``parent``, ``max_model_len``.

        Raises:
            EngineError, EngineLostError, EngineTimeoutError: as all methods.
        """
        found = (await self._ask("GET", "/v1/models", None, CONTROL_S)).get("data")
        if not isinstance(found, list) or not all(isinstance(each, dict) and "id" in each for each in found):
            raise EngineError(f"{self.name}: /v1/models: not a list of models: {str(found)[:SHOWN]}")
        return found

    async def check_health(self) -> None:
        """Raises an error unless it says within ``HEALTH_S`` that its engine is at work."""
        await self._ask("GET", "/health", None, HEALTH_S)

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load the adapter that ``directory`` holds, which the server reads itself; one of that name is left as it is."""
        try:
            await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": directory}, LOAD_S)
        except (RefusedError, UnknownModelError, ServerFailedError) as error:
            if "already been loaded" not in str(error):
                kind = EngineError if isinstance(error, UnknownModelError) else type(error)
                raise kind(
                    f"{error}. It needs --enable-lora, --max-lora-rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and storage "
                    "at the same path as megascend serve"
                ) from error

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; nothing happens if there is none."""
        try:
            await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, CONTROL_S)
        except UnknownModelError:
            return

    async def sample(self, request: SampleRequest, model: str, ends: Sequence[int] = ()) -> SampleResult:
        """Answer a request.

        Args:
            model: name of the model or adapter.
            ends: tokens that end every response.

        Raises:
            UnknownModelError: there is no such model.
            RefusedError: it cannot be answered.
            ServerFailedError: any other status but 200, or an answer that cannot be read.
        """
        answer = await self._ask("POST", "/v1/completions", body_of(request, model, ends), self._answer_s)
        try:
            return result_of(request, answer)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerFailedError(
                f"{self.name}: the answer cannot be read ({error!r}): {str(answer)[:SHOWN]}"
            ) from error

    async def _ask(self, method: str, target: str, fields: Any, timeout_s: float) -> dict[str, Any]:
        body = b"" if fields is None else json.dumps(fields).encode()
        try:
            answer = await self._server.ask(target, body, self._headers, timeout_s, method=method)
        except UnreadableAnswerError as error:
            raise ServerFailedError(str(error)) from error
        if answer.status != 200:
            kind = {400: RefusedError, 404: UnknownModelError, 422: RefusedError}.get(answer.status, ServerFailedError)
            message = message_of(answer.body.decode("utf-8", "replace"))
            raise kind(f"{self.name}: {target}: status {answer.status}: {message[:SHOWN]}")
        content = answer.json()
        return content if isinstance(content, dict) else {"text": content}


def message_of(text: str) -> str:
    """What an error's body says, in vLLM's form or another. Pure."""
    try:
        found = json.loads(text)
        inner = found.get("error", found)
        return str(inner.get("message", text) if isinstance(inner, Mapping) else inner)
    except (ValueError, AttributeError):
        return text


def body_of(request: SampleRequest, model: str, ends: Sequence[int] = ()) -> dict[str, Any]:
    """The body of ``/v1/completions``. Pure.

    Every setting is sent: the server takes others from the model's generation_config.json.
    """
    params = request.params
    stops = [each for each in params.stop if isinstance(each, str)]
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt),
        "n": request.num_samples,
        "max_tokens": max(params.max_tokens, 1),  # it refuses 0
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": stops,
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted({*ends, *(each for each in params.stop if isinstance(each, int))}),
        "skip_special_tokens": False,
        "logprobs": request.topk_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if params.seed is not None:
        body["seed"] = params.seed
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        body["prompt_logprobs"] = request.topk_prompt_logprobs
    return body


def result_of(request: SampleRequest, answer: Mapping[str, Any]) -> SampleResult:
    """What the server's answer says. Pure.

    Raises:
        KeyError, TypeError, ValueError, IndexError: it is not an answer to this request.
    """
    choices = sorted(answer["choices"], key=lambda each: each["index"])
    if len(choices) != request.num_samples:
        raise ValueError(f"{len(choices)} responses, {request.num_samples} were asked for")
    samples = tuple(_sequence(request, choice) for choice in choices)
    prompt, top = None, None
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        places = choices[0]["prompt_logprobs"]
        if len(places) != len(request.prompt):
            raise ValueError(f"log-probabilities of {len(places)} prompt tokens, not {len(request.prompt)}")
        if request.prompt_logprobs:
            pairs = zip(places, request.prompt, strict=True)
            prompt = tuple(None if place is None else float(place[str(token)]["logprob"]) for place, token in pairs)
        if count := request.topk_prompt_logprobs:
            top = tuple(None if place is None else _likeliest(_of_prompt(place), count) for place in places)
    return SampleResult(samples, prompt, top)


def _sequence(request: SampleRequest, choice: Mapping[str, Any]) -> SampledSequence:
    found = choice["logprobs"]
    tokens, logprobs = tuple(map(int, choice["token_ids"])), tuple(map(float, found["token_logprobs"]))
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probabilities")
    if request.params.max_tokens == 0:
        tokens, logprobs = (), ()
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r}")
    top = None
    if count := request.topk_logprobs:
        places = found["top_logprobs"][: len(tokens)]
        top = tuple(_likeliest({_token(text): float(v) for text, v in place.items()}, count) for place in places)
    return SampledSequence(tokens, logprobs, "length" if request.params.max_tokens == 0 else reason, top)


def _of_prompt(place: Mapping[str, Any]) -> dict[int, float]:
    return {int(token): float(found["logprob"]) for token, found in place.items()}


def _likeliest(values: Mapping[int, float], count: int) -> TopLogprobs:
    """The server adds the token itself, where it is not among the likeliest."""
    return tuple(sorted(values.items(), key=lambda each: (-each[1], each[0]))[:count])


def _token(text: str) -> int:
    """Of ``token_id:123``."""
    name, _, number = text.partition(":")
    if name != "token_id":
        raise ValueError(f"{text!r} is not a token id")
    return int(number)
