"""Files that are hashed and flushed while they are written, compared with xxhash, torch and zipfile."""

import random
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import get_crc32_options, set_crc32_options

from megascend.runtime.io import hashing
from megascend.runtime.io.hashing import HashingWriter
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.torch_io import ChunkWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("piece", [64, 16 * 2**20])
def test_content_size_and_digest_cover_all_writes(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(hashing, "PIECE", piece)
    draw = random.Random(piece)
    parts = [draw.randbytes(draw.choice((0, 1, 63, 64, 65, 500, 9000, 70_000))) for _ in range(60)]
    with HashingWriter(tmp_path / "file") as file:
        for number, part in enumerate(parts, 1):
            assert file.write(part) == len(part)
            assert file.tell() == file.size == sum(map(len, parts[:number]))
            assert file.digest == xxhash.xxh3_128_hexdigest(b"".join(parts[:number]))
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_full_disk_raises_os_error():
    with HashingWriter(Path("/dev/full")) as file, pytest.raises(OSError, match="No space left"):
        file.write(bytes(2**20))
    file = HashingWriter(Path("/dev/full"))
    file.write(b"less than a buffer")
    with pytest.raises(OSError, match="No space left"):
        file.close()


def save_state(directory, state):
    writer = ChunkWriter(directory)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return writer.digests


def test_chunk_writer_digests_match_and_torch_reads_the_files(tmp_path):
    state = {"weight": torch.randn(300, 70), "half": torch.randn(9).bfloat16(), "step": 3}
    digests = save_state(tmp_path, state)
    assert digests == {name: manifest.digest(tmp_path / name) for name in ("__0_0.distcp",)}
    loaded = {"weight": torch.zeros(300, 70), "half": torch.zeros(9).bfloat16(), "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"])
    assert torch.equal(loaded["half"], state["half"])
    assert loaded["step"] == 3


@pytest.mark.parametrize("before", [True, False])
def test_chunk_writer_skips_crc32_and_restores_torchs_setting(tmp_path, before):
    set_crc32_options(before)
    try:
        save_state(tmp_path, {"weight": torch.ones(5000)})
        assert get_crc32_options() is before
        with pytest.raises(CheckpointException, match="pickle"):
            save_state(tmp_path / "unpicklable", {"object": lambda: None})
        assert get_crc32_options() is before
    finally:
        set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "__0_0.distcp") as records:
        data = next(entry for entry in records.infolist() if entry.filename.endswith("/data/0"))
        assert data.file_size == 20_000
        with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
            records.read(data)
