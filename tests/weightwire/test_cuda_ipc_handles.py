"""CUDA IPC checks every field it reads from the store; the copies themselves need a GPU (tests/gpu)."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.errors import TransportError
from weightwire.transports.cuda_ipc import HANDLE_FIELDS, _handle, _numbers

VALUES: dict[str, Any] = {
    "memory": base64.b64encode(b"\x01handle").decode(),
    "size": 2**29,
    "offset": 512,
    "counter": base64.b64encode(b"/torch_1_2").decode(),
    "counter_offset": 3,
    "event": "",
    "wait_for_event": False,
}


def test_handle_is_read_in_the_order_of_pytorch() -> None:
    assert list(VALUES) == list(HANDLE_FIELDS)
    handle = _handle(json.dumps(VALUES).encode())
    assert handle == [b"\x01handle", 2**29, 512, b"/torch_1_2", 3, b"", False]


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from([*HANDLE_FIELDS, "another"]),
    value=st.one_of(st.none(), st.floats(), st.just("no base64!"), st.lists(st.integers(), max_size=2), st.just({})),
)
def test_a_malformed_handle_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TransportError, match="no handle of an allocation"):
        _handle(json.dumps({**VALUES, name: value}).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b"\xff"])
def test_invalid_handle_text_raises_transport_error(text: bytes) -> None:
    with pytest.raises(TransportError, match="no handle of an allocation"):
        _handle(text)


@pytest.mark.parametrize("text", [b"[1, 2]", b"[1, 2, true]", b"{}", b"[1, 2, 3.0]", b"", b"\xff"])
def test_invalid_bucket_text_raises_transport_error(text: bytes) -> None:
    assert _numbers(b"[1, 2, 3]", 3) == [1, 2, 3]
    with pytest.raises(TransportError, match="is no bucket"):
        _numbers(text, 3)
