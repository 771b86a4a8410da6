"""TransformersEngine: what engines that run transformers' own models have in common."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megascend.engines.adamw import MainAdamW
from megascend.engines.base import Engine
from megascend.engines.heads import plain_slice
from megascend.selfcheck.check import require_agreement_here
from megascend.selfcheck.in_process import Subject


class TransformersEngine(Engine):
    """An engine whose model is a module of transformers.

    Attributes:
        model: transformers' causal language model, or its token classifier where there is a scalar head.
        optimizer: of the model's own parameters; None where adapters are trained.
    """

    model: Any
    optimizer: MainAdamW | None = None

    def check_slice(self, config: Any, subject: TransformersSubject, *, enabled: bool) -> None:
        """Compare a slice of the model, computed as by this engine, with transformers. Collective.

        Args:
            config: the model's, in transformers' class.
            enabled: otherwise nothing is compared, and the verdict says so.

        Raises:
            SelfCheckError, ConfigError: on every rank: they disagree, or the engine cannot compute the model.
        """
        began = time.monotonic()
        self.self_check = require_agreement_here(
            self.model_dir, config, self.max_length, self.groups, subject, enabled=enabled
        )
        self.self_check_s = time.monotonic() - began

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro batch, with the loss scale of fp16."""
        scale = 1.0 if self.optimizer is None else self.optimizer.loss_scale
        with self.groups.monitor.phase("backward"):
            (loss if scale == 1 else loss * scale).backward()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()


class TransformersSubject(Subject):
    """A small model as such an engine computes it, beside transformers' own."""

    def plain(self, config: Any) -> Any:
        return plain_slice(config, self.scalar_head)
