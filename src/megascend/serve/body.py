"""Bodies of requests, opened within bounds: compressed ones, and protobuf messages before anything is made of them."""

from __future__ import annotations

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


def check_message(body: bytes, repeated: dict[int, tuple[int, ...]], limit: int) -> None:
    """Count the messages in a protobuf body before a parser makes an object of each: an empty one takes two bytes there.

    Args:
        repeated: numbers of the top level's fields that hold messages, and of these messages' own that do.
        limit: most messages.

    Raises:
        RequestRefusedError: 413, there are more; 400, this is no protobuf message.
    """
    count = 0
    for number, start, end in _fields(body, 0, len(body)):
        if number not in repeated:
            continue
        count += 1 + sum(inner in repeated[number] for inner, _, _ in _fields(body, start, end, limit))
        if count > limit:
            raise RequestRefusedError(f"the request holds more than {limit} samples and pieces of samples", 413)


def _fields(body: bytes, position: int, end: int, limit: int | None = None):
    """(number, start, end) of every length-delimited field in a part of a message; its other fields are passed over."""
    seen = 0
    while position < end:
        tag, position = _varint(body, position, end)
        kind = tag & 7
        seen += 1
        if limit is not None and seen > limit:
            raise RequestRefusedError(f"a sample holds more than {limit} pieces", 413)
        if kind == 2:
            length, position = _varint(body, position, end)
            if position + length > end:
                raise RequestRefusedError("the body is no protobuf message: it ends within a field")
            yield tag >> 3, position, position + length
            position += length
        elif kind == 0:
            _, position = _varint(body, position, end)
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise RequestRefusedError(f"the body is no protobuf message: wire type {kind}")


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
