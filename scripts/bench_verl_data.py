"""The data set of ``bench_verl.py``, which verl loads from this file (``data.custom_cls``)."""

from __future__ import annotations

from typing import Any

import torch


class RandomTokens:
    """Sequences of random tokens, small ids more frequent, as ``data.bench`` says."""

    def __init__(self, config: Any, **_: Any) -> None:
        about = config.bench
        generator = torch.Generator().manual_seed(about.seed)
        lengths = torch.randint(about.shortest, about.longest + 1, (about.sequences,), generator=generator).tolist()
        uniform = [torch.rand(length, generator=generator, dtype=torch.float64) for length in lengths]
        self._rows = [(about.vocabulary * numbers**3).long() for numbers in uniform]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._rows[index]
        mask = torch.ones_like(tokens)
        mask[0] = 0
        return {"input_ids": tokens, "position_ids": torch.arange(len(tokens)), "loss_mask": mask}
