"""Write models of configurations with random weights and compute their log-probabilities with transformers. A script:

python field_references.py < JOB

JOB: JSON list of ``folder``, ``config`` and ``in_training`` of each. Each folder gets a checkpoint with the configuration as JOB
has it, and ``reference.json``: ``logprobs`` of :func:`samples`, or the ``problem`` why transformers cannot compute the model.
"""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TEXT = [(7 * i * i + 3 * i + 5) % 300 + 3 for i in range(41)]
SIDE = 12
"""Patches in a row and in a column of the image; multiples of every ``spatial_merge_size`` that is tried."""


@dataclass(frozen=True)
class Tokens:
    """A sample: its tokens, and of one with an image the patches [n, width], which have the grid 1 x SIDE x SIDE."""

    ids: list[int]
    patches: torch.Tensor | None = None


def takes_images(config: dict[str, Any]) -> bool:
    """Check whether engines build the tower of a configuration; that of Kimi-K2.5, which has other sizes, is only copied."""
    return "spatial_merge_size" in config.get("vision_config", {})


def samples(config: dict[str, Any]) -> list[Tokens]:
    """Return two texts of different lengths; of a model with images the second has one."""
    short = TEXT[5:22]
    if not takes_images(config):
        return [Tokens(TEXT), Tokens(short)]
    vision = config["vision_config"]
    width = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    features = [config["image_token_id"]] * (SIDE // vision["spatial_merge_size"]) ** 2
    image = [config["vision_start_token_id"], *features, config["vision_end_token_id"]]
    patches = torch.randn(SIDE**2, width, generator=torch.Generator().manual_seed(0))
    return [Tokens(TEXT), Tokens([*short[:2], *image, *short[2:]], patches)]


def fill(model: Any) -> None:
    """Draw weights by their names, so that those of two variants are equal where their shapes are."""
    tensors = dict(model.named_parameters())
    # Correction biases of routers are buffers in some families.
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if name.endswith("bias"):
            value = 0.1 * noise
        elif name.endswith("A_log"):
            value = 0.5 * noise - 2.0
        elif tensor.ndim == 1:
            value = 0.2 * noise + (1.0 if tensor.any() else 0.0)  # norms whose weight is an offset from 1 start at 0
        elif "embed" in name or "lm_head" in name:
            value = 0.25 * noise
        else:
            value = noise * (2.0 if name.endswith("gate.weight") else 1.0) / tensor.shape[-1] ** 0.5
        tensor.copy_(value)


def logprobs(model: Any, config: dict[str, Any]) -> torch.Tensor:
    """Return the log-probabilities of the samples' targets that are not features of images, one after the other."""
    image, values = config.get("image_token_id", -1), []
    for sample in samples(config):
        ids = torch.tensor([sample.ids])
        inputs: dict[str, Any] = {}
        if takes_images(config):
            inputs = {"mm_token_type_ids": (ids[:, :-1] == image).int()}
        if sample.patches is not None:
            inputs |= {"pixel_values": sample.patches, "image_grid_thw": torch.tensor([[1, SIDE, SIDE]])}
        logits = model(input_ids=ids[:, :-1], use_cache=False, return_dict=True, **inputs).logits[0]
        chosen = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        values.append(chosen[ids[0, 1:] != image])
    return torch.cat(values)


@torch.no_grad()
def reference(folder: Path, config: dict[str, Any], in_training: bool) -> dict[str, Any]:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loader = AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM
    model = loader.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").float().eval()
    fill(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    values = logprobs(model, config)
    acts = in_training and not torch.equal(values, logprobs(model.train(), config))
    return {"logprobs": values.tolist(), "acts_in_training": acts}


def main() -> None:
    torch.set_num_threads(1)
    for job in json.load(sys.stdin):
        folder = Path(job["folder"])
        try:
            result = reference(folder, job["config"], job["in_training"])
        except Exception as error:  # noqa: BLE001  any exception of transformers' code: no model of transformers
            result = {"problem": f"{type(error).__name__}: {error}"}
        (folder / "reference.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
