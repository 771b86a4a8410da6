"""Whether a response has come to its end. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megascend.sampling.request import Stop

Decode = Callable[[Sequence[int]], str]

MARGIN = 8
"""Tokens before those that a text can take, so that a character which is cut at the first of them is none of its own."""


def ends(tokens: Sequence[int], stops: Sequence[Stop], decode: Decode | None) -> bool:
    """Whether the newest of ``tokens`` completes one of ``stops``; asked after every token.

    Args:
        tokens: of the response, not of its prompt.
        decode: token ids to text, with special tokens; needed for stops that are texts.
    """
    if any(_ends(tokens, stop) for stop in stops if not isinstance(stop, str)):
        return True
    texts = [stop for stop in stops if isinstance(stop, str)]
    if not texts:
        return False
    assert decode is not None, "requests with texts are refused where there is no tokenizer"
    # No text takes more tokens than it has bytes; what came before was looked at after earlier tokens.
    window = decode(list(tokens[-(max(len(text.encode(errors="surrogatepass")) for text in texts) + MARGIN) :]))
    return any(text in window for text in texts)


def _ends(tokens: Sequence[int], stop: int | tuple[int, ...]) -> bool:
    if isinstance(stop, int):
        return bool(tokens) and tokens[-1] == stop
    return len(tokens) >= len(stop) and tuple(tokens[-len(stop) :]) == stop
