"""Samples as text in pieces of one weight, and their statistics."""

from __future__ import annotations

import pytest

from megascend import Sample
from megascend.apps.data import store as store_module
from megascend.apps.data.findings import Findings
from megascend.apps.data.preview import SamplePiece, SampleStatistics, pieces
from megascend.apps.data.store import Samples, hold_out, write_store

WORDS = ["▁he", "llo", "▁world", "!", "\u2581you"]


def decode(ids) -> str:
    """Decode as SentencePiece does, without the space before the first word."""
    return "".join(WORDS[i] for i in ids).replace("▁", " ").removeprefix(" ")


def test_pieces_have_the_text_and_the_weight_of_their_tokens():
    sample = Sample.causal([0, 1, 2, 3, 4], weights=[1, 0, 1, 1, 0.5])
    assert pieces(sample, decode) == [
        SamplePiece("hello", 0.0, 2),  # the first token is never predicted
        SamplePiece(" world!", 1.0, 2),
        SamplePiece(" you", 0.5, 1),
    ]


def test_split_character_is_replaced_in_both_pieces():
    halves = {0: b"caf", 1: b"\xc3", 2: b"\xa9"}
    sample = Sample.causal([0, 1, 2], weights=[0, 0, 1])
    parts = pieces(sample, lambda ids: b"".join(halves[i] for i in ids).decode(errors="replace"))
    assert [piece.text for piece in parts] == ["caf�", "�"]


COUNT = 1034


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Samples:
    path = tmp_path_factory.mktemp("samples") / "store"
    # Sample n has n % 5 + 1 tokens, of which n % 5 + 1 - (n % 2) carry loss.
    samples = [
        Sample.causal(range(n, n + n % 5 + 2), weights=[1, float(n % 2 == 0), *[2.0] * (n % 5)]) for n in range(COUNT)
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_module, "BATCH_BYTES", 1000)  # many batches of rows
        write_store(path, ((number, [sample]) for number, sample in enumerate(samples)), Findings())
    return Samples.open(path)


def test_statistics_count_tokens_with_weight(store: Samples):
    count = COUNT
    lengths = sorted(n % 5 + 1 for n in range(count))
    statistics = SampleStatistics.of(store)
    assert statistics.samples == count
    assert statistics.tokens == sum(lengths)
    assert statistics.supervised == sum(lengths) - count // 2
    assert (statistics.shortest, statistics.median, statistics.longest) == (1, 3, 5)
    assert statistics.mean == pytest.approx(sum(lengths) / count)
    assert statistics.p95 == 5


def test_statistics_of_parts_sum_to_the_total(store: Samples):
    learned, held_out = (SampleStatistics.of(part) for part in hold_out(store, 0.25, seed=3))
    every = SampleStatistics.of(store)
    assert held_out.samples == round(0.25 * every.samples)
    for name in ("samples", "tokens", "supervised"):
        assert getattr(learned, name) + getattr(held_out, name) == getattr(every, name)
