"""Where the tokens of a sample come from, as clients say it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megascend.errors import DataError


@dataclass(frozen=True)
class Span:
    """Tokens [offset, offset + length) of a sequence's prompt, or of what was sampled after it.

    Attributes:
        sequence: its id, which the client has from its request to sample.
    """

    sequence: str
    offset: int
    length: int
    sampled: bool


def spans_of_message(datum: Any) -> tuple[list[Span], list[Span]]:
    """Of a protobuf ``Datum``: the spans of its tokens and of its targets. Clients from before they were known send none.

    Raises:
        DataError: a span names nothing.
    """
    known = datum.DESCRIPTOR.fields_by_name
    fields = ("model_input_spans", "loss_fn_input_spans")
    found = [[_span(each) for each in getattr(datum, name)] if name in known else [] for name in fields]
    return found[0], found[1]


def _span(message: Any) -> Span:
    kind = message.WhichOneof("span")
    if kind is None:
        raise DataError("a provenance span says neither prompt_tokens nor sampled_tokens")
    part = getattr(message, kind)
    return Span(part.sequence_id, part.offset, part.length, kind == "sampled_tokens")
