"""What a future has given, or a remembered response, as an entry of the journal, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from megascend.serve.errors import Failure
from megascend.serve.futures import Future
from megascend.serve.journal import Entry
from megascend.serve.sequences import RecordedSequence
from megascend.serve.wire import TrainAnswer


def answer_entry(future: Future) -> Entry:
    """Of a future of a model's request that has ended."""
    values: dict[str, Any] = {
        "model": future.model, "tenant": future.tenant, "name": future.name, "kind": future.kind,
        "number": future.number_in_line,
    }  # fmt: skip
    body = b""
    if future.failure is not None:
        values["failure"] = [future.failure.message, future.failure.category]
    elif isinstance(future.answer, TrainAnswer):
        arrays = [np.ascontiguousarray(each, np.float32) for each in future.answer.logprobs]
        values |= {"metrics": dict(future.answer.metrics), "shapes": [list(each.shape) for each in arrays]}
        body = b"".join(each.tobytes() for each in arrays)
    else:
        values["answer"] = future.answer
    return Entry("answer", values, body)


def answer_of(entry: Entry) -> tuple[Any, Failure | None]:
    """(answer, failure) of an entry with its body, one of them None."""
    values = entry.values
    if "failure" in values:
        return None, Failure(*values["failure"])
    if "shapes" not in values:
        return values["answer"], None
    flat, start, arrays = np.frombuffer(entry.body, np.float32), 0, []
    for shape in values["shapes"]:
        size = int(np.prod(shape))
        arrays.append(flat[start : start + size].reshape(shape))
        start += size
    return TrainAnswer(arrays, values["metrics"]), None


def sequence_entry(name: str, found: RecordedSequence) -> Entry:
    """Of a response that training requests may name."""
    values = {"session": found.session, "sequence": name, "prompt": len(found.prompt)}
    parts = (found.prompt.astype(np.int32), found.tokens.astype(np.int32), found.logprobs.astype(np.float32))
    return Entry("sequence", values, b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def sequence_of(entry: Entry, body: bytes) -> RecordedSequence:
    """The inverse of :func:`sequence_entry`."""
    prompt = entry.values["prompt"]
    tokens = (len(body) // 4 - prompt) // 2
    ids = np.frombuffer(body, np.int32, prompt + tokens).astype(np.int64)
    logprobs = np.frombuffer(body, np.float32, tokens, 4 * (prompt + tokens))
    return RecordedSequence(entry.values["session"], ids[:prompt], ids[prompt:], logprobs, 0.0)
