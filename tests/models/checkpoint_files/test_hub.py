"""Names on the Hub: downloaded from a stand-in of its HTTP API, read from the cache without it, and refused with the remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.hub_server import HubState, hub_server

FILES = {
    "models/owner/tiny": {"config.json": b'{"model_type": "llama"}', "pytorch_model.bin": b"not read"},
    "datasets/owner/chats": {
        "README.md": b"---\nlicense: mit\n---\n",
        "data/train.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
        "data/test.jsonl": b'{"text": "three"}\n',
    },
}


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a stand-in, and the paths that it was asked for."""
    with hub_server(HubState(files=FILES)) as state:
        yield state.address, state.requests


PROGRAM = """
import json, sys
from pathlib import Path
from megascend.apps.data.files import read_documents
from megascend.errors import MegascendError
from megascend.models.checkpoint_files.hub import snapshot

try:
    model = snapshot(Path(sys.argv[1]), "model", "model")
    data = snapshot(Path("owner/chats"), "dataset", "data.path")
    texts = [[document.text for document in read_documents(data, split)] for split in ("train", "test")]
    print(json.dumps([sorted(file.name for file in model.iterdir()), texts]))
except MegascendError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def resolved(folder: Path, endpoint: str, model: str = "owner/tiny", **environment: str) -> Any:
    """Resolve a model and a data set in a process with its own cache: huggingface_hub reads its variables when imported."""
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        cwd=folder,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_names_on_the_hub_are_downloaded_and_cached(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    endpoint, requests = hub
    expected = [["config.json"], [["one", "two"], ["three"]]]
    assert resolved(tmp_path, endpoint) == expected
    assert not any("pytorch_model.bin" in path for path in requests)
    requests.clear()
    assert resolved(tmp_path, endpoint, HF_HUB_OFFLINE="1") == expected
    assert requests == []
    message = resolved(tmp_path, endpoint, model="owner/missing")
    assert message.startswith(
        f"CheckpointError: model: owner/missing does not exist here, and {endpoint} did not give it"
    )
    assert "hf download owner/missing" in message
    # A directory here is never a name on the Hub, nor is a file that is missing from one.
    (tmp_path / "owner").mkdir()
    requests.clear()
    assert "owner/chats" in resolved(tmp_path, endpoint, model="owner")
    assert requests == []
    # Nor is a path in a folder that is here: a mistyped one would be downloaded from whoever has that name.
    assert "owner/tiny does not exist, and is not looked for on the Hub" in resolved(tmp_path, endpoint)
    assert requests == []


def test_name_without_network_and_cache_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    message = resolved(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "Without a network, run 'hf download owner/tiny' where there is one, and copy" in message
    assert str(tmp_path / "hf" / "hub") in message
