"""The output projection with its softmax, chunk by chunk (:mod:`megascend.kernels.linear_logprobs`)."""

from __future__ import annotations

from megascend.memory.activations import FP32, LayerKind

CHUNK_BYTES = 5 * 2**28
"""As in :mod:`megascend.kernels.linear_logprobs`, which needs torch; a test holds the two together."""


def head_bytes(hidden: int, rows: int, tokens: float, kind: LayerKind, *, trained: bool) -> float:
    """Logits of a chunk and what is computed from them, and the gradient of the hidden states.

    Args:
        rows: of the output layer on this rank.
        tokens: that the rank holds.
        trained: the output layer has a gradient.
    """
    chunk = min(tokens, max(128, CHUNK_BYTES // (kind.bytes * max(rows, 1)) // 128 * 128))
    logits = kind.bytes * chunk * rows
    if not kind.fused:
        # Plain softmax: an fp32 copy unless they are fp32, the difference to the maximum and its exponential; later, the
        # product of the weight's gradient before it is added.
        softmax = (3 if kind.wide else 2) * FP32 * chunk * rows
        product = kind.bytes * rows * hidden if trained and kind.wide else 0
        logits += max(softmax, product)
    return logits + kind.bytes * hidden * tokens
