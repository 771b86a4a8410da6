"""Requests to sample as clients send them, and their answers: JSON, and the client's protobuf messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megascend.errors import ConfigError, DataError
from megascend.sampling.request import SampledSequence, SampleRequest, SampleResult, SamplingParams, Stop, TopLogprobs
from megascend.serve.api.bodies import MaxTokens, Sample, SamplingSettings
from megascend.serve.api.wire import messages_of_client, tensor_of_json, tokens_of_json
from megascend.serve.errors import RequestRefusedError

MAX_CELLS = 2**20
"""Most tokens that one request names."""


@dataclass(frozen=True)
class PromptTargets:
    """Tokens that a client names.

    Attributes:
        cells: int64 [n, k]; -1: none. Of a sparse tensor, what it does not list is -1.
        sparse: of a sparse one, ``crow`` and ``col``: where each row begins in the list, and the column of each in it.
    """

    cells: np.ndarray
    sparse: dict[str, np.ndarray] | None

    def _order(self) -> np.ndarray:
        """Order the columns of every row, those that name something first, as far as a row has some."""
        named = self.cells >= 0
        width = int(named.sum(1).max(initial=0))
        return np.argsort(~named, axis=1, kind="stable")[:, :width]

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Return what is named for every place, without the gaps between; -1 fills the rows up."""
        return tuple(map(tuple, np.take_along_axis(self.cells, self._order(), 1).tolist()))

    def answered(self, rows: Sequence[Sequence[float]]) -> tuple[np.ndarray, dict[str, np.ndarray] | None]:
        """Lay out what was computed for :meth:`rows` as the client's own tensor: float32 [n, k], or what is listed."""
        values = np.zeros(self.cells.shape, np.float32)
        order = self._order()
        np.put_along_axis(values, order, np.array(rows, np.float32).reshape(order.shape), 1)
        values[self.cells < 0] = 0
        if self.sparse is None:
            return values, None
        places = np.repeat(np.arange(len(values)), np.diff(self.sparse["crow"]))
        return values[places, self.sparse["col"]], {**self.sparse, "shape": np.array(values.shape)}


def targets_of(value: Any) -> PromptTargets | None:
    """Read ``target_prompt_logprobs`` of a request to sample.

    Raises:
        DataError: it cannot be read, or is no int64 tensor of two dimensions.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, Mapping) or value["dtype"] != "int64":
            raise DataError("an int64 tensor is expected")
        if value.get("sparse_crow_indices") is None:
            cells, sparse = tensor_of_json(value), None
        else:
            shifted = {**value, "data": (np.asarray(value["data"], np.int64) + 1).tolist()}  # what is not listed is 0
            cells = tensor_of_json(shifted) - 1
            names = {"crow": "sparse_crow_indices", "col": "sparse_col_indices"}
            sparse = {short: np.asarray(value[name], np.int64) for short, name in names.items()}
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"target_prompt_logprobs cannot be read: {type(error).__name__}") from None
    if cells.ndim != 2 or cells.size > MAX_CELLS:
        raise DataError(f"target_prompt_logprobs {list(cells.shape)}: [prompt - 1, k], at most {MAX_CELLS} values")
    return PromptTargets(cells, sparse)


def json_of_tensor(values: np.ndarray, sparse: dict[str, np.ndarray] | None) -> dict[str, Any]:
    """Write a tensor in JSON; ``values`` are those listed if it is sparse."""
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
    """Write a tensor as a protobuf ``Tensor``, whole numbers in 32 bits."""
    whole = values.dtype.kind == "i"
    content = np.ascontiguousarray(values, np.int32 if whole else np.float32).tobytes()
    tensor = messages.Tensor(dtype=messages.DTYPE_INT32 if whole else messages.DTYPE_FLOAT32)
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
"""Log-probability of what is not there, where the likeliest tokens are one matrix."""
MAX_STOPS = 64
MAX_STOP = 1024
"""Most characters of a text that ends a response: so many of its tokens are looked at after each new one."""
NUMBER_BYTES = 32
"""Of a number and its place in a list."""
MAX_TOP = 2**22
"""Most pairs of a token and its log-probability in the answer to one request."""


def sample_request_of(asked: Sample, adapter: str | None, max_length: int) -> SampleRequest:
    """Build the request of a client to sample.

    Args:
        adapter: whose responses; None: the base model's.
        max_length: of prompt and response together, where the client sets no limit.

    Raises:
        RequestRefusedError, ConfigError, DataError: a value cannot be, or asks for what is not here.
    """
    try:
        prompt = tokens_of_json(asked.prompt).tolist()
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"the prompt cannot be read: {type(error).__name__}") from None
    params = asked.sampling_params
    if not isinstance(params, Mapping):
        raise RequestRefusedError("sampling_params must be an object", 422)
    longest = MaxTokens.read(params, "sampling_params").max_tokens
    settings = SamplingSettings.read(params, "sampling_params", ConfigError)
    count = asked.num_samples
    if not 1 <= count <= MAX_SAMPLES:
        raise ConfigError(f"num_samples={count}: from 1 to {MAX_SAMPLES}")
    longest = max(max_length - len(prompt), 0) if longest is None else longest
    if len(prompt) + longest > max_length:
        raise DataError(f"{len(prompt)} prompt tokens and max_tokens={longest} are together more than {max_length}")
    of_prompt, of_samples = asked.topk_prompt_logprobs, asked.topk_sample_logprobs
    if of_prompt * len(prompt) + of_samples * count * longest > MAX_TOP:
        raise ConfigError(f"the likeliest tokens of all places would be more than {MAX_TOP}: ask for fewer at a time")
    targets = targets_of(asked.target_prompt_logprobs)
    return SampleRequest(
        prompt,
        SamplingParams(
            longest,
            settings.temperature,
            settings.top_p,
            int(settings.top_k),
            None if settings.seed is None else int(settings.seed) % 2**62,
            _stops(settings.stop),
        ),
        adapter,
        count,
        prompt_logprobs=asked.prompt_logprobs,
        topk_prompt_logprobs=of_prompt,
        topk_logprobs=of_samples,
        target_tokens=None if targets is None else targets.rows(),
        prompt_draws=asked.prompt_alt_tokens_k,
    )


def _is_text(value: str) -> bool:
    """Check whether a string can be written in UTF-8: JSON can have halves of characters (surrogates), which cannot."""
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
        or not all(isinstance(each, str | int) and not isinstance(each, bool) for each in stops)
    ):
        raise ConfigError(f"sampling_params: stop must be a text, or up to {MAX_STOPS} texts or token ids")
    for each in stops:
        if isinstance(each, str) and (len(each) > MAX_STOP or not _is_text(each)):
            raise ConfigError(f"sampling_params: a text of stop has more than {MAX_STOP} characters, or half of one")
    return tuple(stops)


@dataclass(frozen=True)
class SampleAnswer:
    """Responses to one prompt.

    Attributes:
        last_n: of the prompt's log-probabilities, leave out those of earlier tokens; None: of none.
        targets: tokens that the client named for places of the prompt.
    """

    result: SampleResult
    last_n: int | None = None
    targets: PromptTargets | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about: numbers are Python's own."""
        result = self.result
        numbers = sum(2 * len(each.tokens) + _pairs(each.topk_logprobs) for each in result.samples)
        numbers += len(result.prompt_logprobs or ()) + _pairs(result.topk_prompt_logprobs) + _pairs(result.prompt_draws)
        numbers += sum(map(len, result.target_logprobs or ()))
        return NUMBER_BYTES * numbers

    def _prompt(self) -> list[float | None] | None:
        logprobs = self.result.prompt_logprobs
        if logprobs is None:
            return None
        first = 0 if self.last_n is None else max(len(logprobs) - self.last_n, 0)
        return [value if place >= first else None for place, value in enumerate(logprobs)]

    def _of_places(self, written: Callable[[np.ndarray, dict[str, np.ndarray] | None], Any]) -> dict[str, Any]:
        """Collect what is known of named and of drawn tokens, each tensor as ``written``."""
        tensors: dict[str, Any] = {}
        if self.targets is not None and self.result.target_logprobs is not None:
            tensors["target_prompt_logprobs"] = written(*self.targets.answered(self.result.target_logprobs))
        if self.result.prompt_draws is not None:
            pairs = np.array(self.result.prompt_draws, np.float64).reshape(len(self.result.prompt_draws), -1, 2)
            tokens, values = pairs[..., 0].astype(np.int64), pairs[..., 1].astype(np.float32)
            tensors["prompt_alt_tokens"] = {"tokens": written(tokens, None), "logprobs": written(values, None)}
        return tensors

    def json(self) -> dict[str, Any]:
        """Write the answer for older clients."""
        return {
            "type": "sample",
            "sequences": [
                {"stop_reason": _reason(each), "tokens": list(each.tokens), "logprobs": list(each.logprobs)}
                for each in self.result.samples
            ],
            "prompt_logprobs": self._prompt(),
            "topk_prompt_logprobs": self.result.topk_prompt_logprobs,
        } | self._of_places(json_of_tensor)

    def protobuf(self) -> bytes:
        """Write the answer for newer clients."""
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
        known = answer.DESCRIPTOR.fields_by_name
        for name, content in self._of_places(partial(message_of_tensor, messages)).items():
            for part, tensor in content.items() if isinstance(content, dict) else [(None, content)]:
                if name in known:
                    (getattr(answer, name) if part is None else getattr(getattr(answer, name), part)).CopyFrom(tensor)
        return answer.SerializeToString()


def _pairs(places: Sequence[Sequence[Any] | None] | None) -> int:
    """Count the numbers in pairs of a token and its log-probability, for which a tuple counts as two more."""
    return sum(4 * len(each) for each in places or () if each is not None)


def _reason(sequence: SampledSequence) -> str:
    return "stop" if sequence.stop_reason == "stop" else "length"


def _fill(message: Any, top: Sequence[TopLogprobs | None]) -> None:
    """Fill a message with the likeliest tokens of every place; none: token 0 with :data:`EMPTY`."""
    width = max((len(each) for each in top if each is not None), default=0)
    ids, values = np.zeros((len(top), width), np.int32), np.full((len(top), width), EMPTY, np.float32)
    for place, each in enumerate(top):
        for column, (token, logprob) in enumerate(each or ()):
            ids[place, column], values[place, column] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), values.tobytes()
    message.k, message.length = width, len(top)
