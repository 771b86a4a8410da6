"""What workers of a tensor parallel engine load, and checks of what they have got."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from weightwire.manifest import TensorSpec
from weightwire.plan import Region
from weightwire.slices import index_of

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def vllm_like(specs: Sequence[TensorSpec], workers: int, worker: int) -> list[Region]:
    """Return the slices of a tensor parallel worker: experts by worker, a vocabulary padded to 64 rows for each, no norms cut."""
    pieces = []
    for index, spec in enumerate(specs):
        offsets, sizes = [0] * len(spec.shape), list(spec.shape)
        dim = None
        expert = re.search(r"\.experts\.(\w+)", spec.name)
        if expert is not None and expert[1].isdecimal():
            if int(expert[1]) % workers != worker:
                continue
        elif expert is not None:  # all experts in one tensor
            dim = 0
        elif "embed_tokens" in spec.name or "lm_head" in spec.name:
            padded = -(-spec.shape[0] // (64 * workers)) * 64
            offsets[0] = min(worker * padded, spec.shape[0])
            sizes[0] = min(padded, spec.shape[0] - offsets[0])
        elif spec.name.endswith(ROW_PARALLEL):
            dim = 1
        elif len(spec.shape) == 2 and ".gate.weight" not in spec.name:
            dim = 0
        if dim is not None:
            sizes[dim] //= workers
            offsets[dim] = worker * sizes[dim]
        if 0 not in sizes:
            pieces.append(Region(index, tuple(offsets), tuple(sizes)))
    return pieces


def slices_are(worker: dict[str, torch.Tensor], needs: Sequence[Region], expected: dict[str, torch.Tensor]) -> bool:
    """Check a worker's slices bit for bit, and that it has nothing else."""
    names = list(expected)
    if {names[piece.tensor] for piece in needs} != worker.keys():
        return False
    for piece in needs:
        values, part = worker[names[piece.tensor]], index_of(*piece.box)
        outside = torch.ones(values.shape, dtype=torch.bool)
        outside[part] = False
        want = expected[names[piece.tensor]]
        if values.dtype != want.dtype or not torch.equal(values[part], want[part]) or not values[outside].isnan().all():
            return False
    return True


def exported(path: Path, specs_order: Sequence[str]) -> dict[str, torch.Tensor]:
    tensors = load_file(path / "model.safetensors")
    return {name: tensors[name] for name in specs_order}


def specs_of(weights: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in weights.items()]
