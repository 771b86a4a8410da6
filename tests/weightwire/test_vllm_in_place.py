"""Exchange of weights in place with those of staging memory, on plain tensors: no vLLM is needed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from weightwire.manifest import TensorSpec
from weightwire.vllm import in_place
from weightwire.vllm.in_place import Exchange, ExchangePart, merged, split


@pytest.fixture(autouse=True)
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "SCRATCH_BYTES", 4096)


class Update:
    """An update's bytes, filled tensor by tensor."""

    def __init__(self) -> None:
        self.staging, self.used = torch.zeros(2**20, dtype=torch.uint8), 0

    def add(self, tensor: Tensor) -> int:
        start, self.used = self.used, self.used + tensor.nbytes
        self.staging[start : self.used].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        return start


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(
    target: Tensor, source: Tensor, offset: int, sliced: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> ExchangePart:
    view = sliced(source)
    width = source.dtype.itemsize
    start = offset + int(view.storage_offset()) * width
    return ExchangePart(target, source.dtype, start, tuple(view.shape), view.stride())


def layer(update: Update) -> Iterator[tuple[Tensor, ExchangePart, Tensor]]:
    """Yield (parameter, copy into a part of it, expected value of that part): fused, sliced, cast and large parameters."""
    qkv = random(96, 32, seed=1)
    for index, rows in enumerate((64, 16, 16)):
        source, first = random(rows, 32, seed=10 + index), (0, 64, 80)[index]
        yield qkv, part(qkv[first : first + rows], source, update.add(source)), source
    down, source = random(32, 24, seed=2), random(32, 48, seed=20)
    yield down, part(down, source, update.add(source), lambda tensor: tensor[:, 24:]), source[:, 24:]
    bias, source = random(8, dtype=torch.float32, seed=3), random(8, seed=30)
    yield bias, part(bias, source, update.add(source)), source.float()
    narrow, source = random(40, 16, seed=4), random(40, 16, dtype=torch.float32, seed=40)
    yield narrow, part(narrow, source, update.add(source)), source.bfloat16()
    embedding, source = random(700, 32, seed=5), random(700, 32, seed=50)
    yield embedding, part(embedding, source, update.add(source)), source
    experts = random(4, 24, 16, seed=6)
    for index in range(4):
        for first in (0, 12):
            source = random(12, 16, seed=60 + 2 * index + first)
            yield experts, part(experts[index, first : first + 12], source, update.add(source)), source


def test_exchange_writes_new_weights_and_undo_the_old_ones() -> None:
    update = Update()
    rows = list(layer(update))
    before = [parameter.clone() for parameter, _, _ in rows]
    exchange = Exchange([copy for _, copy, _ in rows], (), {})
    for _ in range(2):
        copy_of_update = update.staging.clone()
        exchange.run(update.staging)
        for _, copy, expected in rows:
            assert torch.equal(copy.target, expected)
        exchange.undo()
        for (parameter, _, _), old in zip(rows, before, strict=True):
            assert torch.equal(parameter, old)
        update.staging.copy_(copy_of_update)


def test_exchange_that_stops_anywhere_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Update()
    rows = list(layer(update))
    before, copy_of_update = [parameter.clone() for parameter, _, _ in rows], update.staging.clone()
    exchange = Exchange([copy for _, copy, _ in rows], (), {})
    copy, calls, failing_call = torch._foreach_copy_, 0, 0

    def failing(targets: list[Tensor], sources: list[Tensor]) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            copy(targets[:1], sources[:1])  # a part of it
            raise RuntimeError("the device")
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", failing)
    exchange.run(update.staging)
    total = calls
    exchange.undo()
    assert total > 20
    for number in range(1, total + 1):
        update.staging.copy_(copy_of_update)
        calls, failing_call = 0, number
        with pytest.raises(RuntimeError, match="the device"):
            exchange.run(update.staging)
        failing_call = 0
        exchange.undo()
        for (parameter, _, _), old in zip(rows, before, strict=True):
            assert torch.equal(parameter, old), number
    update.staging.copy_(copy_of_update)
    exchange.run(update.staging)
    assert all(torch.equal(copied.target, expected) for _, copied, expected in rows)


def test_exchange_releases_the_memory_of_an_update() -> None:
    update = Update()
    exchange = Exchange([copy for _, copy, _ in layer(update)], (), {})
    buffer = bytearray(bytes(update.staging.tolist()))
    free = sys.getrefcount(buffer)
    staging = torch.frombuffer(buffer, dtype=torch.uint8)
    exchange.run(staging)
    del staging
    gc.collect()
    assert sys.getrefcount(buffer) > free, "views for the next update"
    exchange.unbind()
    gc.collect()
    assert sys.getrefcount(buffer) == free


def test_adjacent_parts_are_merged_and_large_ones_split() -> None:
    update = Update()
    parts = [copy for _, copy, _ in layer(update)]
    result = merged(parts)
    # Query, key and value; four experts of two halves: one part each.
    assert [item.target.numel() for item in result] == [96 * 32, 32 * 24, 8, 40 * 16, 700 * 32, 4 * 24 * 16]
    pieces = split(result)
    assert max(item.target.nbytes for item in pieces) <= 4096
    assert sum(item.target.numel() for item in pieces) == sum(item.target.numel() for item in parts)


def test_large_strided_part_is_split_by_rows() -> None:
    target, source = random(64, 128), random(64, 300, seed=1)
    update = Update()
    pieces = split([part(target, source, update.add(source), lambda tensor: tensor[:, 100:228])])
    assert max(item.target.nbytes for item in pieces) <= 4096
    for item in pieces:
        item.target.copy_(item.source(update.staging))
    assert torch.equal(target, source[:, 100:228])


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (lambda target, copy: ExchangePart(target[1], copy.dtype, copy.offset, (8,), (1,)), "two parameters"),
        (lambda target, copy: ExchangePart(target[0], copy.dtype, copy.offset + 16, (8,), (1,)), "two parameters"),
        (lambda target, copy: ExchangePart(target[1], copy.dtype, copy.offset + 16, (8,), (0,)), "into several"),
    ],
)
def test_shared_bytes_are_refused(second: Callable[[Tensor, ExchangePart], ExchangePart], reason: str) -> None:
    target = random(4, 8)
    first = ExchangePart(target[0], torch.bfloat16, 0, (8,), (1,))
    assert in_place._distinct([first, first]) == [first]
    with pytest.raises(in_place.NotInPlaceError, match=reason):
        in_place._distinct([first, second(target, first)])


def test_another_model_or_manifest_does_not_fit() -> None:
    from weightwire.manifest import Manifest

    model = torch.nn.Linear(4, 2, bias=False)
    specs = (TensorSpec("weight", "float32", (2, 4)),)
    copy = ExchangePart(model.weight.detach(), torch.float32, 0, (2, 4), (4, 1))
    exchange = Exchange([copy], specs, in_place.addresses(model))
    assert exchange.fits(Manifest(7, specs), model)
    assert not exchange.fits(Manifest(7, (TensorSpec("weight", "bfloat16", (2, 4)),)), model)
    model.weight = torch.nn.Parameter(torch.zeros(2, 4))
    assert not exchange.fits(Manifest(7, specs), model)
