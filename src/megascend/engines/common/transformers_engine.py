"""TransformersEngine: common base of the engines that run transformers' own models."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megascend.engines.base import Engine
from megascend.engines.common import linear_attention
from megascend.engines.common.adamw import MainAdamW, WeightMap
from megascend.engines.common.heads import plain_slice
from megascend.engines.context import EngineSpec
from megascend.models.selfcheck.check import require_agreement_in_process
from megascend.models.selfcheck.in_process import Subject
from megascend.models.selfcheck.trial_inputs import ImageTokens
from megascend.training.batch.images import SampleImages, joined, positions


class TransformersEngine(Engine):
    """An engine whose model is a module of transformers.

    Attributes:
        model: transformers' causal language model, or its token classifier for a scalar head.
        optimizer: optimizer of the model's own parameters; None if adapters are trained.
    """

    model: Any
    optimizer: MainAdamW | None = None

    def check_slice(self, config: Any, subject: TransformersSubject, *, enabled: bool) -> None:
        """Compare a slice of the model, as this engine computes it, with transformers. Collective.

        Args:
            config: the model's, in transformers' class.
            enabled: if False, nothing is compared, and the verdict is "off".
        """
        start = time.monotonic()
        self.self_check = require_agreement_in_process(
            self.model_dir, config, self.max_length, self.groups, subject, enabled=enabled
        )
        self.self_check_s = time.monotonic() - start

    def weight_map(self, spec: EngineSpec) -> WeightMap:
        """Return Hugging Face's weights in the model's parameters, for the optimizer."""
        return WeightMap(self.info, spec.vision_tower, self.groups, self.hf_slices, self.kind)

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
    """Self-check subject of a transformers-based engine; its reference is transformers' own model."""

    def plain(self, config: Any) -> Any:
        return plain_slice(config, self.scalar_head)

    @staticmethod
    def image_arguments(
        samples: Sequence[Tensor], rows: Tensor, images: ImageTokens, packed: bool
    ) -> dict[str, Tensor]:
        """Return positions and images of samples as an engine passes them to the model, in place of plain positions."""
        trial = map(images.images, samples)
        present = [None if parts is None else SampleImages(*parts) for parts in trial]
        parts = [
            positions(ids, None if item is None else item.grids, images.layout)
            for ids, item in zip(samples, present, strict=True)
        ]
        if packed:
            position_ids = torch.cat(parts, 1)[:, None]
        else:  # of padding, 0
            width = rows.shape[1]
            position_ids = torch.stack([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts], 1)
        batch = joined(present, rows.device)
        pixels = {} if batch is None else {"pixel_values": batch.pixel_values, "image_grid_thw": batch.grids}
        return {"position_ids": position_ids, **pixels}

    def on_the_cpu(self, plain: Any) -> contextlib.AbstractContextManager[None]:
        return linear_attention.on_the_cpu(plain)
