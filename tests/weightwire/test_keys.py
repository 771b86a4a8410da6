"""The key: its sources, and that it is never printed or pickled."""

from __future__ import annotations

import copy
import os
import pickle
import stat
from pathlib import Path

import pytest

from weightwire.errors import SecretKeyError, from_json, to_json
from weightwire.keys import ENVIRONMENT, Key, generate_key, load_key, read_key, write_key

TEXT = "0123456789abcdef" * 2 + "-secret"
OTHER = "fedcba9876543210" * 2 + "-secret"


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENVIRONMENT, f"{ENVIRONMENT}_FILE"):
        monkeypatch.delenv(name, raising=False)


def same(first: Key, second: Key) -> bool:
    return first.mac("test", "x") == second.mac("test", "x")


def test_key_arguments_precede_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SecretKeyError, match=f"set {ENVIRONMENT} or {ENVIRONMENT}_FILE"):
        load_key()
    in_file = write_key(tmp_path / "key")
    monkeypatch.setenv(f"{ENVIRONMENT}_FILE", str(tmp_path / "key"))
    assert same(load_key(), in_file)
    monkeypatch.setenv(ENVIRONMENT, OTHER)
    assert same(load_key(), Key(OTHER))
    assert same(load_key(file=tmp_path / "key"), in_file)
    assert same(load_key(TEXT), Key(TEXT))
    assert same(load_key(Key(TEXT)), Key(TEXT))
    with pytest.raises(SecretKeyError, match="one of them"):
        load_key(TEXT, file=tmp_path / "key")


def test_written_key_is_private_and_not_overwritten(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        key = write_key(tmp_path / "key")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert same(read_key(tmp_path / "key"), key)
    with pytest.raises(FileExistsError):
        write_key(tmp_path / "key")
    assert same(read_key(tmp_path / "key"), key)
    assert len({generate_key() for _ in range(100)}) == 100


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_key_file_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    write_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(SecretKeyError, match="chmod 600"):
        read_key(tmp_path / "key")


def test_invalid_key_file_is_refused_without_printing_it(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(SecretKeyError) as caught:
            read_key(path)
        return str(caught.value)

    def key_file(content: bytes) -> Path:
        path = tmp_path / "key"
        path.write_bytes(content)
        path.chmod(0o600)
        return path

    assert "No such file" in refused(tmp_path / "missing")
    assert "Is a directory" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "not a regular file" in refused(tmp_path / "pipe")  # and does not wait for a writer
    assert "7 characters" in refused(key_file(b"sesame1\n"))
    assert "sesame1" not in refused(key_file(b"sesame1\n"))
    assert "not ASCII" in refused(key_file(b"\xff" * 40))
    assert "not printable" in refused(key_file(b"sesame\x00" * 6))
    assert "1088 characters" in refused(key_file(b"x" * 10**6))


def test_a_key_is_not_printed_pickled_or_part_of_an_error() -> None:
    key = Key(TEXT)
    assert TEXT not in f"{key} {key!r} {vars(key) if hasattr(key, '__dict__') else ''}"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)
    assert copy.deepcopy({"key": key})["key"] is key
    error = from_json(to_json(SecretKeyError("too short")))
    assert type(error) is SecretKeyError
    assert key.bearer_token("a") != key.bearer_token("b")
    assert TEXT not in key.bearer_token("a")
