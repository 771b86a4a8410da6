"""``hf_parts.json``: what a checkpoint's tensors are in terms of Hugging Face's weights, for engines of other kinds."""

from __future__ import annotations

import json
from pathlib import Path

from megascend.engines.hf_parts import HfPart, HfParts
from megascend.errors import CheckpointError

NAME = "hf_parts.json"


def to_text(parts: HfParts | str) -> str:
    """As JSON: ``tensors``, or the ``problem`` that there is instead of them."""
    if isinstance(parts, str):
        return json.dumps({"problem": parts}) + "\n"
    rows = {
        name: [[part.weight, part.weight_offsets, part.offsets, part.sizes] for part in of_tensor]
        for name, of_tensor in parts.items()
    }
    return json.dumps({"tensors": rows}, separators=(",", ":")) + "\n"


def read(directory: Path) -> HfParts:
    """What :func:`to_text` has made of the parts in a checkpoint.

    Raises:
        CheckpointError: the checkpoint is from before there was this file, or its engine could not say.
    """
    try:
        values = json.loads((directory / NAME).read_text(encoding="utf-8"))
        if "problem" in values:
            raise CheckpointError(values["problem"])
        return {
            name: [
                HfPart(tuple(offsets), tuple(sizes), weight, tuple(weight_offsets))
                for weight, weight_offsets, offsets, sizes in rows
            ]
            for name, rows in values["tensors"].items()
        }
    except FileNotFoundError:
        raise CheckpointError(
            f"it has no {NAME}: a version of megascend has written it that did not write one"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"its {NAME} cannot be read: {error}") from error
