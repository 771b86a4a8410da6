"""Sampling requests and answers on the wire: JSON, and the Tinker client's protobuf messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megascend.apps.data.images import ImageProcessor
from megascend.apps.sampling.request import (
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    Stop,
    TopLogprobs,
)
from megascend.apps.serve.api.bodies import MaxTokens, SampleBody, SamplingSettings
from megascend.apps.serve.api.wire import messages_of_client, tensor_of_json
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.images import ImageReader, ModelInput, chunks_of_json, integers
from megascend.errors import ConfigError, DataError

MAX_CELLS = 2**20
"""Maximum number of target tokens of one request."""


@dataclass(frozen=True)
class PromptTargets:
    """Tokens per prompt position whose log-probabilities a client requests.

    Attributes:
        cells: int64 [n, k], dense; -1: no token.
        sparse: CSR indices ``crow`` and ``col`` if the client sent a sparse tensor, else None.
    """

    cells: np.ndarray
    sparse: dict[str, np.ndarray] | None

    def _order(self) -> np.ndarray:
        """Return the column order that moves each row's tokens to the front, cut to the longest row."""
        present = self.cells >= 0
        width = int(present.sum(1).max(initial=0))
        return np.argsort(~present, axis=1, kind="stable")[:, :width]

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Return each position's tokens without gaps, padded with -1."""
        return tuple(map(tuple, np.take_along_axis(self.cells, self._order(), 1).tolist()))

    def arranged(self, rows: Sequence[Sequence[float]]) -> tuple[np.ndarray, dict[str, np.ndarray] | None]:
        """Arrange values computed for :meth:`rows` in the client's layout: float32 [n, k], or the CSR values."""
        values = np.zeros(self.cells.shape, np.float32)
        order = self._order()
        np.put_along_axis(values, order, np.array(rows, np.float32).reshape(order.shape), 1)
        values[self.cells < 0] = 0
        if self.sparse is None:
            return values, None
        row_of_value = np.repeat(np.arange(len(values)), np.diff(self.sparse["crow"]))
        return values[row_of_value, self.sparse["col"]], {**self.sparse, "shape": np.array(values.shape)}


def targets_of(value: Any, positions: int | None = None) -> PromptTargets | None:
    """Read ``target_prompt_logprobs`` of a sampling request.

    Args:
        positions: positions of the prompt but the first; None: the tensor has been read before.
    """
    if value is None or isinstance(value, PromptTargets):
        return value
    try:
        if not isinstance(value, Mapping) or value["dtype"] != "int64":
            raise DataError("an int64 tensor is expected")
        shape = [int(size) for size in value.get("shape") or (0, 0)]
        # Before a sparse one is expanded, which may be as wide as the vocabulary.
        if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MAX_CELLS:
            raise DataError(f"target_prompt_logprobs {shape}: [prompt - 1, k], at most {MAX_CELLS} values")
        if positions is not None and value.get("shape") is not None and shape[0] != positions:
            raise DataError(f"target_prompt_logprobs {shape}: the prompt has {positions} positions after the first")
        if value.get("sparse_crow_indices") is None:
            cells, sparse = tensor_of_json(value), None
        else:
            # Shifted, because dense() fills gaps with 0, a valid token.
            shifted = {**value, "data": (integers(value["data"]) + 1).tolist()}
            cells = tensor_of_json(shifted) - 1
            names = {"crow": "sparse_crow_indices", "col": "sparse_col_indices"}
            sparse = {short: integers(value[name]) for short, name in names.items()}
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"target_prompt_logprobs cannot be read: {type(error).__name__}") from None
    if cells.ndim != 2 or cells.size > MAX_CELLS:
        raise DataError(f"target_prompt_logprobs {list(cells.shape)}: [prompt - 1, k], at most {MAX_CELLS} values")
    return PromptTargets(cells, sparse)


def json_of_tensor(values: np.ndarray, sparse: dict[str, np.ndarray] | None) -> dict[str, Any]:
    """Encode a tensor as JSON; ``values`` are the CSR values if it is sparse."""
    shape = list(values.shape) if sparse is None else sparse["shape"].tolist()
    tensor = {
        "data": values.ravel().tolist(),
        "dtype": "int64" if values.dtype.kind == "i" else "float32",
        "shape": shape,
    }
    if sparse is not None:
        tensor |= {"sparse_crow_indices": sparse["crow"].tolist(), "sparse_col_indices": sparse["col"].tolist()}
    return tensor


def message_of_tensor(messages: Any, values: np.ndarray, sparse: dict[str, np.ndarray] | None) -> Any:
    """Encode a tensor as a protobuf ``Tensor``, integers as int32."""
    integral = values.dtype.kind == "i"
    content = np.ascontiguousarray(values, np.int32 if integral else np.float32).tobytes()
    tensor = messages.Tensor(dtype=messages.DTYPE_INT32 if integral else messages.DTYPE_FLOAT32)
    if sparse is None:
        tensor.dense = content
        tensor.shape.extend(values.shape)
    else:
        tensor.sparse_csr.values = content
        tensor.sparse_csr.crow_indices = sparse["crow"].tobytes()
        tensor.sparse_csr.col_indices = sparse["col"].tobytes()
        tensor.shape.extend(sparse["shape"].tolist())
    return tensor


MAX_SAMPLES = 1024
EMPTY = -99999.0
"""Log-probability of padding in the matrix of top tokens."""
MAX_STOPS = 64
MAX_STOP = 1024
"""Maximum characters of a stop string: that many trailing tokens are decoded after each new one."""
NUMBER_BYTES = 32
"""Memory of a Python number and its list slot."""
MAX_TOP = 2**22
"""Maximum (token, log-probability) pairs in one answer."""


def prompt_of(value: Any, image_processor: ImageProcessor | None = None) -> ModelInput | DataError:
    """Read a prompt, or return why it cannot be read.

    Args:
        image_processor: decodes images; None: the model takes none.
    """
    try:
        return ImageReader(image_processor).read(chunks_of_json(value))
    except DataError as error:
        return DataError(f"prompt: {error}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return DataError(f"the prompt cannot be read: {type(error).__name__}")


def sample_request_of(
    body: SampleBody, adapter: str | None, max_length: int, prompt_input: ModelInput | DataError | None = None
) -> SampleRequest:
    """Build a SampleRequest from a client's request.

    Args:
        adapter: adapter to sample from; None: the base model.
        max_length: maximum length of prompt and response together.
        prompt_input: result of :func:`prompt_of`; None: a prompt without images, which is read here.
    """
    if prompt_input is None:
        prompt_input = prompt_of(body.prompt)
    if isinstance(prompt_input, DataError):
        raise prompt_input
    prompt = prompt_input.tokens.tolist()
    params = body.sampling_params
    if not isinstance(params, Mapping):
        raise RequestRefusedError("sampling_params must be an object", 422)
    # max_tokens refuses the request, like other fields of the body; the other settings fail its future.
    longest = MaxTokens.read(params, "sampling_params").max_tokens
    settings = SamplingSettings.read(params, "sampling_params", ConfigError)
    count = body.num_samples
    if not 1 <= count <= MAX_SAMPLES:
        raise ConfigError(f"num_samples={count}: from 1 to {MAX_SAMPLES}")
    longest = max(max_length - len(prompt), 0) if longest is None else longest
    if len(prompt) + longest > max_length:
        raise DataError(
            f"{len(prompt)} prompt tokens and max_tokens={longest} together exceed the maximum length {max_length}"
        )
    prompt_count, sample_count = body.topk_prompt_logprobs, body.topk_sample_logprobs
    # The answer is kept in memory until it is fetched: as Python numbers, this many pairs take half a gigabyte.
    if prompt_count * len(prompt) + sample_count * count * longest > MAX_TOP:
        raise ConfigError(f"top-k log-probabilities of all positions exceed {MAX_TOP} values: request fewer at a time")
    targets = targets_of(body.target_prompt_logprobs, len(prompt) - 1)
    return SampleRequest(
        prompt,
        SamplingParams(
            longest,
            settings.temperature,
            settings.top_p,
            settings.top_k,
            None if settings.seed is None else settings.seed % 2**62,
            _stops(settings.stop),
        ),
        adapter,
        count,
        prompt_logprobs=body.prompt_logprobs,
        topk_prompt_logprobs=prompt_count,
        topk_logprobs=sample_count,
        target_tokens=None if targets is None else targets.rows(),
        prompt_draws=body.prompt_alt_tokens_k,
        images=prompt_input.sources,
    )


def _is_text(value: str) -> bool:
    """Check whether a string can be encoded in UTF-8: JSON may contain lone surrogates, which cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stops(value: Any) -> tuple[Stop, ...]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str | int) and not isinstance(stop, bool) for stop in stops)
    ):
        raise ConfigError(f"sampling_params: stop must be a string, or up to {MAX_STOPS} strings or token ids")
    for stop in stops:
        if isinstance(stop, str) and (len(stop) > MAX_STOP or not _is_text(stop)):
            raise ConfigError(
                f"sampling_params: a stop string is longer than {MAX_STOP} characters, or has a lone surrogate"
            )
    return tuple(stops)


@dataclass(frozen=True)
class SampleAnswer:
    """Answer to a sampling request.

    Attributes:
        last_n: return prompt log-probabilities of the last n tokens only; None: of all.
        targets: the client's ``target_prompt_logprobs``, which are read again when the answer is encoded.
    """

    result: SampleResult
    last_n: int | None = None
    targets: Any = None

    @property
    def nbytes(self) -> int:
        """Approximate size in memory, bytes: the result holds Python numbers."""
        result = self.result
        numbers = sum(2 * len(sample.tokens) + _pairs(sample.topk_logprobs) for sample in result.samples)
        numbers += len(result.prompt_logprobs or ()) + _pairs(result.topk_prompt_logprobs) + _pairs(result.prompt_draws)
        numbers += len(result.target_logprobs or ()) * len((result.target_logprobs or ((),))[0])
        return NUMBER_BYTES * numbers

    def _prompt(self) -> list[float | None] | None:
        logprobs = self.result.prompt_logprobs
        if logprobs is None:
            return None
        first = 0 if self.last_n is None else max(len(logprobs) - self.last_n, 0)
        return [value if position >= first else None for position, value in enumerate(logprobs)]

    def _position_tensors(self, encode: Callable[[np.ndarray, dict[str, np.ndarray] | None], Any]) -> dict[str, Any]:
        """Return the tensors of target tokens and of drawn alternatives, encoded by ``encode``."""
        tensors: dict[str, Any] = {}
        targets = None if self.result.target_logprobs is None else targets_of(self.targets)
        if targets is not None and self.result.target_logprobs is not None:
            tensors["target_prompt_logprobs"] = encode(*targets.arranged(self.result.target_logprobs))
        if self.result.prompt_draws is not None:
            pairs = np.array(self.result.prompt_draws, np.float64).reshape(len(self.result.prompt_draws), -1, 2)
            tokens, values = pairs[..., 0].astype(np.int64), pairs[..., 1].astype(np.float32)
            tensors["prompt_alt_tokens"] = {"tokens": encode(tokens, None), "logprobs": encode(values, None)}
        return tensors

    def json(self) -> dict[str, Any]:
        """Encode the answer for older clients."""
        return {
            "type": "sample",
            "sequences": [
                {"stop_reason": _reason(sample), "tokens": list(sample.tokens), "logprobs": list(sample.logprobs)}
                for sample in self.result.samples
            ],
            "prompt_logprobs": self._prompt(),
            "topk_prompt_logprobs": self.result.topk_prompt_logprobs,
        } | self._position_tensors(json_of_tensor)

    def protobuf(self) -> bytes:
        """Encode the answer for newer clients."""
        messages = messages_of_client()
        answer = messages.SampleResponse()
        for sample in self.result.samples:
            sequence = answer.sequences.add(
                stop_reason=messages.STOP_REASON_STOP if _reason(sample) == "stop" else messages.STOP_REASON_LENGTH,
                tokens=np.asarray(sample.tokens, np.int32).tobytes(),
                logprobs=np.asarray(sample.logprobs, np.float32).tobytes(),
            )
            if sample.topk_logprobs is not None and "topk_sampled_logprobs" in sequence.DESCRIPTOR.fields_by_name:
                _fill(sequence.topk_sampled_logprobs, sample.topk_logprobs)
        prompt = self._prompt()
        if prompt is not None:
            values = [np.nan if value is None else value for value in prompt]
            answer.prompt_logprobs = np.asarray(values, np.float32).tobytes()
        if self.result.topk_prompt_logprobs is not None:
            _fill(answer.topk_prompt_logprobs, self.result.topk_prompt_logprobs)
        fields = answer.DESCRIPTOR.fields_by_name
        for name, content in self._position_tensors(partial(message_of_tensor, messages)).items():
            for part, tensor in content.items() if isinstance(content, dict) else [(None, content)]:
                if name in fields:
                    (getattr(answer, name) if part is None else getattr(getattr(answer, name), part)).CopyFrom(tensor)
        return answer.SerializeToString()


def _pairs(positions: Sequence[Sequence[Any] | None] | None) -> int:
    """Count the numbers in (token, log-probability) pairs, as many at each position; each tuple costs as much as two more."""
    return 4 * len(positions or ()) * len(next((pairs for pairs in positions or () if pairs is not None), ()))


def _reason(sequence: SampledSequence) -> str:
    return "stop" if sequence.stop_reason == "stop" else "length"


def _fill(message: Any, top: Sequence[TopLogprobs | None]) -> None:
    """Fill a message with the top tokens of every position, padded with token 0 and :data:`EMPTY`."""
    width = max((len(pairs) for pairs in top if pairs is not None), default=0)
    ids, values = np.zeros((len(top), width), np.int32), np.full((len(top), width), EMPTY, np.float32)
    for position, pairs in enumerate(top):
        for column, (token, logprob) in enumerate(pairs or ()):
            ids[position, column], values[position, column] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), values.tobytes()
    message.k, message.length = width, len(top)
