"""Rewards of the example: how much of the answer is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sorted_digits(response: str, example: Mapping[str, Any]) -> float:
    """Share of characters that are those of the answer, at their places."""
    answer = example["answer"]
    right = sum(mine == theirs for mine, theirs in zip(response, answer, strict=False))
    return right / max(len(answer), len(response))
