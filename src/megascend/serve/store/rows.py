"""Answers of futures and recorded responses as rows of the database, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from megascend.serve.errors import Failure
from megascend.serve.scheduler.futures import Future
from megascend.serve.sequences import RecordedSequence
from megascend.serve.store.database import StoredRow
from megascend.serve.wire import TrainAnswer


def answer_row(future: Future) -> StoredRow:
    """Encode the outcome of a model's request."""
    values: dict[str, Any] = {"kind": future.kind}
    body = b""
    if future.failure is not None:
        values["failure"] = [future.failure.message, future.failure.category]
    elif isinstance(future.answer, TrainAnswer):
        arrays = [np.ascontiguousarray(each, np.float32) for each in future.answer.logprobs]
        values |= {"metrics": dict(future.answer.metrics), "shapes": [list(each.shape) for each in arrays]}
        body = b"".join(each.tobytes() for each in arrays)
    else:
        values["answer"] = future.answer
    return StoredRow("answer", future.name, values, body, future.model, future.number_in_line)


def answer_of(row: StoredRow) -> tuple[Any, Failure | None]:
    """Decode :func:`answer_row`: (answer, failure), one of them None."""
    values = row.values
    if "failure" in values:
        return None, Failure(*values["failure"])
    if "shapes" not in values:
        return values["answer"], None
    flat, start, arrays = np.frombuffer(row.body, np.float32), 0, []
    for shape in values["shapes"]:
        size = int(np.prod(shape))
        arrays.append(flat[start : start + size].reshape(shape))
        start += size
    return TrainAnswer(arrays, values["metrics"]), None


def sequence_row(name: str, sequence: RecordedSequence) -> StoredRow:
    """Encode a response that training requests may name."""
    parts = (sequence.prompt.astype(np.int32), sequence.tokens.astype(np.int32), sequence.logprobs.astype(np.float32))
    body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    return StoredRow("sequence", name, {"prompt": len(sequence.prompt)}, body, sequence.session)


def sequence_of(row: StoredRow) -> RecordedSequence:
    """Decode :func:`sequence_row`."""
    assert row.parent is not None
    prompt = row.values["prompt"]
    tokens = (len(row.body) // 4 - prompt) // 2
    ids = np.frombuffer(row.body, np.int32, prompt + tokens).astype(np.int64)
    logprobs = np.frombuffer(row.body, np.float32, tokens, 4 * (prompt + tokens))
    return RecordedSequence(row.parent, ids[:prompt], ids[prompt:], logprobs, 0.0)
