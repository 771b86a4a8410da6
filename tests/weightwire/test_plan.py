"""Plans of sharded updates: every needed element once, evenly shared out, compared with element by element counting."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain, combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DEEPSEEK_V3, QWEN3_235B, bytes_of, complete_slice, megatron, specs, vllm

from weightwire.errors import ManifestError, PlanError
from weightwire.manifest import DTYPE_BYTES, TensorSpec
from weightwire.plan import Chunk, Operation, Region, Share, TransferPlan, check_share, complete, disjoint, plan


def elements(pieces: Sequence[Region]) -> Counter[tuple[int, ...]]:
    """Count (tensor, index ...) of every element."""
    return Counter(
        (piece.tensor, *index)
        for piece in pieces
        for index in product(*(range(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True)))
    )


def run(
    result: TransferPlan, tensors: Sequence[TensorSpec], holdings: Sequence[Sequence[Region]]
) -> list[Counter[tuple[int, ...]]]:
    """Run a plan on elements, member by member, one message at a time; return what each worker has received.

    A message is exchanged only when it is the next operation of both: a plan that could block does not finish.
    """
    shares = result.shares()
    present = [set(elements(pieces)) for pieces in holdings] + [set() for _ in range(result.receivers)]
    received: list[Counter[tuple[int, ...]]] = [Counter() for _ in shares]
    position = [0] * len(shares)

    def step(member: int) -> Operation | None:
        operations = shares[member].operations
        return operations[position[member]] if position[member] < len(operations) else None

    moved = True
    while moved:
        moved = False
        for sender in range(len(shares)):
            outgoing = step(sender)
            if outgoing is None or not outgoing.sends:
                continue
            incoming = step(outgoing.peer)
            if incoming is None or incoming.sends or incoming.peer != sender:
                continue
            content = shares[sender].chunks[outgoing.chunk]
            assert content.pieces == shares[outgoing.peer].chunks[incoming.chunk].pieces
            parts = elements(content.pieces)
            assert parts.keys() <= present[sender], "a member sends what it does not have"
            received[outgoing.peer] += parts
            present[outgoing.peer] |= parts.keys()
            position[sender] += 1
            position[outgoing.peer] += 1
            moved = True
    assert all(step(member) is None for member in range(len(shares))), "the plan blocks"
    return received[result.senders :]


def element_bytes(tensors: Sequence[TensorSpec], counts: Counter[tuple[int, ...]]) -> int:
    return sum(count * DTYPE_BYTES[tensors[element[0]].dtype] for element, count in counts.items())


@st.composite
def cases(draw: st.DrawFn):
    """Draw tensors, slices of ranks (a grid of each tensor, every cell on one or more ranks), and needs (boxes)."""
    ranks, workers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tensors, holdings, needs = [], [[] for _ in range(ranks)], [[] for _ in range(workers)]
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        tensors.append(TensorSpec(f"t{index}", draw(st.sampled_from(["bfloat16", "float32", "uint8"])), shape))
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
        for cell in product(*(list(pairwise(c)) for c in cuts)):
            piece = Region(index, tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                holdings[rank].append(piece)
        for worker in range(workers):
            for _ in range(draw(st.integers(0, 2))):
                bounds = [sorted((draw(st.integers(0, s - 1)), draw(st.integers(1, s)))) for s in shape]
                bounds = [(a, b) if b > a else (a - 1, b) if a else (a, b + 1) for a, b in bounds]
                needs[worker].append(Region(index, tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)))
    if draw(st.booleans()):  # engines with equal needs
        needs = [needs[worker % max(1, workers // 2)] for worker in range(workers)]
    return tuple(tensors), holdings, needs


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 64), st.sampled_from([None, True, False]))
def test_every_needed_element_arrives_once(case, chunk_bytes, relay):
    tensors, holdings, needs = case
    result = plan(tensors, holdings, needs, chunk_bytes=chunk_bytes, relay=relay)
    received = run(result, tensors, holdings)
    for worker, need in enumerate(needs):
        assert received[worker] == Counter(set(elements(need)))
        share = result.shares()[len(holdings) + worker]
        check_share(share, need, tensors, "worker")
        # What an engine parses is what was planned, but for fields that only the trainer needs.
        parsed = Share.from_json(json.loads(json.dumps(share.to_json())), tensors)
        assert parsed.operations == share.operations
        assert [chunk.pieces for chunk in parsed.chunks] == [chunk.pieces for chunk in share.chunks]
    planned = sum(chunk.nbytes * len(chunk.receivers) for chunk in result.chunks)
    assert planned == sum(element_bytes(tensors, counts) for counts in received)
    first_out, first_in, forwarded, relayed = result.traffic
    assert sum(first_out) == sum(first_in)
    assert sum(forwarded) == sum(relayed)
    assert sum(first_in) + sum(relayed) == planned
    assert not any(first_out[len(holdings) :])
    assert not any(forwarded[: len(holdings)])
    widths = [DTYPE_BYTES[spec.dtype] for spec in tensors]
    for chunk in result.chunks:
        assert chunk.nbytes <= chunk_bytes or len(chunk.pieces) == 1
        assert chunk.nbytes == bytes_of(chunk.pieces, tensors)
        position = 0
        for piece in chunk.pieces:
            assert position % widths[piece.tensor] == 0
            position += piece.nbytes(tensors)


def least_load(tensors, holdings, needs) -> float:
    """Return a lower bound of the busiest rank's traffic: what only a set of ranks holds, divided by their number."""
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, pieces in enumerate(holdings):
        for element in set(elements(pieces)):
            holders.setdefault(element, []).append(rank)
    demand: Counter[tuple[int, ...]] = Counter()
    for element, count in sum((Counter(set(elements(need))) for need in needs), Counter()).items():
        demand[tuple(sorted(holders[element]))] += count * DTYPE_BYTES[tensors[element[0]].dtype]
    ranks = range(len(holdings))
    subsets = chain.from_iterable(combinations(ranks, size) for size in range(1, len(holdings) + 1))
    return max(
        sum(size for group, size in demand.items() if set(group) <= set(subset)) / len(subset) for subset in subsets
    )


@settings(max_examples=100, deadline=None)
@given(cases())
def test_direct_traffic_is_near_the_least_possible(case):
    tensors, holdings, needs = case
    result = plan(tensors, holdings, needs, chunk_bytes=2, relay=False)
    largest = max((chunk.nbytes for chunk in result.chunks), default=0)
    assert max(result.traffic[0]) <= 1.2 * least_load(tensors, holdings, needs) + largest


@pytest.mark.parametrize(
    ("model", "experts", "seconds"), [(DEEPSEEK_V3, "tp", 3.5), (QWEN3_235B, "ep", 1.2)], ids=["DeepSeek-V3", "Qwen3"]
)
@pytest.mark.nightly_cases("DeepSeek-V3")  # covered: Qwen3
def test_64_ranks_to_8_engines_of_published_models(model, experts, seconds):
    """Share out the slices evenly; docs/weightsync.md has the seconds at 400 Gb/s."""
    table = specs(model)
    engine = vllm(model, 8, experts=experts)
    needs = [engine[worker % 8] for worker in range(64)]
    holdings = megatron(model, tensor=4, pipeline=4, expert=8, data=4)()
    result = plan(table, holdings, needs, chunk_bytes=256 * 2**20)
    assert result.imbalance <= 1.2
    assert result.seconds(400e9 / 8) == pytest.approx(seconds, rel=0.05)
    per_worker = [bytes_of(need, table) for need in engine]
    first_out, first_in, forwarded, relayed = result.traffic
    assert [a + b for a, b in zip(first_in[64:], relayed[64:], strict=True)] == per_worker * 8
    assert sum(first_out) + sum(forwarded) == 8 * sum(per_worker)
    for worker in (0, 37, 63):
        check_share(result.shares()[64 + worker], needs[worker], table, f"worker {worker}")


def two_ranks_and_eight_engines(rows: int):
    """Return (tensors, slices by rows of two ranks, needs by columns of eight engines of TP2)."""
    table = tuple(TensorSpec(f"w{index}", "bfloat16", (rows, 64)) for index in range(16))
    half = rows // 2
    holdings = [[Region(i, (half * rank, 0), (half, 64)) for i in range(16)] for rank in range(2)]
    engine = [[Region(i, (0, 32 * rank), (rows, 32)) for i in range(16)] for rank in range(2)]
    return table, holdings, [engine[worker % 2] for worker in range(16)]


def test_few_ranks_send_once_to_many_engines():
    """A trainer of two ranks to eight engines of TP2: workers forward, and the trainer sends each byte once."""
    table, holdings, needs = two_ranks_and_eight_engines(512)
    result = plan(table, holdings, needs, chunk_bytes=2**20)
    direct = plan(table, holdings, needs, chunk_bytes=2**20, relay=False)
    model_bytes = bytes_of(complete(table), table)
    assert sum(result.traffic[0]) == model_bytes
    assert sum(direct.traffic[0]) == 8 * model_bytes
    assert result.seconds(1) < 0.4 * direct.seconds(1)
    assert max(result.traffic[2]) <= 1.2 * sum(result.traffic[2]) / 16, "forwarding is uneven"
    table, holdings, needs = two_ranks_and_eight_engines(32)
    received = run(plan(table, holdings, needs, chunk_bytes=2**20, relay=True), table, holdings)
    assert all(counts == Counter(set(elements(need))) for counts, need in zip(received, needs, strict=True))


def test_a_stage_with_most_of_the_model_is_relieved_by_a_relay():
    """One rank holds four fifths and would send them to four engines; with a relay it sends them once."""
    table = tuple(TensorSpec(f"w{index}", "bfloat16", (1024, 8)) for index in range(10))
    holdings = [
        [complete_slice(index, table[index]) for index in range(8)],
        [complete_slice(index, table[index]) for index in (8, 9)],
    ]
    needs = [complete(table)] * 4
    result = plan(table, holdings, needs, chunk_bytes=4096)
    assert sum(result.traffic[0]) == bytes_of(complete(table), table)
    assert result.seconds(1) < 0.5 * plan(table, holdings, needs, chunk_bytes=4096, relay=False).seconds(1)


def test_a_part_that_no_rank_holds_is_named():
    table = (TensorSpec("a", "bfloat16", (4, 4)), TensorSpec("b", "bfloat16", (4,)))
    with pytest.raises(PlanError, match=r"no trainer rank holds all of a \(1 tensors\)"):
        plan(table, [[Region(0, (0, 0), (3, 4)), Region(1, (0,), (4,))]], [complete(table)], chunk_bytes=64)


def test_shares_that_do_not_fit_the_needs_are_refused():
    table = (TensorSpec("a", "bfloat16", (4, 4)), TensorSpec("b", "bfloat16", (4,)))
    need = [Region(0, (0, 0), (4, 2)), Region(1, (0,), (4,))]

    def share(*pieces: Region) -> Share:
        chunk = Chunk(pieces, bytes_of(pieces, table), 0, ())
        return Share("p", (chunk,), (Operation(False, 0, 0),))

    check_share(share(*need), need, table, "worker")
    with pytest.raises(PlanError, match="leaves out a part of b"):
        check_share(share(need[0]), need, table, "worker")
    with pytest.raises(PlanError, match="leaves out a part of a"):
        check_share(share(Region(0, (0, 0), (3, 2)), need[1]), need, table, "worker")
    with pytest.raises(PlanError, match="a part of a twice"):
        check_share(share(*need, Region(0, (1, 1), (1, 1))), need, table, "worker")
    with pytest.raises(PlanError, match="a part of a that is not needed"):
        check_share(share(Region(0, (0, 0), (4, 3)), need[1]), need, table, "worker")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["chunks"][0][1][0].__setitem__(0, 7), "not a slice of 2 tensors"),
        (lambda data: data["chunks"][0][1][0][2].__setitem__(0, 5), "is not within"),
        (lambda data: data["chunks"][0][1][0][1].__setitem__(0, -1), "not a slice of shape"),
        (lambda data: data["operations"].append([0, 0, 0]), "is received as number"),
        (lambda data: data["operations"].pop(), "0 of 1 chunks are received"),
        (lambda data: data["operations"].insert(0, [1, 0, 5]), "forwarded before it has arrived"),
        (lambda data: data.__setitem__("plan", ""), "not the name of a plan"),
    ],
)
def test_malformed_shares_are_refused(change, message):
    table = (TensorSpec("a", "bfloat16", (4, 4)), TensorSpec("b", "bfloat16", (4,)))
    data = plan(table, [complete(table)], [complete(table)], chunk_bytes=64).shares()[1].to_json()
    change(data)
    with pytest.raises(ManifestError, match=message):
        Share.from_json(data, table)


def test_overlapping_needs_are_counted_once():
    pieces = [Region(0, (0, 0), (4, 4)), Region(0, (2, 2), (4, 4)), Region(0, (0, 0), (4, 4))]
    assert elements(disjoint(pieces)) == Counter(set(elements(pieces)))
    assert sum(piece.volume for piece in disjoint(pieces)) == 28
    assert math.prod(()) == 1
