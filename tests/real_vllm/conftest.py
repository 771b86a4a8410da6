"""Fixtures of tests whose module has a ``server``."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from support.vllm_server import Reference, Server, Weights
from weightwire.group import Listener


@pytest.fixture(scope="module")
def reference(server: Server) -> Reference:
    return Reference(server.checkpoint)


@pytest.fixture(scope="module")
def weights(server: Server) -> Weights:
    return load_file(server.checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener()
