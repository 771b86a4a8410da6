"""Slices of an engine's tensors in terms of Hugging Face weights, compared with tensors assembled by hand."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import Tensor

from megascend.errors import CheckpointError
from megascend.training.checkpoint import hf_slices
from megascend.training.checkpoint.hf_slices import HfSlice, HfSlices, translate
from megascend.training.checkpoint.slices import TensorSlices

HIDDEN, WIDTH, EXPERTS, LAYERS = 5, 6, 3, 2
VOCABULARY, PADDED = 7, 8


def weights() -> dict[str, Tensor]:
    """Build weights in Hugging Face's layout: separate experts, separate q and k."""
    tensors = {"embed": torch.randn(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {f"{layer}.{name}": torch.randn(4, HIDDEN) for name in ("q", "k")}
        tensors |= {
            f"{layer}.{e}.{name}": torch.randn(WIDTH, HIDDEN) for e in range(EXPERTS) for name in ("gate", "up")
        }
    return tensors


def stacked() -> tuple[dict[str, tuple[int, ...]], HfSlices]:
    """Return shapes and parts of an engine that stacks layers and experts, interleaves q and k by head, and pads."""
    shapes = {
        "embedding": (PADDED, HIDDEN),
        "qk": (LAYERS, 8, HIDDEN),
        "experts.fc1": (LAYERS, EXPERTS, 2 * WIDTH, HIDDEN),
    }
    parts: dict[str, list[HfSlice]] = {name: [] for name in shapes}
    parts["embedding"].append(HfSlice((0, 0), (VOCABULARY, HIDDEN), "embed", (0, 0)))
    for layer in range(LAYERS):
        for head in range(2):
            for index, name in enumerate(("q", "k")):
                row = 4 * head + 2 * index
                parts["qk"].append(HfSlice((layer, row, 0), (1, 2, HIDDEN), f"{layer}.{name}", (2 * head, 0)))
        for expert in range(EXPERTS):
            for index, name in enumerate(("gate", "up")):
                box = ((layer, expert, index * WIDTH, 0), (1, 1, WIDTH, HIDDEN))
                parts["experts.fc1"].append(HfSlice(*box, f"{layer}.{expert}.{name}", (0, 0)))
    return shapes, parts


def by_layer() -> tuple[dict[str, tuple[int, ...]], HfSlices]:
    """Return shapes and parts of an engine that fuses only the experts of a layer."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN)}
    parts = {"embed": [HfSlice((0, 0), (VOCABULARY, HIDDEN), "embed", (0, 0))]}
    for layer in range(LAYERS):
        for name in ("q", "k"):
            shapes[f"{layer}.{name}"] = (4, HIDDEN)
            parts[f"{layer}.{name}"] = [HfSlice((0, 0), (4, HIDDEN), f"{layer}.{name}", (0, 0))]
        shapes[f"{layer}.experts"] = (EXPERTS, 2 * WIDTH, HIDDEN)
        parts[f"{layer}.experts"] = [
            HfSlice((expert, index * WIDTH, 0), (1, WIDTH, HIDDEN), f"{layer}.{expert}.{name}", (0, 0))
            for expert in range(EXPERTS)
            for index, name in enumerate(("gate", "up"))
        ]
    return shapes, parts


def assemble(shapes: dict[str, tuple[int, ...]], parts: HfSlices, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Assemble an engine's full tensors from weights; padding is 0."""
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, tensor_parts in parts.items():
        for part in tensor_parts:
            box = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))
            source = tuple(slice(a, a + n) for a, n in zip(part.weight_offsets, part.weight_sizes, strict=True))
            tensors[name][box] = values[part.weight][source].view(part.sizes)
    return tensors


def cut(shape: tuple[int, ...], generator: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor's shape into boxes at random."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(4):
        offsets, sizes = boxes.pop(generator.randrange(len(boxes)))
        dim = generator.randrange(len(shape))
        position = generator.randint(0, sizes[dim])
        for start, size in ((0, position), (position, sizes[dim] - position)):
            if size:
                box_offsets = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
                boxes.append((box_offsets, (*sizes[:dim], size, *sizes[dim + 1 :])))
    return boxes


def like(tensors: dict[str, Tensor]) -> dict[str, TensorSlices]:
    return {name: TensorSlices(tuple(values.shape), values.dtype) for name, values in tensors.items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("target_layout", "source_layout"), [(stacked, by_layer), (by_layer, stacked)])
def test_every_element_is_read_from_the_other_layout(target_layout, source_layout, seed) -> None:
    """Fill any cut of one engine's tensors and moments from the other's; report slices that are only padding."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    values = {kind: weights() for kind in ("", "optimizer.state.exp_avg.")}
    (target_shapes, target_parts), (shapes, parts) = target_layout(), source_layout()
    requested, expected, stored = {}, {}, {}
    for kind, kind_values in values.items():
        expected |= {kind + name: tensor for name, tensor in assemble(target_shapes, target_parts, kind_values).items()}
        stored |= {kind + name: tensor for name, tensor in assemble(shapes, parts, kind_values).items()}
    for name, tensor in expected.items():
        requested[name] = TensorSlices(tuple(tensor.shape), tensor.dtype, may_differ=name.endswith("embedding"))
        for offsets, sizes in cut(tuple(tensor.shape), generator):
            requested[name].add(offsets, torch.full(sizes, torch.nan))
    plan = translate(requested | {"object": 1}, target_parts, parts, like(stored))
    for padding in plan.padding:
        padding.zero_()
    for name, chunks in plan.reads.items():
        assert chunks.shape == tuple(stored[name].shape)
        for offsets, target in chunks.slices:
            box = tuple(slice(a, a + n) for a, n in zip(offsets, target.shape, strict=True))
            target.copy_(stored[name][box])
    for name, tensor in expected.items():
        for offsets, part in requested[name].slices:
            box = tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))
            assert torch.equal(part, tensor[box]), (name, offsets)
    assert plan.weights == set(values[""])


def test_fp32_original_is_read_if_present() -> None:
    """Translate between 16-bit weights with an fp32 original and fp32 weights without one."""
    parts = {"w": [HfSlice((0, 0), (2, 3), "weight", (0, 0))]}
    original = "optimizer.state.param.w"

    def requested(**dtypes: torch.dtype) -> dict[str, TensorSlices]:
        slices = {}
        for name, dtype in dtypes.items():
            slices[name] = TensorSlices((2, 3), dtype)
            slices[name].add((0, 0), torch.zeros(2, 3, dtype=dtype))
        return slices

    mixed = {"w": TensorSlices((2, 3), torch.bfloat16), original: TensorSlices((2, 3), torch.float32)}
    assert list(translate(requested(w=torch.float32), parts, parts, mixed).reads) == [original]
    plain = {"w": TensorSlices((2, 3), torch.float32)}
    reads = translate(requested(w=torch.bfloat16, **{original: torch.float32}), parts, parts, plain).reads
    assert [len(chunks.slices) for chunks in reads.values()] == [2]
    assert list(reads) == ["w"]


def test_missing_weight_is_named() -> None:
    shapes, target_parts = by_layer()
    requested = {"0.q": TensorSlices(shapes["0.q"], torch.float32)}
    requested["0.q"].add((0, 0), torch.zeros(4, HIDDEN))
    _, source_parts = stacked()
    incomplete = {name: [part for part in parts if part.weight != "0.q"] for name, parts in source_parts.items()}
    stored = {name: TensorSlices((), torch.float32) for name in source_parts}
    with pytest.raises(CheckpointError, match=r"it has only 0 of the 20 values of 0\.q"):
        translate(requested, target_parts, incomplete, stored)
    with pytest.raises(CheckpointError, match="it has no qk"):
        translate(requested, target_parts, source_parts, {})
    with pytest.raises(CheckpointError, match=r"the engine does not map 0\.q to Hugging Face weights"):
        translate(requested, {}, source_parts, stored)


def test_file_stores_parts_or_a_reason(tmp_path) -> None:
    _, parts = stacked()
    path = tmp_path / hf_slices.NAME
    with pytest.raises(CheckpointError, match=r"it has no hf_parts\.json: it was written by a version of megascend"):
        hf_slices.read(tmp_path)
    path.write_text(hf_slices.to_text(parts))
    assert hf_slices.read(tmp_path) == parts
    path.write_text(hf_slices.to_text("its experts are transposed"))
    with pytest.raises(CheckpointError, match="its experts are transposed"):
        hf_slices.read(tmp_path)
    for damaged in ("[", "{}", json.dumps({"tensors": {"w": [[1]]}})):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            hf_slices.read(tmp_path)
