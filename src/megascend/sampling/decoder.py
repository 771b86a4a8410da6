"""What the sampler knows of how the logits of the next token come about."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from megascend.sampling.rows import Row


class Decoder(AbstractContextManager["Decoder"], Protocol):
    """The model on the rows of one batch, from its first token to its last.

    Entered before some of the tokens and left after them, on all ranks; outside, the model is free for other things.
    """

    def logits(self, rows: Sequence[Row]) -> Tensor | None:
        """fp32 [rows, vocabulary] on the CPU: what follows each row's prompt and response so far. Collective.

        None where the logits do not come out (pipeline stages before the last), or there are no rows.

        Args:
            rows: this data parallel rank's that are not done; perhaps none. From one call to the next each has one token more,
                and rows that are done are left out; none is new, and their order stays.
        """
        ...
