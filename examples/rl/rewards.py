"""Reward of the example: the share of the answer that is correct."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sorted_digits(response: str, example: Mapping[str, Any]) -> float:
    """Return the share of characters that equal the answer's at the same position."""
    answer = example["answer"]
    right = sum(token == expected for token, expected in zip(response, answer, strict=False))
    return right / max(len(answer), len(response))
