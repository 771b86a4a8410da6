"""Untrusted manifests are read completely or refused; buckets hold every byte once and in order."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire import errors
from weightwire.errors import ManifestError
from weightwire.manifest import DTYPE_BYTES, MAX_NAME, AdapterInfo, Manifest, TensorSpec, offsets, plan_buckets
from weightwire.offer import Offer, Seal

names = st.text(st.characters(categories=("L", "N"), include_characters="._-"), min_size=1, max_size=30)
specs = st.builds(
    TensorSpec, names, st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 40), max_size=4).map(tuple)
)
tables = st.lists(specs, min_size=1, max_size=12, unique_by=lambda spec: spec.name).map(tuple)
manifests = st.builds(
    Manifest,
    st.integers(0, 2**62),
    tables,
    st.integers(2**22, 2**33),
    st.just("multilinear64"),
    st.none()
    | st.builds(AdapterInfo, names.filter(lambda n: not n.startswith(".")), st.just({"r": 4, "targets": ["q"]})),
)


@given(tables, st.integers(1, 5000))
def test_buckets_hold_every_byte_once(tensors, bucket_bytes):
    begins = offsets(tensors)
    total = sum(spec.nbytes for spec in tensors)
    if total > 3000 * bucket_bytes:
        bucket_bytes = total // 3000 + 1
    buckets = plan_buckets(tensors, bucket_bytes)
    start = 0
    for index, bucket in enumerate(buckets):
        assert (bucket.index, bucket.start) == (index, start)
        assert 0 < bucket.nbytes <= bucket_bytes
        assert bucket.nbytes == bucket_bytes or bucket is buckets[-1]
        offset = 0
        for piece in bucket.pieces:
            assert piece.position == offset
            assert piece.length > 0
            assert begins[piece.tensor] + piece.offset == bucket.start + piece.position
            assert piece.offset + piece.length <= tensors[piece.tensor].nbytes
            offset += piece.length
        assert offset == bucket.nbytes
        start = bucket.stop
    assert start == total


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def offer_of(manifest):
    return Offer("update-1", "trainer", "127.0.0.1", 1234, 1, 2, "gloo", 30.0, 60.0, manifest, {"threads": 2})


def test_repeated_tensors_are_parsed_once_and_others_checked():
    manifest = Manifest(1, (TensorSpec("a", "int8", (1, 2)), TensorSpec("b", "int8", (1,))))
    first, second = (Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) for _ in range(2))
    assert second.tensors is first.tensors
    assert plan_buckets(second.tensors, 2) is plan_buckets(first.tensors, 2)
    assert [len(plan_buckets(first.tensors, size)) for size in (1, 2, 3)] == [3, 2, 1]
    for size in (True, 1.0):  # equal to the size in the last manifest
        data = manifest.to_json()
        data["tensors"][0][2][0] = size
        with pytest.raises(ManifestError, match="has shape"):
            Manifest.from_json(data)
    data = manifest.to_json()
    data["tensors"][1][0] = "a"
    with pytest.raises(ManifestError, match="a is listed twice"):
        Manifest.from_json(data)
    assert Manifest.from_json(manifest.to_json()) == manifest


@given(manifests, st.data())
def test_changed_offer_is_read_unchanged_or_refused(manifest, data):
    """Raise ManifestError and nothing else, or read an offer that serializes to its input."""
    fields = offer_of(manifest).to_json()
    parent = fields
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [key for key, value in items(parent) if isinstance(value, (dict, list)) and value]
        if not inner:
            break
        parent = parent[data.draw(st.sampled_from(inner))]
    key = data.draw(st.sampled_from([key for key, _ in items(parent)]))
    change = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "replace":
        parent[key] = data.draw(json_values)
    elif change == "remove":
        del parent[key]
    elif isinstance(parent, dict):
        parent[data.draw(names)] = 1
    else:
        parent.append(parent[0])
    try:
        read = Offer.from_json(copy.deepcopy(fields))
    except ManifestError:
        return
    assert normal(read.to_json()) == normal(fields)


def items(value):
    return value.items() if isinstance(value, dict) else list(enumerate(value))


def normal(value):
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": -1}, "version -1"),
        ({"version": True}, "version True"),
        ({"version": "7"}, "version '7'"),
        ({"bucket_bytes": 0}, "bucket_bytes 0"),
        ({"bucket_bytes": 2**40}, "bucket_bytes"),
        ({"tensors": []}, "0 tensors"),
        ({"tensors": [["a", "float32", [2]], ["a", "float32", [2]]]}, "a is listed twice"),
        ({"tensors": [["a", "complex64", [2]]]}, "a has dtype 'complex64'"),
        ({"tensors": [["a", "float32", [-1]]]}, "a has shape"),
        ({"tensors": [["a", "float32", [2.0]]]}, "a has shape"),
        ({"tensors": [["a\n", "float32", [2]]]}, "not the name of a tensor"),
        ({"tensors": [["a" * (MAX_NAME + 1), "float32", [2]]]}, "not the name of a tensor"),
        ({"tensors": [["a", "float32", [2**40, 2**40]]]}, "at most"),
        ({"tensors": [["a", "uint8", [2**40]]], "bucket_bytes": 1}, "buckets are possible"),
        ({"format": 2}, "format 2; this side supports format 1"),
        ({"more": 1}, "unknown fields 'more'"),
        ({"adapter": {"name": "../x", "config": {}}}, "looks like a path"),
        ({"adapter": {"name": "x", "config": {"a": "b" * 70000}}}, "has 7"),
        ({"adapter": {"name": "x"}}, "without config"),
    ],
)
def test_invalid_manifest_field_is_named(change, text):
    good = Manifest(1, (TensorSpec("a", "float32", (2,)),)).to_json()
    with pytest.raises(ManifestError, match=text):
        Manifest.from_json(good | change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *(({"protocol": value}, "this side speaks 1") for value in (2, True, 1.0, "1", None)),
        ({"port": 0}, "port is 0"),
        ({"first": 0}, "first is 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"lease_s": 1e9}, "lease_s is 1000000000.0"),
        ({"owner": ""}, "owner is ''"),
        ({"options": []}, "options is not a mapping"),
        ({"manifest": None}, "a mapping was expected"),
    ],
)
def test_invalid_offer_field_is_named(change, text):
    good = offer_of(Manifest(1, (TensorSpec("a", "float32", (2,)),)))
    assert Offer.from_json(good.to_json()) == good
    with pytest.raises(ManifestError, match=text):
        Offer.from_json(good.to_json() | change)


def test_offer_ranks_belong_to_its_workers():
    offer = offer_of(Manifest(1, (TensorSpec("a", "float32", (2,)),)))
    assert [offer.rank(0), offer.rank(1)] == [1, 2]
    with pytest.raises(ManifestError, match="for 2 workers, and this is worker 2"):
        offer.rank(2)


@pytest.mark.parametrize(
    "change", [{"digests": "ab"}, {"digests": [1]}, {"version": -1}, {"update": 1}, {"protocol": 0}]
)
def test_a_malformed_seal_is_refused(change):
    with pytest.raises(ManifestError):
        Seal.from_json(Seal("update-1", 1, "0" * 64, ("ab",)).to_json() | change)


def test_errors_survive_pickle_and_json():
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.WireError):
            error = kind("engine-1 did it")
            for repeated in (pickle.loads(pickle.dumps(error)), errors.from_json(errors.to_json(error))):
                assert type(repeated) is kind
                assert str(repeated) == "engine-1 did it"
    assert str(errors.from_json({"error": "KeyError", "message": "x"}, "engine-1")) == "engine-1: x"
    assert type(errors.from_json("no mapping")) is errors.WireError


def test_manifest_plan_and_offer_import_no_torch():
    code = "import sys, weightwire.manifest, weightwire.offer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
