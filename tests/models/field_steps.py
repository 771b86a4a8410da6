"""Compute models of configurations on an engine, one process for all. A script for engines without Megatron:

python field_steps.py ENGINE RESULT < JOB

JOB: JSON list of folders that ``field_references.py`` has written. RESULT is a JSON file with what became of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from field_references import SIDE, Tokens, samples, takes_images

import megascend
from megascend.training.batch.images import SampleImages


def outcomes(engine: str, folders: list[str]) -> dict[str, dict[str, Any]]:
    """Return the outcome of each folder's model."""
    return {folder: outcome(engine, Path(folder)) for folder in folders}


def outcome(engine: str, folder: Path) -> dict[str, Any]:
    """Return a model's log-probabilities and, if a field acts in training, its loss; or why it was refused, or crashed."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    reference = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    tower = {"vision_tower": "train"} if takes_images(config) else {}
    try:
        batch = [_sample(tokens, config) for tokens in samples(config)]
        batching = megascend.Batching(packing=config["model_type"] != "nemotron_h" or engine == "megatron")
        with megascend.make_backend(
            engine, model=folder, precision="fp32", platform="cpu", batching=batching, self_check=False, **tower
        ) as backend:
            logprobs = [
                values[torch.tensor(sample.weights) > 0]
                for sample, values in zip(batch, backend.forward(batch).logprobs, strict=True)
            ]
            trained = backend.forward_backward(batch).loss if reference.get("acts_in_training") else None
            return {"logprobs": torch.cat(logprobs).tolist(), "trained": trained}
    except megascend.MegascendError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001  what this test is about
        return {"crashed": f"{type(error).__name__}: {error}"}


def _sample(tokens: Tokens, config: dict[str, Any]) -> megascend.Sample:
    image = config.get("image_token_id")
    weights = [0.0, *(float(token != image) for token in tokens.ids[1:])]
    images = None if tokens.patches is None else SampleImages(tokens.patches, torch.tensor([[1, SIDE, SIDE]]))
    return megascend.Sample.causal(tokens.ids, weights=weights, images=images)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[2]).write_text(json.dumps(outcomes(sys.argv[1], json.load(sys.stdin))), encoding="utf-8")
