"""Candidate tokens of a position: their ids, and a teacher's log-probabilities of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascend.errors import DataError

MASS_TOLERANCE = 0.02
"""Amount by which the sum of a row's probabilities may exceed 1, as that of log-probabilities rounded to 16 bits does."""


@dataclass(eq=False)
class Candidates:
    """A teacher's distribution over each target of a sample, at its likeliest tokens.

    Attributes:
        ids: integers [length, K], token ids, each once in a row; -1: an unused slot.
        logprobs: float32 [length, K], the teacher's log-probabilities, normalised over its whole vocabulary. 0 at unused slots.

    Raises:
        DataError: shapes differ, an id appears twice in a row, or a row holds no log-probabilities.
    """

    ids: Any
    logprobs: Any

    def __post_init__(self) -> None:
        self.ids = id_rows(self.ids, "candidates.ids")
        logprobs = as_tensor(self.logprobs, "candidates.logprobs", torch.float32)
        if logprobs.shape != self.ids.shape:
            raise DataError(
                f"candidates.logprobs has shape {list(logprobs.shape)}, and candidates.ids {list(self.ids.shape)}"
            )
        # Unused slots may hold any values: they are set to 0 before the values are checked.
        used = self.ids >= 0
        self.logprobs = torch.where(used, logprobs, 0.0)
        wrong = ~self.logprobs.isfinite() | (self.logprobs > MASS_TOLERANCE)
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise DataError(
                f"candidates.logprobs[{row}][{column}] is {float(self.logprobs[row, column])}; log-probabilities are finite and "
                "at most 0"
            )
        # Negative scores that were never normalised look like log-probabilities; a sum above 1 gives them away.
        mass = torch.where(used, self.logprobs.exp(), 0.0).sum(1)
        if len(mass) and float(mass.max()) > 1 + MASS_TOLERANCE:
            raise DataError(
                f"candidates.logprobs[{int(mass.argmax())}] are of probabilities that sum to {float(mass.max()):.3f}, above 1: "
                "they must be normalised over the teacher's vocabulary, at temperature 1"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_rows(cls, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> Candidates:
        """Build from rows of different lengths, which may be empty."""
        if [len(row) for row in ids] != [len(row) for row in logprobs]:
            raise DataError("rows of candidates' ids and log-probabilities have different lengths")
        width = max(1, *(len(row) for row in ids)) if ids else 1
        return cls(
            [[*row, *[-1] * (width - len(row))] for row in ids],
            [[*row, *[0.0] * (width - len(row))] for row in logprobs],
        )

    def __getitem__(self, rows: slice) -> Candidates:
        """Return the candidates of some positions."""
        return Candidates(self.ids[rows], self.logprobs[rows])


def as_tensor(values: Any, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Convert ``values`` of a sample's field ``name`` to a tensor on the CPU."""
    try:
        return torch.as_tensor(values, dtype=dtype, device="cpu").detach()
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f"{name} cannot become a tensor: {error}") from None


def id_rows(values: Any, name: str) -> Tensor:
    """Convert rows of token ids to int32 [length, K] on the CPU."""
    ids = as_tensor(values, name)
    if ids.dim() != 2 or not ids.shape[1] or ids.is_floating_point() or ids.dtype == torch.bool:
        raise DataError(f"{name} must be integers of shape [length, K], got {ids.dtype} {list(ids.shape)}")
    if len(ids) and not -1 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise DataError(f"{name} has {int(ids.min())} to {int(ids.max())}; ids are 0 or more, and -1 at unused slots")
    ordered = ids.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        row, column = twice.nonzero()[0].tolist()
        raise DataError(f"{name}[{row}] has the token {int(ordered[row, column])} twice")
    return ids.to(torch.int32)


def same_width(rows: Sequence[Tensor], padding: float) -> list[Tensor]:
    """Return tensors [length, K] padded to the largest K."""
    width = max(row.shape[1] for row in rows)
    return [F.pad(row, (0, width - row.shape[1]), value=padding) for row in rows]


def allowed_rows(before: int, allowed: Sequence[Sequence[int]]) -> Tensor:
    """Return the ids that each target was drawn from, int32 [before + targets, A]; -1: unused slots, and whole rows before."""
    width = max(1, *(len(ids) for ids in allowed))
    rows = [[-1] * width] * before + [[*ids, *[-1] * (width - len(ids))] for ids in allowed]
    return id_rows(rows, "allowed")
