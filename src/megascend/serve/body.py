"""Bodies of requests, opened within bounds: compressed ones, and protobuf messages before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megascend.serve.errors import RequestRefusedError

MAX_WINDOW = 8 * 2**20
"""Most memory that opening a zstd frame may take: what every encoder stays within unless it is told otherwise (RFC 8878)."""

STEP = 512
"""Bytes that are opened at a time: at most 128 KiB come of four, so that no step gives more than 16 MiB."""


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """A body as it was before it was compressed, at most ``limit`` bytes.

    Raises:
        RequestRefusedError: 413, it is larger; 415, an encoding other than zstd or identity; 400, it is damaged.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestRefusedError(f"Content-Encoding {encoding[:40]!r} is not supported; use zstd, or none", 415)
    import zstandard

    try:
        opener = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
        parts, size = [], 0
        for start in range(0, len(body), STEP):
            if opener.eof:
                raise RequestRefusedError("the body has something after its zstd frame")
            parts.append(opener.decompress(body[start : start + STEP]))
            size += len(parts[-1])
            if size > limit:
                raise RequestRefusedError(f"the body has more than {limit} bytes when it is opened", 413)
    except zstandard.ZstdError as error:
        raise RequestRefusedError(f"the body is no zstd frame that this server opens: {error}") from None
    if not opener.eof:
        raise RequestRefusedError("the body ends within its zstd frame")
    return b"".join(parts)


MAX_CONTAINERS = 2**18
"""Most objects and arrays in a body of JSON: an empty one takes two bytes there and 64 in memory."""


def check_json(body: bytes) -> None:
    """Count what may begin an object or array before a parser makes one of each. Brackets in texts count, too.

    Raises:
        RequestRefusedError: 413; there are too many.
    """
    if body.count(b"{") + body.count(b"[") > MAX_CONTAINERS:
        raise RequestRefusedError(f"the body holds more than {MAX_CONTAINERS} objects and arrays", 413)


Schema = Mapping[int, "Schema | None"]
"""Of a protobuf message: by the numbers of its fields that hold messages, those messages' own; None: numbers in a row."""

MAX_DEPTH = 16


def schema_of(descriptor: Any) -> Schema:
    """Of a message that the client's package describes, with those in it."""
    return _schema(descriptor, MAX_DEPTH)


def _schema(descriptor: Any, depth: int) -> Schema:
    found: dict[int, Schema | None] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            found[field.number] = _schema(field.message_type, depth - 1) if depth else {}
        elif _is_repeated(field) and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
            found[field.number] = None
    return found


def _is_repeated(field: Any) -> bool:
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED  # protobuf < 6


def check_message(body: bytes, schema: Schema, limit: int) -> None:
    """Count the fields in a protobuf body before a parser makes something of each.

    An empty message takes two bytes there, a number in a row one.

    Args:
        limit: most fields, those of messages in messages included.

    Raises:
        RequestRefusedError: 413, there are more; 400, this is no protobuf message.
    """
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
                    raise RequestRefusedError("the body is no protobuf message: it ends within a field")
                of_field = inside.get(tag >> 3, {})
                if of_field:
                    waiting.append((of_field, position, position + length))
                elif of_field is None:
                    count += _numbers(body, position, position + length)
                position += length
            elif kind == 0:
                _, position = _varint(body, position, end)
            elif kind in (1, 5):
                position += 8 if kind == 1 else 4
            else:
                raise RequestRefusedError(f"the body is no protobuf message: wire type {kind}")
            if count > limit:
                raise RequestRefusedError(f"the request holds more than {limit} samples and pieces of samples", 413)


def _numbers(body: bytes, start: int, end: int) -> int:
    """How many numbers there are in a row, at most: each has one byte below 128, or is written in four or more."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8, end - start, start) < 0x80)) if end > start else 0


def _varint(body: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise RequestRefusedError("the body is no protobuf message: it ends within a number")
