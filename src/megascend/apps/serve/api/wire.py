"""Training requests and answers on the wire: JSON, and the protobuf messages of the Tinker client's package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from megascend.apps.data.images import ImageProcessor
from megascend.apps.serve.api.bodies import TrainBody
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.images import (
    PART,
    ImageReader,
    ModelInput,
    PlacedImage,
    chunks_of_json,
    chunks_of_message,
    floats,
    integers,
    json_of_chunks,
)
from megascend.errors import DataError, MissingDependencyError


@dataclass(frozen=True)
class ProvenanceSpan:
    """Tokens [offset, offset + length) of a recorded sequence's prompt or of its sampled tokens.

    Attributes:
        sequence: sequence id, from the answer to the sampling request.
    """

    sequence: str
    offset: int
    length: int
    sampled: bool


def spans_of_message(datum: Any) -> tuple[list[ProvenanceSpan], list[ProvenanceSpan]]:
    """Read the provenance spans of a protobuf ``Datum``'s tokens and targets; none from older clients."""
    available = datum.DESCRIPTOR.fields_by_name
    fields = ("model_input_spans", "loss_fn_input_spans")
    spans = [[_span(span) for span in getattr(datum, name)] if name in available else [] for name in fields]
    return spans[0], spans[1]


def _span(message: Any) -> ProvenanceSpan:
    kind = message.WhichOneof("span")
    if kind is None:
        raise DataError("a provenance span has neither prompt_tokens nor sampled_tokens")
    part = getattr(message, kind)
    return ProvenanceSpan(part.sequence_id, part.offset, part.length, kind == "sampled_tokens")


Schema = Mapping[int, "Schema | None"]
"""Schema of a protobuf message: field number to the schema of a nested message, None for packed numbers."""

MAX_DEPTH = 16


def schema_of(descriptor: Any, depth: int = MAX_DEPTH) -> Schema:
    """Return the schema of a message type in the client's package, nested messages included."""
    schema: dict[int, Schema | None] = {}
    for entry in descriptor.fields:
        # is_repeated is new in protobuf 6, which deprecates label
        repeated = entry.is_repeated if hasattr(entry, "is_repeated") else entry.label == entry.LABEL_REPEATED
        if entry.message_type is not None:
            schema[entry.number] = schema_of(entry.message_type, depth - 1) if depth else {}
        # Numbers are packed in proto3: one field on the wire that is parsed into one object a number.
        elif repeated and entry.type not in (entry.TYPE_STRING, entry.TYPE_BYTES):
            schema[entry.number] = None
    return schema


def check_message(body: bytes, schema: Schema, limit: int) -> None:
    """Bound the number of fields in a protobuf body before parsing.

    An empty message takes 2 bytes on the wire and a packed number 1, but far more as parsed objects.

    Args:
        limit: maximum number of fields, nested messages included.
    """
    # A list and not recursion: the depth is the client's choice.
    waiting: list[tuple[Schema, int, int]] = [(schema, 0, len(body))]
    count = 0
    while waiting:
        inside, position, end = waiting.pop()
        while position < end:
            tag, position = _varint(body, position, end)
            kind = tag & 7
            count += 1
            if kind == 2:
                length, position = _varint(body, position, end)
                if position + length > end:
                    raise RequestRefusedError("the body is not a protobuf message: it ends within a field")
                # Strings and unknown fields have an empty schema: the parser copies them as they are.
                subschema = inside.get(tag >> 3, {})
                if subschema:
                    waiting.append((subschema, position, position + length))
                elif subschema is None:
                    count += _count_numbers(body, position, position + length)
                position += length
            elif kind == 0:
                _, position = _varint(body, position, end)
            # Fixed 64 and 32 bits. Groups (3 and 4) are not in proto3.
            elif kind in (1, 5):
                position += 8 if kind == 1 else 4
            else:
                raise RequestRefusedError(f"the body is not a protobuf message: wire type {kind}")
            if count > limit:
                raise RequestRefusedError(f"the request holds more than {limit} samples and pieces of samples", 413)


def _count_numbers(body: bytes, start: int, end: int) -> int:
    """Bound the count of packed numbers from above: a varint has exactly one byte below 128, a fixed number 4 or 8 bytes."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8, end - start, start) < 0x80)) if end > start else 0


def _varint(body: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    # A varint has at most 10 bytes; a longer run is an attack on this loop or not protobuf.
    while position < end and shift < 64:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise RequestRefusedError("the body is not a protobuf message: it ends within a number")


PROTOBUF = "application/x-protobuf"
ARRAY_BYTES = 128
"""Memory overhead of an array."""
PIECES = 64
"""Maximum message fields per allowed sample; about twenty describe one."""
MAX_COLUMNS = 64
"""Maximum number of targets at one position; each column is computed as a sample of its own."""
COLUMNS_EACH = 16
"""Columns of targets per allowed sample, over all samples of a request: 1024 samples of 64 columns with the default limit."""


@dataclass(frozen=True)
class Datum:
    """One sample of a request.

    Attributes:
        tokens: int64 [n], with those that stand for images.
        inputs: loss inputs by name, int64 or float32, [n] or [n, k].
        token_spans, target_spans: provenance of tokens and targets, in order; empty if the client sent none.
        images: in the order of their tokens.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    token_spans: Sequence[ProvenanceSpan] = ()
    target_spans: Sequence[ProvenanceSpan] = ()
    images: tuple[PlacedImage, ...] = ()

    @property
    def columns(self) -> int:
        """Columns of the targets, each of which is computed as a sample."""
        targets = self.inputs.get("target_tokens")
        return targets.shape[1] if targets is not None and targets.ndim == 2 else 1

    @property
    def model_input(self) -> ModelInput:
        """Tokens and images."""
        return ModelInput(self.tokens, self.images)


@dataclass(frozen=True)
class TrainRequest:
    """A ``forward_backward`` or ``forward``.

    Attributes:
        problem: error in the samples, which are empty then. The request still takes its turn, to fail there.
        resolved: True if recorded log-probabilities have been filled in.
        digest: of the body; None if the request is repeated after a restart.
    """

    model: str
    number: int | None
    loss: str
    settings: Mapping[str, Any]
    forward_only: bool
    data: Sequence[Datum] = ()
    problem: str | None = None
    resolved: bool = False
    digest: str | None = None


@dataclass(frozen=True)
class TrainAnswer:
    """Answer to a :class:`TrainRequest`.

    Attributes:
        logprobs: float32 per sample, in the shape of its targets.
        metrics: values by ``NAME:REDUCTION``; the reduction tells clients how to combine several requests.
    """

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size in memory, bytes."""
        return sum(array.nbytes + ARRAY_BYTES for array in self.logprobs)

    def json(self) -> dict[str, Any]:
        """Encode the answer for older clients."""
        outputs = [
            {"logprobs": {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}}
            for array in self.logprobs
        ]
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": self._finite()}

    def protobuf(self) -> bytes:
        """Encode the answer for newer clients. Consecutive samples of one width share a record."""
        messages = messages_of_client()
        answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        answer.metrics.update(self._finite())
        start = 0
        while start < len(self.logprobs):
            width = self.logprobs[start].shape[1:]
            end = start
            # A record has one trailing shape, so samples of one width can share it.
            while end < len(self.logprobs) and self.logprobs[end].shape[1:] == width:
                end += 1
            parts = self.logprobs[start:end]
            record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - start)
            tensor = record.fields["logprobs"]
            tensor.data = b"".join(np.ascontiguousarray(part, np.float32).tobytes() for part in parts)
            tensor.offsets = np.cumsum([0, *(4 * part.size for part in parts)], dtype=np.int64).tobytes()
            tensor.dtype = messages.DTYPE_FLOAT32
            tensor.trailing_shape.extend(width)
            start = end
        return answer.SerializeToString()

    def _finite(self) -> dict[str, float]:
        # The loss stays in any case: clients read it, and NaN there tells them what has happened.
        return {name: value for name, value in self.metrics.items() if name == "loss:sum" or math.isfinite(value)}


def messages_of_client() -> Any:
    """Import the protobuf messages from the Tinker client's package."""
    try:
        from tinker.proto import tinker_public_pb2
    except ImportError as error:
        raise MissingDependencyError(
            f"megascend serve needs the Tinker client's package for its wire format (pip install 'megascend[serve]'): {error}"
        ) from None
    return tinker_public_pb2


def train_request_of_json(
    body: Mapping[str, Any],
    max_data: int,
    image_processor: ImageProcessor | None = None,
    require_model: Callable[[str], object] = lambda name: None,
    *,
    forward_only: bool,
) -> TrainRequest:
    """Read a request in JSON, from older clients. Unknown fields are ignored.

    Args:
        image_processor: decodes images; None: the model takes none.
        require_model: raises for a model that does not exist, before samples and images are read.
    """
    fields = TrainBody.read(body)
    require_model(fields.model_id)
    inside = fields.forward_input if forward_only else fields.forward_backward_input
    if inside is None:
        raise RequestRefusedError(f"forward{'' if forward_only else '_backward'}_input: Field required", 422)
    if len(inside.data) > max_data:
        raise RequestRefusedError(f"the request has {len(inside.data)} samples, more than {max_data}", 413)
    settings = {} if inside.loss_fn_config is None else inside.loss_fn_config
    settings = settings if isinstance(settings, dict) else {"": None}
    request = TrainRequest(fields.model_id, number_of(fields.seq_id), str(inside.loss_fn), settings, forward_only)
    reader = ImageReader(image_processor)
    read = partial(_datum_of_json, reader=reader)
    return _with_data(request, inside.data, read, _sparse_shapes_of_json, COLUMNS_EACH * max_data)


def dumps(value: Any) -> str:
    """Encode as JSON, a bounded part at a time: within a call of the encoder no other thread runs, the event loop's neither."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(name))}:{dumps(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], dict | list | tuple):
            return "[" + ",".join(map(dumps, value)) + "]"
        if len(value) > PART:
            return "[" + ",".join(json.dumps(value[at : at + PART])[1:-1] for at in range(0, len(value), PART)) + "]"
    return json.dumps(value)


def json_of_train_request(request: TrainRequest) -> dict[str, Any]:
    """Encode a forward_backward for :func:`train_request_of_json`."""
    data = [
        {
            "model_input": {"chunks": json_of_chunks(datum.model_input.chunks())},
            "loss_fn_inputs": {
                name: {
                    "data": v.ravel().tolist(),
                    "dtype": "int64" if v.dtype.kind == "i" else "float32",
                    "shape": list(v.shape),
                }
                for name, v in datum.inputs.items()
            },
        }
        for datum in request.data
    ]
    inside = {"data": data, "loss_fn": request.loss, "loss_fn_config": dict(request.settings)}
    return {"model_id": request.model, "seq_id": request.number, "forward_backward_input": inside}


def train_request_of_protobuf(
    body: bytes,
    max_data: int,
    image_processor: ImageProcessor | None = None,
    require_model: Callable[[str], object] = lambda name: None,
) -> TrainRequest:
    """Read a request in protobuf, from newer clients; arguments as of :func:`train_request_of_json`."""
    from google.protobuf.message import DecodeError

    check_message(body, _schema(), PIECES * max_data)
    message = messages_of_client().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise RequestRefusedError(f"the body is not a ForwardBackwardRequest: {error}") from None
    require_model(message.model_id)
    if len(message.data) > max_data:
        raise RequestRefusedError(f"the request has {len(message.data)} samples, more than {max_data}", 413)
    settings: dict[str, Any] = dict(message.loss_fn_config)
    if "loss_fn_config_v2" in message.DESCRIPTOR.fields_by_name:
        values = message.loss_fn_config_v2.items()
        # None for one without a value, which would read as 0.
        settings |= {name: getattr(value, value.WhichOneof("value") or "", None) for name, value in values}
    request = TrainRequest(
        message.model_id, number_of(message.seq_id), message.loss_fn, settings, bool(message.forward_only)
    )
    reader = ImageReader(image_processor)
    read = partial(_datum_of_message, reader=reader)
    return _with_data(request, message.data, read, _sparse_shapes_of_message, COLUMNS_EACH * max_data)


@cache
def _schema() -> Schema:
    return schema_of(messages_of_client().ForwardBackwardRequest.DESCRIPTOR)


def number_of(value: Any) -> int | None:
    """Validate a request's number in its model's order; None if the client sent none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**62:
        raise RequestRefusedError(f"seq_id must be a number from 1 on, got {str(value)[:40]!r}", 422)
    return value


def _with_data(request: TrainRequest, data: Any, read: Any, sparse_shapes: Any, max_columns: int) -> TrainRequest:
    # An error in a sample fails the future and not the request, whose number must have its turn for later ones to run.
    datums, opened, columns = [], 0, 0
    for index, datum in enumerate(data):
        try:
            # from the shapes alone, before anything is allocated
            opened += sum(math.prod(abs(int(size)) for size in shape) for shape in sparse_shapes(datum))
            if opened > MAX_DENSE:
                raise DataError(f"the sparse tensors up to here have more than {MAX_DENSE} values")
            datums.append(read(datum))
            columns += datums[-1].columns
            if columns > max_columns:
                raise RequestRefusedError(f"the request has more than {max_columns} columns of targets", 413)
        except DataError as error:
            return replace(request, problem=f"sample {index}: {error}")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            return replace(
                request, problem=f"sample {index} cannot be read: {type(error).__name__}: {str(error)[:200]}"
            )
    return replace(request, data=datums)


def _sparse_shapes_of_json(datum: Any) -> list[Any]:
    inputs = datum["loss_fn_inputs"].values()
    return [value["shape"][:2] for value in inputs if value.get("sparse_crow_indices") is not None]


def _sparse_shapes_of_message(datum: Any) -> list[Any]:
    return [value.shape[:2] for value in datum.loss_fn_inputs.values() if value.HasField("sparse_csr")]


def _datum_of_json(datum: Any, reader: ImageReader) -> Datum:
    model_input = reader.read(chunks_of_json(datum["model_input"]))
    bounds = (len(model_input.tokens), MAX_COLUMNS)
    inputs = {str(name): tensor_of_json(value, bounds) for name, value in datum["loss_fn_inputs"].items()}
    return Datum(model_input.tokens, inputs, images=model_input.images)


def tensor_of_json(value: Any, bounds: tuple[int, int] | None = None) -> np.ndarray:
    """Read a tensor from JSON.

    Args:
        bounds: rows and most columns of a sparse one.
    """
    dtype = value["dtype"]
    if dtype not in ("float32", "int64"):
        raise DataError(f"dtype {str(dtype)[:40]!r}; expected float32 or int64")
    flat = integers(value["data"]) if dtype == "int64" else floats(value["data"])
    if value.get("sparse_crow_indices") is not None:
        return dense(
            flat, integers(value["sparse_crow_indices"]), integers(value["sparse_col_indices"]), value["shape"], bounds
        )
    shape = value.get("shape")
    return flat if shape is None else flat.reshape(integers(shape))


def _datum_of_message(datum: Any, reader: ImageReader) -> Datum:
    model_input = reader.read(chunks_of_message(datum.model_input))
    bounds = (len(model_input.tokens), MAX_COLUMNS)
    inputs = {name: tensor_of_message(value, bounds) for name, value in datum.loss_fn_inputs.items()}
    return Datum(model_input.tokens, inputs, *spans_of_message(datum), model_input.images)


def tensor_of_message(tensor: Any, bounds: tuple[int, int] | None = None) -> np.ndarray:
    """Read a protobuf ``Tensor``; ``bounds`` as of :func:`tensor_of_json`."""
    messages = messages_of_client()
    kinds = {messages.DTYPE_FLOAT32: np.float32, messages.DTYPE_INT64: np.int64, messages.DTYPE_INT32: np.int32}
    if tensor.dtype not in kinds:
        raise DataError(f"a tensor of type {tensor.dtype}; expected float32, int64 or int32")
    kind = kinds[tensor.dtype]
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        rows, columns = (np.frombuffer(part, np.int64) for part in (csr.crow_indices, csr.col_indices))
        values = dense(np.frombuffer(csr.values, kind), rows, columns, tensor.shape, bounds)
    else:
        values = np.frombuffer(tensor.dense, kind)
        values = values.reshape(list(tensor.shape)) if tensor.shape else values
    return values.astype(np.int64 if values.dtype.kind == "i" else np.float32)


MAX_DENSE = 2**24
"""Maximum dense values of a request's sparse tensors: a large shape costs the client nothing."""


def dense(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Any, bounds: tuple[int, int] | None = None
) -> np.ndarray:
    """Build a dense [n, k] tensor from compressed sparse rows; refuse a shape outside ``bounds`` before it is allocated."""
    sizes = [int(size) for size in shape]
    if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] > MAX_DENSE:
        raise DataError(f"a sparse tensor of shape {sizes}; expected two dimensions and at most {MAX_DENSE} values")
    if bounds is not None and (sizes[0] != bounds[0] or sizes[1] > bounds[1]):
        raise DataError(f"a sparse tensor of shape {sizes}; expected [{bounds[0]}, k], k from 1 to {bounds[1]}")
    counts = np.diff(rows)
    fits = (
        len(rows) == sizes[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns) and (counts >= 0).all()
    )
    if not fits or (len(columns) and not (columns.min() >= 0 and columns.max() < sizes[1])):
        raise DataError("the indices of a sparse tensor do not fit its shape and its values")
    tensor = np.zeros(sizes, values.dtype)
    tensor[np.repeat(np.arange(sizes[0]), counts), columns] = values
    return tensor
