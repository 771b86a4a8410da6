"""Compare an exported checkpoint with its source, by the headers of the files. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megascend.models import architecture_of
from megascend.models.checkpoint_files.files import DERIVED, TensorHeader
from weightwire.manifest import in_prediction_head

HALVES = re.compile(r"^(?P<mlp>.*\.)(?P<half>gate|up)_proj\.weight$")
ONE_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight$")
OUTPUT = "lm_head.weight"


def derived_tensors(names: Iterable[str]) -> list[str]:
    """Return the tensors that are buffers derived from the configuration, which no engine loads."""
    return [name for name in names if name.endswith(DERIVED)]


def prediction_tensors(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the tensors of heads for multi-token prediction (:func:`weightwire.manifest.in_prediction_head`)."""
    text = config.get("text_config", config)
    # Some configurations have a list of layers only, of which a family's declaration knows.
    layers = text.get("num_hidden_layers") or architecture_of(text).normalise(text).get("num_hidden_layers") or 0
    heads = range(layers, layers + (text.get("num_nextn_predict_layers") or 0))
    return [name for name in names if in_prediction_head(name, heads) and not name.endswith(DERIVED)]


@dataclass(frozen=True)
class FusedPart:
    """Location of a weight that the source stores as part of a larger tensor.

    Attributes:
        fused_name: name of the larger tensor.
        expert: index of the expert, in the first dimension of ``fused_name``; None without experts.
        half: ``gate`` or ``up``, the first or second half of the rows; None: all rows.
    """

    fused_name: str
    expert: int | None
    half: str | None


def fused_part(name: str, names: Collection[str]) -> FusedPart | None:
    """Return the location of a weight that the source stores fused (GLM-4: gate and up; transformers 5: experts), else None."""
    if name in names:
        return None
    expert = ONE_EXPERT.match(name)
    if expert is not None:
        half = None if expert["part"] == "down" else expert["part"]
        fused = f"{expert['experts']}.{'down_proj' if half is None else 'gate_up_proj'}"
        return FusedPart(fused, int(expert["number"]), half) if fused in names else None
    match = HALVES.match(name)
    if match is None or f"{match['mlp']}gate_up_proj.weight" not in names:
        return None
    return FusedPart(f"{match['mlp']}gate_up_proj.weight", None, match["half"])


def differences(source: Mapping[str, TensorHeader], exported: Mapping[str, TensorHeader], dtype: str) -> list[str]:
    """List differences of an export from its source; empty if transformers can load it.

    ``dtype``: of the export, as safetensors spells it. What is fp32 in the source may stay so, as routers' biases do, and
        integers do.
    """
    problems = []
    missing = [name for name in source if name not in exported]
    new = [name for name in exported if name not in source]
    if missing:
        problems.append(f"it lacks {abbreviated(missing)}")
    if new:
        problems.append(f"it would have {abbreviated(new)}, which the source has not")
    common = [(name, source[name], exported[name]) for name in source if name in exported]
    shapes = [f"{name} {list(e.shape)} instead of {list(s.shape)}" for name, s, e in common if s.shape != e.shape]
    if shapes:
        problems.append(f"other shapes: {abbreviated(shapes)}")
    dtypes = [
        f"{name} {e.dtype} instead of {dtype}"
        for name, s, e in common
        # For example the correction bias of a router, which transformers keeps in fp32 as well, or its integer table.
        if e.dtype != dtype and not (e.dtype == s.dtype and (s.dtype == "F32" or "F" not in s.dtype))
    ]
    if dtypes:
        problems.append(f"other dtypes: {abbreviated(dtypes)}")
    return problems


def abbreviated(names: list[str]) -> str:
    """List the first five of ``names`` and the count of the rest."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
