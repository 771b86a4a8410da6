"""Self-check of the FSDP2 engine: a slice of the model, as the engine computes it, compared with transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascend.engines.common import linear_attention
from megascend.engines.common.heads import plain_slice
from megascend.engines.common.rotary import RotaryByLength
from megascend.engines.fsdp import attention, transformers_api
from megascend.engines.fsdp.output_head import check_product
from megascend.engines.fsdp.token_mixing import pass_borders
from megascend.models.checkpoint_files.scalar_head import ScalarHead
from megascend.models.selfcheck.in_process import Subject
from megascend.models.selfcheck.trial_inputs import ImageTokens
from megascend.training.batch.images import SampleImages, joined, positions


def engine_name(sharded: bool) -> str:
    """Return the name of this engine in run files and checkpoints."""
    return "fsdp" if sharded else "single"


class FsdpSubject(Subject):
    """Self-check subject: a small model as the FSDP2 engine computes it, on the CPU; its reference is transformers' own.

    Args:
        scalar_head: head that replaces a causal language model's output layer, or None.
        packing: samples share a row.
        context: context parallel size; above 1 the model must know the samples' borders, so the slice is packed.
        npu: products of experts use the NPU's operator in this process; the slice, on the CPU, uses transformers' own.
        sharded: False for engine ``single``, which never packs.
    """

    def __init__(
        self, scalar_head: ScalarHead | None, *, packing: bool, context: int, npu: bool, sharded: bool = True
    ) -> None:
        super().__init__(scalar_head)
        self.engine, self._sharded, self._npu = engine_name(sharded), sharded, npu
        self.packing = (packing or context > 1) and sharded
        if sharded:
            self.remedy = "set batching.packing: false" + (" and parallel.context: 1" if context > 1 else "")

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

    def build(self, config: Any) -> Any:
        unsharded = None if self._sharded else torch.float32
        model = transformers_api.engine_model(
            config, self.scalar_head, config.get_text_config().vocab_size, unsharded=unsharded
        )
        if self._npu and transformers_api.has_experts(model):
            transformers_api.use_experts(model.config, "eager", "a slice on the CPU has no operator of the NPU's")
        self._rotary = RotaryByLength(model)
        if self.packing:
            pass_borders(model)
        return model

    def logits(self, model: Any, samples: Sequence[Tensor], images: ImageTokens | None = None) -> list[Tensor]:
        lengths = [len(ids) for ids in samples]
        total = max(lengths)
        ids = [ids if self.packing else torch.nn.functional.pad(ids, (0, total - len(ids))) for ids in samples]
        rows = torch.cat(ids)[None] if self.packing else torch.stack(ids)
        ranges = [torch.arange(len(sample)) for sample in ids]
        sample_index = torch.cat([torch.full_like(sample, index) for index, sample in enumerate(ranges)])
        self._rotary.enter_samples(sample_index.view(rows.shape), lengths)
        options: dict[str, Any] = {}
        if self._sharded:
            packed = tuple(lengths) if self.packing else None
            options[attention.KEYWORD] = attention.sample_lengths(packed, None, rows.device, torch.float32)
        options["position_ids"] = torch.cat(ranges).view(rows.shape)
        if images is not None:
            options |= self.image_arguments(samples, rows, images, self.packing)
        # The head's product is replaced by the engine's own, chunked one: a model that scales or caps its logits
        # afterwards would silently lose that.
        logits = check_product(model, sharded=self._sharded, input_ids=rows, **options)
        if (cap := model.logit_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        parts = logits.flatten(0, 1).split([len(sample) for sample in ids])
        return [part[:length].float() for part, length in zip(parts, lengths, strict=True)]
