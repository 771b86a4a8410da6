"""Exchange of weights in place with those of staging memory, on plain tensors: no vLLM is needed."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import pytest
import torch
from torch import Tensor

from weightwire.errors import ManifestError
from weightwire.manifest import Manifest, TensorSpec
from weightwire.plan import Region, Share, plan
from weightwire.slices import index_of
from weightwire.staging import BucketLayout, ShardLayout
from weightwire.vllm import exchange as exchange_module
from weightwire.vllm import in_place
from weightwire.vllm.exchange import Exchange, ExchangePart, split_large
from weightwire.vllm.in_place import Copy, NotInPlaceError, Recording
from weightwire.vllm.model import storage_id
from weightwire.vllm.needs import Recorder, as_slices


@pytest.fixture(autouse=True)
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "SCRATCH_BYTES", 4096)


class MemoryKernel:
    """The contract of the kernel that exchanges rows, in plain memory copies; counts the bytes that it reads and writes."""

    def __init__(self) -> None:
        self.nbytes = self.calls = self.failing_call = 0

    def __call__(self, table: Tensor, width: int) -> None:
        self.calls += 1
        if self.calls == self.failing_call:
            raise RuntimeError("the device")
        for left, right, size in table.tolist():
            assert (left | right | size) % width == 0
            assert size == exchange_module.ROW_BYTES if width == 16 else 0 < size <= exchange_module.ROW_BYTES
            before = ctypes.string_at(left, size)
            ctypes.memmove(left, right, size)
            ctypes.memmove(right, before, size)
            self.nbytes += 4 * size


@pytest.fixture(params=["kernel", "copies"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MemoryKernel | None:
    """Exchange parts by a kernel, as on CUDA, or by copies through scratch memory."""
    if request.param == "copies":
        return None
    kernel = MemoryKernel()
    monkeypatch.setattr(exchange_module, "swap_kernel", lambda device: kernel)
    monkeypatch.setattr(exchange_module, "ROW_BYTES", 1024)
    monkeypatch.setattr(exchange_module, "SWAP_BYTES", 20_000)
    return kernel


class Update:
    """An update's bytes, filled tensor by tensor."""

    def __init__(self) -> None:
        self.staging, self.used = torch.zeros(2**20, dtype=torch.uint8), 0

    def add(self, tensor: Tensor) -> int:
        start, self.used = self.used, self.used + tensor.nbytes
        self.staging[start : self.used].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        return start


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


@pytest.mark.usefixtures("kernel")
def test_exchange_writes_new_weights_and_undo_the_old_ones() -> None:
    update = Update()
    rows = list(layer(update))
    before = [parameter.clone() for parameter, _, _ in rows]
    exchange = Exchange([copy for _, copy, _ in rows])
    for _ in range(2):
        copy_of_update = update.staging.clone()
        exchange.run(update.staging)
        for _, copy, expected in rows:
            assert torch.equal(copy.target, expected)
        exchange.undo()
        for (parameter, _, _), old in zip(rows, before, strict=True):
            assert torch.equal(parameter, old)
        update.staging.copy_(copy_of_update)


class StoppingCopies:
    """``torch._foreach_copy_`` that stops in one of its calls."""

    def __init__(self) -> None:
        self.copy, self.calls, self.failing_call = torch._foreach_copy_, 0, 0

    def __call__(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        self.calls += 1
        if self.calls == self.failing_call:
            self.copy(targets[:1], sources[:1])  # a part of it
            raise RuntimeError("the device")
        self.copy(targets, sources)


@pytest.mark.parametrize("way", ["kernel", "copies"])
def test_exchange_that_stops_anywhere_can_be_undone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = MemoryKernel() if way == "kernel" else StoppingCopies()
    if way == "kernel":
        monkeypatch.setattr(exchange_module, "swap_kernel", lambda device: stopping)
        monkeypatch.setattr(exchange_module, "SWAP_BYTES", 4096)
    else:
        monkeypatch.setattr(torch, "_foreach_copy_", stopping)
    update = Update()
    rows = list(layer(update))
    before, received = [parameter.clone() for parameter, _, _ in rows], update.staging.clone()
    exchange = Exchange([copy for _, copy, _ in rows])
    exchange.run(update.staging)
    total = stopping.calls
    exchange.undo()
    assert total > 10
    for number in range(1, total + 1):
        update.staging = received.clone()
        stopping.calls, stopping.failing_call = 0, number
        with pytest.raises(RuntimeError, match="the device"):
            exchange.run(update.staging)
        stopping.failing_call = 0
        exchange.undo()
        for (parameter, _, _), old in zip(rows, before, strict=True):
            assert torch.equal(parameter, old), number
    exchange.run(received)
    assert all(torch.equal(copied.target, expected) for _, copied, expected in rows)


def test_exchange_releases_the_memory_of_an_update() -> None:
    update = Update()
    exchange = Exchange([copy for _, copy, _ in layer(update)])
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


def test_large_strided_part_is_split_by_rows() -> None:
    target, source = random(64, 128), random(64, 300, seed=1)
    update = Update()
    pieces = split_large([part(target, source, update.add(source), lambda tensor: tensor[:, 100:228])])
    assert max(item.target.nbytes for item in pieces) <= 4096
    for item in pieces:
        item.target.copy_(item.source(update.staging))
    assert torch.equal(target, source[:, 100:228])


@pytest.mark.parametrize(
    "second",
    [
        lambda target, source: Copy(target[1], Region(0, (0, 0), (1, 8))),  # one tensor into two parameters
        lambda target, source: Copy(target[1], Region(0, (0, 7), (2, 1))),
        lambda target, source: Copy(target[0], Region(1, (0, 0), (1, 8))),  # two tensors into one parameter
        lambda target, source: Copy(target[0, 4:], Region(0, (1, 4), (1, 4))),
    ],
)
def test_shared_elements_are_refused(second: Callable[[Tensor, Region], Copy]) -> None:
    target, source = random(4, 8), Region(0, (0, 0), (1, 8))
    first = Copy(target[0:1], source)
    assert in_place.distinct([first, first]) == [first]
    next_row = Copy(target[1:2], Region(0, (1, 0), (1, 8)))
    assert in_place.distinct([first, next_row]) == [first, next_row]
    with pytest.raises(NotInPlaceError, match="into two parameters, or two tensors into one"):
        in_place.distinct([first, second(target, source)])


def test_another_model_or_manifest_does_not_fit() -> None:
    model = torch.nn.Linear(4, 2, bias=False)
    specs = (TensorSpec("weight", "float32", (2, 4)),)
    copy = Copy(model.weight.detach(), Region(0, (0, 0), (2, 4)))
    recording = Recording([copy], specs, in_place.parameter_addresses(model))
    assert recording.fits(Manifest(7, specs), model)
    assert not recording.fits(Manifest(7, (TensorSpec("weight", "bfloat16", (2, 4)),)), model)
    model.weight = torch.nn.Parameter(torch.zeros(2, 4))
    assert not recording.fits(Manifest(7, specs), model)


# --- layouts: whole tensors in buckets, slices in chunks ---


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Loaders:
    """A model's loaders as functions, their copies, and what they copy by plain indexing."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = tuple(specs)
        self.copies: list[Copy] = []
        self._plain: list[tuple[Tensor, int, Callable[[Tensor], Tensor]]] = []

    def add(self, target: Tensor, name: str, view: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        number = next(index for index, spec in enumerate(self.specs) if spec.name == name)
        spec = self.specs[number]
        source = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        parts = as_slices(view(source), source, target)
        assert parts is not None
        self.copies += [Copy(part, Region(number, *box)) for box, part in parts]
        self._plain.append((target, number, view))

    @property
    def needs(self) -> list[Region]:
        return sorted((copy.source for copy in self.copies), key=lambda piece: (piece.tensor, piece.offsets))

    def expected(self, weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return (target, its new values) for each loader."""
        return [(target, view(weights[number]).to(target.dtype)) for target, number, view in self._plain]


KINDS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "whole": ((24, 16), lambda tensor: tensor),
    "rows": ((24, 16), lambda tensor: tensor[6:18]),
    "columns": ((24, 16), lambda tensor: tensor[:, 4:12]),
    "box": ((24, 16), lambda tensor: tensor[5:6, 3:9]),
    "transposed": ((24, 16), lambda tensor: tensor[2:20, 1:9].t()),
    "flattened": ((24, 16), lambda tensor: tensor[4:8].reshape(-1)),
    "heads": ((24, 16), lambda tensor: tensor.view(6, 4, 16)[1:3]),
    "heads, transposed": ((24, 16), lambda tensor: tensor.view(6, 4, 16)[1:3].transpose(0, 1)),
    "a part of each head": ((24, 16), lambda tensor: tensor.view(6, 4, 16)[:, 1:3]),
    "every other row": ((24, 16), lambda tensor: tensor[::2]),
    "experts, transposed": ((3, 8, 12), lambda tensor: tensor[1:, :, 6:].transpose(1, 2)),
    "permuted": ((3, 8, 12), lambda tensor: tensor[:, 2:4].permute(2, 0, 1)),
    "one column": ((24, 16), lambda tensor: tensor[:, 3]),
    "scalar": ((), lambda tensor: tensor),
    "element": ((7,), lambda tensor: tensor[3]),
    "empty": ((7,), lambda tensor: tensor[3:3]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_views_are_recorded_as_slices_of_the_same_elements(kind: str) -> None:
    shape, view = KINDS[kind]
    values = torch.arange(math.prod(shape)).view(shape)
    target = torch.full(view(values).shape, -1)
    source = torch.empty(shape, dtype=torch.int64, device="meta")
    parts = as_slices(view(source), source, target)
    assert parts is not None
    assert len(parts) == {"heads, transposed": 2, "a part of each head": 6, "every other row": 12, "empty": 0}.get(
        kind, 1
    )
    for box, part in parts:
        part.copy_(values[index_of(*box)])
    assert torch.equal(target, view(values))


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor[:1].expand(3, 16),
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: tensor.as_strided((4, 4), (1, 1)),
        lambda tensor: tensor.view(-1).unfold(0, 4, 2),
    ],
)
def test_views_that_repeat_elements_are_refused(view: Callable[[Tensor], Tensor]) -> None:
    source = torch.empty(24, 16, device="meta")
    loaded = view(source)
    parts = as_slices(loaded, source, torch.empty_like(loaded, device="cpu"))
    if parts is not None:
        with pytest.raises(NotInPlaceError, match="into two parameters, or two tensors into one"):
            in_place.distinct(Copy(part, Region(0, *box)) for box, part in parts)


SHARE_SIZES = [64, 200, 1000, 100_000]


@pytest.fixture(params=[0, 1, 2, 3], ids=lambda number: f"chunks of {SHARE_SIZES[number]} bytes")
def sharded(request: pytest.FixtureRequest) -> tuple[Loaders, Share]:
    """Build one worker's loaders, with padding, replicated heads and transposed experts, and its share of a plan."""
    seed = request.param
    specs = (
        TensorSpec("embed", "bfloat16", (37, 8)),
        TensorSpec("q", "bfloat16", (32, 8)),
        TensorSpec("k", "bfloat16", (8, 8)),
        TensorSpec("v", "bfloat16", (8, 8)),
        TensorSpec("o", "bfloat16", (8, 32)),
        TensorSpec("bias", "float32", (6,)),
        TensorSpec("gate", "float32", (5, 3)),
        TensorSpec("empty", "bfloat16", (0, 4)),
        TensorSpec("scale", "bfloat16", ()),
        *(TensorSpec(f"expert {index}", "bfloat16", (12, 10)) for index in range(3)),
        TensorSpec("experts", "bfloat16", (4, 10, 12)),
        TensorSpec("unused", "bfloat16", (9, 9)),
    )
    loaders = Loaders(specs)
    loaders.add(
        random(24, 8, seed=1)[:17], "embed", lambda tensor: tensor[20:]
    )  # padded to 40 rows, the second worker's
    qkv = random(24, 8, seed=2)
    loaders.add(qkv[:16], "q", lambda tensor: tensor[16:])
    loaders.add(qkv[16:20], "k", lambda tensor: tensor[4:])  # a head that other workers have too
    loaders.add(qkv[20:], "v", lambda tensor: tensor[4:])
    loaders.add(random(8, 16, seed=3), "o", lambda tensor: tensor[:, 16:])
    loaders.add(random(6, seed=4, dtype=torch.float32), "bias")
    loaders.add(random(5, 3, seed=5), "gate")  # used in another dtype than it is sent
    loaders.add(random(1, seed=6).view(()), "scale")
    w13 = random(3, 12, 10, seed=7)
    for index in range(3):
        loaders.add(w13[index].t().contiguous().t(), f"expert {index}")
    loaders.add(random(2, 12, 5, seed=8), "experts", lambda tensor: tensor[2:, 5:].transpose(1, 2))
    # Trainer ranks hold columns of some matrices and rows of others, so that pieces cross the parts of parameters.
    holdings: list[list[Region]] = [[] for _ in range(3)]
    for index, spec in enumerate(specs):
        dim = (index + seed) % max(1, len(spec.shape))
        for rank in range(3):
            if not spec.shape:
                holdings[rank].append(Region(index, (), ()))
                continue
            border = [spec.shape[dim] * part // 3 for part in range(4)]
            offsets, sizes = [0] * len(spec.shape), list(spec.shape)
            offsets[dim], sizes[dim] = border[rank], border[rank + 1] - border[rank]
            if math.prod(sizes):
                holdings[rank].append(Region(index, tuple(offsets), tuple(sizes)))
    other = [
        Region(index, (0,) * len(spec.shape), spec.shape) for index, spec in enumerate(specs) if 0 not in spec.shape
    ]
    result = plan(specs, holdings, [loaders.needs, other], chunk_bytes=SHARE_SIZES[seed])
    return loaders, result.shares()[3]


def weights_of(specs: Sequence[TensorSpec], seed: int) -> list[Tensor]:
    return [random(*spec.shape, dtype=getattr(torch, spec.dtype), seed=100 * seed + n) for n, spec in enumerate(specs)]


def staged(layout: ShardLayout | BucketLayout, weights: Sequence[Tensor]) -> Tensor:
    """Put a layout's pieces together from whole tensors."""
    staging = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    for piece, start in layout.pieces():
        content = bits(weights[piece.tensor][index_of(*piece.box)])
        staging[start : start + len(content)] = content
    return staging


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("keep", [True, False])
def test_one_recording_exchanges_shards_and_buckets(sharded: tuple[Loaders, Share], keep: bool) -> None:
    loaders, share = sharded
    recording = Recording(in_place.distinct(loaders.copies), loaders.specs, {})
    layouts = [ShardLayout(share, loaders.specs), BucketLayout(Manifest(1, loaders.specs))]
    before: list[Tensor] | None = None
    for version in range(1, 6):
        layout = layouts[version // 2 % 2]  # changes, and stays
        weights = weights_of(loaders.specs, version)
        staging = staged(layout, weights)
        received = staging.clone()
        exchange = recording.exchange(layout, keep=keep)
        assert recording.exchange(layout, keep=keep) is exchange
        before = [target.clone() for target, _ in loaders.expected(weights)]
        exchange.run(staging)
        exchange.undo()
        for (target, _), old in zip(loaders.expected(weights), before, strict=True):
            assert torch.equal(target, old)
        staging.copy_(received)
        exchange.run(staging)
        for target, values in loaders.expected(weights):
            assert torch.equal(bits(target), bits(values))
        assert not torch.equal(staging, received)
        if keep:
            exchange.refill(staging)
            assert torch.equal(staging, received)
            for target, values in loaders.expected(weights):
                assert torch.equal(bits(target), bits(values))


def test_update_without_a_part_that_is_loaded_is_refused(sharded: tuple[Loaders, Share]) -> None:
    loaders, share = sharded
    copies = [*loaders.copies, Copy(random(9, 9), Region(13, (0, 0), (9, 9)))]
    recording = Recording(copies, loaders.specs, {})
    layout = ShardLayout(share, loaders.specs)
    for _ in range(2):
        with pytest.raises(NotInPlaceError, match="not all of unused"):
            recording.exchange(layout, keep=False)
    assert recording.exchange(BucketLayout(Manifest(1, loaders.specs)), keep=False)


def test_old_weights_of_another_dtype_are_kept_apart_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (TensorSpec("router", "float32", (30, 10)), TensorSpec("bias", "bfloat16", (8,)))
    copies = [Copy(random(30, 10), Region(0, (0, 0), (30, 10))), Copy(random(8), Region(1, (0,), (8,)))]
    layout = BucketLayout(Manifest(1, specs))
    recording = Recording(copies, specs, {})
    assert recording.exchange(layout, keep=True)
    monkeypatch.setattr(in_place, "SEPARATE_BYTES", 500)
    recording = Recording(copies, specs, {})
    assert recording.exchange(layout, keep=False)
    with pytest.raises(NotInPlaceError, match=r"600 bytes .*router.* base of later differences"):
        recording.exchange(layout, keep=True)


@pytest.mark.parametrize("chunk_bytes", [40, 100, 10_000])
def test_tied_head_of_shards_is_compared_where_it_is_staged(chunk_bytes: int) -> None:
    specs = (
        TensorSpec("lm_head.weight", "bfloat16", (20, 6)),
        TensorSpec("model.embed_tokens.weight", "bfloat16", (20, 6)),
    )
    need = [Region(number, (4, 0), (12, 6)) for number in range(2)]
    # Two ranks, which hold rows of one and columns of the other: their pieces differ.
    holdings = [[Region(0, (10 * rank, 0), (10, 6)), Region(1, (0, 3 * rank), (20, 3))] for rank in range(2)]
    layout = ShardLayout(plan(specs, holdings, [need], chunk_bytes=chunk_bytes).shares()[2], specs)
    target = random(12, 6, seed=9)
    recording = Recording([Copy(target, need[1])], specs, {}, (0, 1))
    exchange = recording.exchange(layout, keep=True)
    embedding = random(20, 6, seed=10)
    exchange.run(staged(layout, [embedding, embedding]))
    assert torch.equal(target, embedding[4:16])
    for row, column in ((4, 0), (9, 2), (15, 5)):
        head = embedding.clone()
        head[row, column] += 1
        with pytest.raises(ManifestError, match="differs from the embedding"):
            exchange.run(staged(layout, [head, embedding + 0]))
    outside = embedding.clone()
    outside[:4] += 1  # not this worker's
    exchange.run(staged(layout, [outside, embedding]))


# --- recording ---


def recorded(load: Callable[[Tensor, Tensor, Tensor, Tensor], object]) -> tuple[Recorder, Tensor, Tensor]:
    """Run a loader of (weight, bias, another tensor of the model; source [6, 4]); return what it did, the weight and the bias."""
    weight, bias, other = torch.ones(6, 4), torch.ones(4), torch.ones(4)
    loaded, source = weight.to("meta"), torch.empty(6, 4, device="meta")
    live = {storage_id(tensor) for tensor in (weight, bias, other)}
    recorder = Recorder([source], {"weight": (loaded, weight), "bias": (bias, bias)}, live)
    with torch.no_grad(), recorder:
        load(loaded, bias, other, source)
    assert all(bool((tensor == 1).all()) for tensor in (weight, bias, other)), "written"
    return recorder, weight, bias


SPECS = (TensorSpec("source", "float32", (6, 4)),)


def test_copies_into_parameters_are_recorded_at_their_places() -> None:
    def load(weight: Tensor, bias: Tensor, other: Tensor, source: Tensor) -> None:
        weight[:2].copy_(source.narrow(0, 3, 2))
        weight.data[2:, 1:3].copy_(source[:4, 2:])
        weight[:, 3:].fill_(0)
        bias.copy_(source[5])  # a bias is not on meta

    recorder, weight, bias = recorded(load)
    boxes = [((3, 0), (2, 4)), ((0, 2), (4, 2)), ((5, 0), (1, 4))]
    copies = list(in_place._copies(recorder, SPECS))
    assert [copy.source.box for copy in copies] == boxes
    assert sorted(piece.box for piece in recorder.pieces()) == sorted(boxes)
    for copy, part in zip(copies, (weight[:2], weight[2:, 1:3], bias.view(1, 4)), strict=True):
        assert (copy.target.data_ptr(), copy.target.shape) == (part.data_ptr(), part.shape)
        assert copy.target.stride()[-1] == 1
    (zeros,) = [in_place._part_in_use(part, recorder) for part in recorder.zeros]
    assert (zeros.data_ptr(), zeros.stride()) == (weight[:, 3:].data_ptr(), (4, 1))


@pytest.mark.parametrize(
    ("load", "reason", "complete_need"),
    [
        (lambda weight, bias, other, source: weight.copy_(source * 2), "weight computes what it copies", True),
        (lambda weight, bias, other, source: weight.copy_(source.double()), "weight computes what it copies", True),
        (lambda weight, bias, other, source: weight.add_(source), "weight calls aten.add_", True),
        (lambda weight, bias, other, source: bias.add_(source[0]), "bias calls aten.add_", True),
        (lambda weight, bias, other, source: weight.fill_(1), "weight calls aten.fill_", False),
        (lambda weight, bias, other, source: other.copy_(source[0]), "into a tensor that is no parameter", False),
        (
            lambda weight, bias, other, source: other.zero_(),
            "a tensor that is no parameter, which is not in use",
            False,
        ),
        (lambda weight, bias, other, source: weight.copy_(source[:1]), "does not copy a slice", False),
    ],
)
def test_other_uses_of_parameters_are_refused(
    load: Callable[[Tensor, Tensor, Tensor, Tensor], object], reason: str, complete_need: bool
) -> None:
    recorder, _, _ = recorded(load)
    assert (list(recorder.pieces()) == [Region(0, (0, 0), (6, 4))]) == complete_need
    with pytest.raises(NotInPlaceError, match=reason):
        list(
            chain(in_place._copies(recorder, SPECS), (in_place._part_in_use(part, recorder) for part in recorder.zeros))
        )
