"""Hostile files in a checkpoint run nothing, read nothing else, and take neither memory nor time."""

from __future__ import annotations

import io
import os
import pickle
import random
import tracemalloc
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_runs import exact_state, make_backend, small_model, train
from test_corruption import message_of, seal
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megascend import CheckpointError
from megascend.testing import run_distributed
from megascend.training.checkpoint import manifest, unpickling
from megascend.training.checkpoint.torch_io import ChunkReader, ChunkWriter

PROTO, STOP = b"\x80\x04", b"."
METADATA = "torch.distributed.checkpoint.metadata"


class Call:
    """Pickled as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def text(value):
    return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()


def stack_global(module, name):
    return text(module) + text(name) + pickle.STACK_GLOBAL


def hash_bomb(share):
    """Return a dictionary with a key whose hash takes 2**200 steps, made by doubling tuples of the given opcodes."""
    return b"}" + b"K\x01" + 200 * share + b"K\x01s"


def of_metadata(path="__0_0.distcp", size=(2,), transforms=None, fqn="w"):
    tensor = TensorStorageMetadata(
        TensorProperties(), torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    )
    tensor.size = size if isinstance(size, list) else torch.Size(size)
    index = MetadataIndex("w")
    object.__setattr__(index, "fqn", fqn)
    return pickle.dumps(Metadata({"w": tensor}, None, {index: _StorageInfo(path, 0, 9, transforms)}))


RUN = "__import__('os').mkdir('pwned')"
HOSTILE = {
    "reduce": pickle.dumps(Call(eval, RUN)),
    "reduce, protocol 0": pickle.dumps(Call(eval, RUN), protocol=0),
    "inside metadata": pickle.dumps(Metadata({"w": Call(os.mkdir, "pwned")}, None, {})),
    "instance": PROTO + b"(" + text("pwned") + b"ios\nmkdir\n" + STOP,
    "object": PROTO + b"(" + stack_global("os", "mkdir") + text("pwned") + b"o" + STOP,
    "dotted name in a known module": PROTO + stack_global(METADATA, "os.mkdir") + text("pwned") + b"\x85R" + STOP,
    "other name in a known module": PROTO + stack_global("torch", "load") + text("pwned") + b"\x85R" + STOP,
    "nested pickle": pickle.dumps(Call(pickle.loads, pickle.dumps(Call(eval, RUN)))),
    "nested torch pickle": pickle.dumps(Call(torch.storage._load_from_bytes, b"x")),
    "getattr": PROTO
    + stack_global("builtins", "getattr")
    + stack_global(METADATA, "Metadata")
    + text("__init__")
    + b"\x86R"
    + STOP,
    "state of a class": PROTO
    + stack_global(METADATA, "TensorProperties")
    + b"N}"
    + text("__setstate__")
    + stack_global("torch", "Size")
    + b"s\x86b"
    + STOP,
    "extension registry": PROTO + b"\x82\x01" + STOP,
    "large memo": PROTO + b"K\x01r\xff\xff\xff\x7f" + STOP,
    "large bytearray": pickle.dumps(Call(bytearray, 10**11)),
    "large bytes": PROTO + b"\x8e" + (2**40).to_bytes(8, "little") + STOP,
    "hash of doubled tuples": PROTO + hash_bomb(b"q\x00h\x00\x86") + STOP,
    "hash of duplicated tuples": PROTO + hash_bomb(b"2\x86") + STOP,
    "hash of an index": of_metadata(fqn=("w",)),
    "list for a size": of_metadata(size=[2]),
    "file elsewhere": of_metadata(path="../w.distcp"),
    "absolute file": of_metadata(path="/etc/passwd"),
    "transform": of_metadata(transforms=["stream.zstd"]),
    "not metadata": pickle.dumps({"a": 1}),
    "cut short": of_metadata()[:-9],
    "empty": b"",
}


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def rezipped(content, compression=zipfile.ZIP_STORED, extra=(), replace=None):
    """Return a file of torch.save with other compression, further records, or another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w", compression) as fresh:
        for record in archive.infolist():
            data = replace if replace is not None and record.filename.endswith("data.pkl") else archive.read(record)
            fresh.writestr(record.filename, data)
        for name, data in extra:
            fresh.writestr(name, data)
    return out.getvalue()


def scripted():
    class Module(torch.nn.Module):
        def forward(self, x):
            return x

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Module()), file)
    return file.getvalue()


EVIL = pickle.dumps(Call(eval, RUN), protocol=2)
HOSTILE_OBJECTS = {
    "reduce": lambda: saved({"python": Call(eval, RUN)}),
    "legacy file": lambda: saved({"python": Call(eval, RUN)}, _use_new_zipfile_serialization=False),
    "plain pickle": lambda: pickle.dumps(Call(eval, RUN)),
    "nested pickle": lambda: saved({"python": Call(torch.storage._load_from_bytes, saved(Call(eval, RUN)))}),
    "scripted module": scripted,
    "large bytearray": lambda: saved({"python": Call(bytearray, 10**11)}),
    "numpy function": lambda: saved({"numpy": Call(numpy.load, "pwned", None, True)}),
    "array of objects": lambda: saved({"numpy": numpy.array([Call(eval, RUN)], dtype=object)}),
    "compressed": lambda: rezipped(saved(torch.zeros(10**6)), zipfile.ZIP_DEFLATED),
    "second pickle": lambda: rezipped(saved(torch.zeros(2)), extra=[("archive/data.pkl", EVIL)]),
    "second pickle, other case": lambda: rezipped(saved(torch.zeros(2)), extra=[("ARCHIVE/DATA.PKL", EVIL)]),
    "other pickle": lambda: rezipped(saved(torch.zeros(2)), replace=EVIL),
    "hash of doubled tuples": lambda: rezipped(
        saved(torch.zeros(2)), replace=b"\x80\x02" + hash_bomb(b"q\x00h\x00\x86") + STOP
    ),
    "empty": lambda: b"",
}


@pytest.fixture(autouse=True)
def harmless(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not Path("pwned").exists()
    assert peak < 64 * 2**20


@pytest.mark.parametrize("form", HOSTILE)
def test_hostile_metadata_is_refused(form):
    before = dict(vars(TensorProperties))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        unpickling.read_metadata(HOSTILE[form])
    assert dict(vars(TensorProperties)) == before


@pytest.mark.parametrize("form", HOSTILE_OBJECTS)
@pytest.mark.filterwarnings("ignore")
def test_hostile_object_is_refused(form):
    with pytest.raises(CheckpointError, match="random/0"):
        unpickling.load(io.BytesIO(HOSTILE_OBJECTS[form]()), "random/0")


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "uint16", "int64", "bool")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_torch_writes_is_read_as_torch_reads_it(protocol, tmp_path):
    """Read tensors of all kinds and the random states of Python, NumPy and torch; torch's own reader is the reference."""
    values = {name: torch.arange(6).to(getattr(torch, name)).view(2, 3) for name in DTYPES}
    states = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": {"model-parallel-rng": torch.get_rng_state(), "expert-parallel-rng": torch.get_rng_state()},
    }
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save({**values, "random/0": states}, storage_writer=ChunkWriter(tmp_path), planner=planner, no_dist=True)
    expected = pickle.loads((tmp_path / ".metadata").read_bytes())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(expected, protocol))
    reader = ChunkReader(tmp_path)
    metadata = reader.read_metadata()
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.storage_data == expected.storage_data
    for index, info in metadata.storage_data.items():
        with open(tmp_path / info.relative_path, "rb") as file:
            value = unpickling.load(reader._slice_file(file, info), index.fqn)
            file.seek(info.offset)
            reference = torch.load(io.BytesIO(file.read(info.length)), weights_only=False)
        if index.fqn == "random/0":
            assert repr(value) == repr(reference)
            numpy.random.set_state(value["numpy"])
        else:
            assert value.dtype == reference.dtype
            assert torch.equal(value.view(torch.uint8), reference.view(torch.uint8))


@pytest.mark.usefixtures("megatron_imported")
def test_hostile_checkpoint_changes_nothing(parity_folder, tmp_path):
    """Refuse a checkpoint whose metadata, or whose random state, is a program with a valid digest; the original still loads."""
    checkpoint = small_model(parity_folder)

    def body():
        backend = make_backend(checkpoint)
        train(backend)
        backend.save(tmp_path / "step", wait=True)
        before = exact_state(backend)
        original = (tmp_path / "step" / ".metadata").read_bytes()
        inside = pickle.loads(original)
        info = next(info for index, info in inside.storage_data.items() if index.fqn == "random/0")
        state = tmp_path / "step" / info.relative_path
        evil = saved({"python": Call(eval, RUN)})
        tensors = state.read_bytes()
        info.offset, info.length = len(tensors), len(evil)
        for metadata, content in ((HOSTILE["reduce"], tensors), (pickle.dumps(inside), tensors + evil)):
            (tmp_path / "step" / ".metadata").write_bytes(metadata)
            state.write_bytes(content)
            seal(tmp_path / "step")
            assert "more than data" in message_of(backend, tmp_path / "step")
            assert metadata is not HOSTILE["reduce"] or exact_state(backend) == before
        (tmp_path / "step" / ".metadata").write_bytes(original)
        state.write_bytes(tensors)
        seal(tmp_path / "step")
        backend.load(tmp_path / "step")
        assert exact_state(backend) == before
        assert not Path("pwned").exists()

    run_distributed(body, 1)


def test_named_pipe_in_a_checkpoint_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".metadata")
    files = {".metadata": manifest.entry(0, "0" * 32)}
    assert manifest.problems(tmp_path, files, files) == [".metadata is not a file"]


def test_metadata_of_a_torch_without_transforms_is_read(monkeypatch):
    """torch 2.6's entries have no such field."""
    written = of_metadata()
    monkeypatch.delattr(_StorageInfo, "transform_descriptors")
    (entry,) = unpickling.read_metadata(written).storage_data.values()
    assert entry.relative_path == "__0_0.distcp"
