"""Slices of one engine's tensors, in terms of Hugging Face's weights, against whole tensors put together by hand."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import Tensor

from megascend.checkpoint import hf_slices
from megascend.checkpoint.hf_slices import HfSlice, HfSlices, translate
from megascend.checkpoint.slices import TensorSlices
from megascend.errors import CheckpointError

HIDDEN, WIDTH, EXPERTS, LAYERS = 5, 6, 3, 2
VOCABULARY, PADDED = 7, 8


def weights() -> dict[str, Tensor]:
    """As Hugging Face has them: every expert by itself, q and k apart."""
    found = {"embed": torch.randn(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        found |= {f"{layer}.{name}": torch.randn(4, HIDDEN) for name in ("q", "k")}
        found |= {f"{layer}.{e}.{name}": torch.randn(WIDTH, HIDDEN) for e in range(EXPERTS) for name in ("gate", "up")}
    return found


def stacked() -> tuple[dict[str, tuple[int, ...]], HfSlices]:
    """Shapes and parts of an engine that stacks layers and experts, mixes q and k by heads, and pads the vocabulary."""
    shapes = {
        "embedding": (PADDED, HIDDEN),
        "qk": (LAYERS, 8, HIDDEN),
        "experts.fc1": (LAYERS, EXPERTS, 2 * WIDTH, HIDDEN),
    }
    parts: dict[str, list[HfSlice]] = {name: [] for name in shapes}
    parts["embedding"].append(HfSlice((0, 0), (VOCABULARY, HIDDEN), "embed", (0, 0)))
    for layer in range(LAYERS):
        for head in range(2):
            for place, name in enumerate(("q", "k")):
                row = 4 * head + 2 * place
                parts["qk"].append(HfSlice((layer, row, 0), (1, 2, HIDDEN), f"{layer}.{name}", (2 * head, 0)))
        for expert in range(EXPERTS):
            for place, name in enumerate(("gate", "up")):
                box = ((layer, expert, place * WIDTH, 0), (1, 1, WIDTH, HIDDEN))
                parts["experts.fc1"].append(HfSlice(*box, f"{layer}.{expert}.{name}", (0, 0)))
    return shapes, parts


def by_layer() -> tuple[dict[str, tuple[int, ...]], HfSlices]:
    """Shapes and parts of an engine that fuses a layer's experts alone."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN)}
    parts = {"embed": [HfSlice((0, 0), (VOCABULARY, HIDDEN), "embed", (0, 0))]}
    for layer in range(LAYERS):
        for name in ("q", "k"):
            shapes[f"{layer}.{name}"] = (4, HIDDEN)
            parts[f"{layer}.{name}"] = [HfSlice((0, 0), (4, HIDDEN), f"{layer}.{name}", (0, 0))]
        shapes[f"{layer}.experts"] = (EXPERTS, 2 * WIDTH, HIDDEN)
        parts[f"{layer}.experts"] = [
            HfSlice((expert, place * WIDTH, 0), (1, WIDTH, HIDDEN), f"{layer}.{expert}.{name}", (0, 0))
            for expert in range(EXPERTS)
            for place, name in enumerate(("gate", "up"))
        ]
    return shapes, parts


def whole(shapes: dict[str, tuple[int, ...]], parts: HfSlices, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """An engine's whole tensors, made of weights; padding is 0."""
    found = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, of_tensor in parts.items():
        for part in of_tensor:
            box = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))
            source = tuple(slice(a, a + n) for a, n in zip(part.weight_offsets, part.weight_sizes, strict=True))
            found[name][box] = values[part.weight][source].view(part.sizes)
    return found


def cut(shape: tuple[int, ...], generator: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that a tensor consists of, cut at random."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(4):
        offsets, sizes = boxes.pop(generator.randrange(len(boxes)))
        dim = generator.randrange(len(shape))
        at = generator.randint(0, sizes[dim])
        for start, size in ((0, at), (at, sizes[dim] - at)):
            if size:
                place = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
                boxes.append((place, (*sizes[:dim], size, *sizes[dim + 1 :])))
    return boxes


def like(tensors: dict[str, Tensor]) -> dict[str, TensorSlices]:
    return {name: TensorSlices(tuple(values.shape), values.dtype) for name, values in tensors.items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("mine", "theirs"), [(stacked, by_layer), (by_layer, stacked)])
def test_every_number_is_found(mine, theirs, seed) -> None:
    """Any cut of one engine's tensors, moments too, is filled from the other's; what is padding alone stays."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    values = {kind: weights() for kind in ("", "optimizer.state.exp_avg.")}
    (own_shapes, own), (shapes, parts) = mine(), theirs()
    wanted, expected, stored = {}, {}, {}
    for kind, of_kind in values.items():
        expected |= {kind + name: tensor for name, tensor in whole(own_shapes, own, of_kind).items()}
        stored |= {kind + name: tensor for name, tensor in whole(shapes, parts, of_kind).items()}
    for name, tensor in expected.items():
        wanted[name] = TensorSlices(tuple(tensor.shape), tensor.dtype, may_differ=name.endswith("embedding"))
        for offsets, sizes in cut(tuple(tensor.shape), generator):
            wanted[name].add(offsets, torch.full(sizes, torch.nan))
    found = translate(wanted | {"object": 1}, own, parts, like(stored))
    for padding in found.padding:
        padding.zero_()
    for name, chunks in found.reads.items():
        assert chunks.shape == tuple(stored[name].shape)
        for offsets, target in chunks.slices:
            box = tuple(slice(a, a + n) for a, n in zip(offsets, target.shape, strict=True))
            target.copy_(stored[name][box])
    for name, tensor in expected.items():
        for offsets, part in wanted[name].slices:
            box = tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))
            assert torch.equal(part, tensor[box]), (name, offsets)
    assert found.weights == set(values[""])


def test_an_fp32_original_is_read_where_there_is_one() -> None:
    """16 bits and an original on one side, fp32 alone on the other."""
    parts = {"w": [HfSlice((0, 0), (2, 3), "weight", (0, 0))]}
    original = "optimizer.state.param.w"

    def wanted(**dtypes: torch.dtype) -> dict[str, TensorSlices]:
        found = {}
        for name, dtype in dtypes.items():
            found[name] = TensorSlices((2, 3), dtype)
            found[name].add((0, 0), torch.zeros(2, 3, dtype=dtype))
        return found

    both = {"w": TensorSlices((2, 3), torch.bfloat16), original: TensorSlices((2, 3), torch.float32)}
    assert list(translate(wanted(w=torch.float32), parts, parts, both).reads) == [original]
    plain = {"w": TensorSlices((2, 3), torch.float32)}
    reads = translate(wanted(w=torch.bfloat16, **{original: torch.float32}), parts, parts, plain).reads
    assert [len(chunks.slices) for chunks in reads.values()] == [2]
    assert list(reads) == ["w"]


def test_what_is_missing_is_named() -> None:
    shapes, mine = by_layer()
    wanted = {"0.q": TensorSlices(shapes["0.q"], torch.float32)}
    wanted["0.q"].add((0, 0), torch.zeros(4, HIDDEN))
    _, theirs = stacked()
    without = {name: [part for part in parts if part.weight != "0.q"] for name, parts in theirs.items()}
    stored = {name: TensorSlices((), torch.float32) for name in theirs}
    with pytest.raises(CheckpointError, match=r"it has only 0 of the 20 values of 0\.q"):
        translate(wanted, mine, without, stored)
    with pytest.raises(CheckpointError, match="it has no qk"):
        translate(wanted, mine, theirs, {})
    with pytest.raises(CheckpointError, match=r"the engine does not map 0\.q to Hugging Face weights"):
        translate(wanted, {}, theirs, stored)


def test_the_file_holds_parts_or_a_reason(tmp_path) -> None:
    _, parts = stacked()
    path = tmp_path / hf_slices.NAME
    with pytest.raises(CheckpointError, match=r"it has no hf_parts\.json: a version of megascend"):
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
