"""Samples with images for tiny models of the Qwen3-VL family, and the same for the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megascend.config import Adapters, Lora
from megascend.runtime.io.shared import cached
from megascend.testing import run_distributed
from megascend.testing.parity import PROMPT, Case, case_backend, hf_reference, token_lists
from megascend.training.batch.images import SampleImages
from megascend.training.batch.sample import Sample
from support.lora_parity import write_adapter

START, END, TOKEN = 312, 313, 314
PATCH_WIDTH = 3 * 2 * 4 * 4
MERGE = 2
GRIDS = ([(1, 4, 6)], [(1, 4, 4), (1, 2, 6)], [], [(1, 8, 4)], [], [(1, 2, 2), (1, 2, 2), (1, 4, 2)], [], [(1, 6, 4)])
"""Of the images of each sample: none, one or several, tall and wide."""
TOWER = "model.visual."


def with_images(tokens: list[int], grids: list[tuple[int, int, int]]) -> list[int]:
    """Return tokens with those of images after the second, fifth and eighth."""
    tokens = list(tokens)
    for number, (frames, height, width) in reversed(list(enumerate(grids))):
        position = 2 + 3 * number
        tokens[position:position] = [START, *[TOKEN] * (frames * height * width // MERGE**2), END]
    return tokens


def image_tokens() -> list[list[int]]:
    """Return the token ids of every sample."""
    return [with_images(ids, grids) for ids, grids in zip(token_lists(), GRIDS, strict=True)]


def pixels(seed: int = 0) -> list[torch.Tensor | None]:
    """Return the patches of every sample's images."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(t * h * w for t, h, w in grids), PATCH_WIDTH, generator=generator) if grids else None
        for grids in GRIDS
    ]


def weights_of(tokens: list[int]) -> list[float]:
    """Return weights of the targets: 0 for the prompt and for images."""
    return [float(number >= PROMPT and token != TOKEN) for number, token in enumerate(tokens)][1:]


def image_samples(seed: int = 0) -> list[Sample]:
    """Return the samples, some with images."""
    return [
        Sample.causal(
            tokens,
            weights=[0.0, *weights_of(tokens)],
            images=None if patches is None else SampleImages(patches, torch.tensor(grids)),
        )
        for tokens, grids, patches in zip(image_tokens(), GRIDS, pixels(seed), strict=True)
    ]


def image_fields() -> list[dict[str, Any]]:
    """Return what the references get of each sample beside its tokens."""
    fields: list[dict[str, Any]] = []
    for tokens, grids, patches in zip(image_tokens(), GRIDS, pixels(), strict=True):
        images = {} if patches is None else {"pixel_values": patches.tolist(), "grids": [list(grid) for grid in grids]}
        fields.append({"weights": weights_of(tokens), **images})
    return fields


def image_reference(folder: Path, checkpoint: Path, *, frozen: bool, steps: int, **options: Any) -> Any:
    """Return the trajectory of transformers' model on the same samples."""
    return hf_reference(
        folder,
        checkpoint,
        image_tokens(),
        steps,
        fields=image_fields(),
        image_token=TOKEN,
        frozen=[TOWER] if frozen else [],
        **options,
    )


def tower_adapter(checkpoint: Path, seed: int, targets: Any = "all-linear") -> Path:
    """Return an adapter with factors that are all not zero, made once for a checkpoint and these targets."""
    kind = "all" if targets == "all-linear" else "-".join(targets)

    def write(path: Path) -> None:
        def on_rank() -> None:
            with case_backend(Case("single"), checkpoint, adapters=Adapters(), vision_tower="train") as backend:
                write_adapter(backend, path, Lora(rank=4 + 4 * seed, alpha=12.0, seed=seed, targets=targets))

        run_distributed(on_rank, 1, init=False, timeout_s=120)

    return cached(checkpoint.parent / f"{checkpoint.name}-tower-adapter-{kind}-{seed}", write)
