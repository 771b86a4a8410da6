"""A log of the fused operators that a program called, with what they were given.

In a test::

    with call_log.recording() as calls:
        model(batch)
    assert calls[0].name == "npu_fusion_attention" and calls[0].arguments["sparse_mode"] == 2

For processes that a test cannot look into, ``SIMNPU_LOG=<folder>`` makes every process append its calls to
``<folder>/rank<RANK>-<pid>.jsonl``, one JSON object a line. A call is logged before its arguments are checked, so the
last line of a failed run is the call that the kernel refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from simnpu import settings

MANY = 64  # elements of a list that are logged; sequence lengths of one micro batch fit


@dataclass(frozen=True)
class TensorArgument:
    """Description of a tensor in the log: shape, dtype and device, never its values."""

    shape: tuple[int, ...]
    dtype: str
    device: str

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorArgument:
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device))


@dataclass(frozen=True)
class Call:
    """One operator call: its name, and its arguments by name with tensors as :class:`TensorArgument`."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class CallLog:
    """Listeners to calls: lists opened by :func:`recording`, and this process's log file if one is configured."""

    def __init__(self) -> None:
        self.listeners: list[list[Call]] = []

    def add(self, name: str, arguments: Mapping[str, Any]) -> None:
        folder = os.environ.get(settings.LOG_VARIABLE)
        if not (self.listeners or folder):
            return
        call = Call(name, {key: describe(value) for key, value in arguments.items() if value is not None})
        for listener in self.listeners:
            listener.append(call)
        if folder:
            path = Path(folder) / f"rank{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(call)) + "\n")


LOG = CallLog()


def describe(value: Any) -> Any:
    """``value`` as it goes into the log: plain data."""
    if isinstance(value, torch.Tensor):
        return TensorArgument.from_tensor(value)
    if isinstance(value, (list, tuple)):
        items = [describe(item) for item in value[:MANY]]
        return items if len(value) <= MANY else [*items, f"... {len(value)} in all"]
    if isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Record the calls made inside the ``with`` block, in order; the list fills while the block runs."""
    calls: list[Call] = []
    LOG.listeners.append(calls)
    try:
        yield calls
    finally:
        LOG.listeners = [listener for listener in LOG.listeners if listener is not calls]
