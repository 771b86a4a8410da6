"""Uploads to the Hub: refused before training, kept and repeated after a failure; the Hub is a stand-in with its HTTP API."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megascend.apps.train.exports import find_export
from megascend.apps.train.push import model_card, with_base_model
from megascend.config import RunConfig
from megascend.errors import CheckpointError, ConfigError
from support.forked_programs import COMMAND, environment, run_forked
from support.hub_server import HubState, hub_server
from support.runs import write_lines, write_run


@pytest.fixture
def hub() -> Iterator[HubState]:
    state = HubState()
    state.add_account("writer", "me", "write", "me", "team")
    state.add_account("reader", "me", "read")
    state.add_account("scoped", "me", "fineGrained", "me")
    with hub_server(state):
        yield state


def variables(hub: HubState, token: str | None) -> dict[str, str]:
    home = {"HF_HOME": "/nonexistent", "HF_TOKEN_PATH": "/nonexistent/token"}
    names = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **home}
    return names | ({} if token is None else {"HF_TOKEN": token})


# A fork has imported huggingface_hub, which reads some of these variables when it is imported.
FORKED = f"""
import json, os
from huggingface_hub import constants

os.environ.pop("HF_TOKEN", None)
os.environ.update(json.loads(os.environ.pop("HUB_VARIABLES")))
constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = os.environ["HF_ENDPOINT"], True
constants.HF_TOKEN_PATH = os.environ["HF_TOKEN_PATH"]
{COMMAND}
"""


def forked(
    hub: HubState, folder: Path, *arguments: str, token: str | None = "writer"
) -> subprocess.CompletedProcess[str]:
    names = environment(HUB_VARIABLES=json.dumps(variables(hub, token)))
    return run_forked(FORKED, *arguments, directory=folder, variables=names)


CHECKS = """
import json, os, sys
from megascend.errors import HubError
from megascend.models.checkpoint_files.hub import check_access, create_repository

messages = []
for token, repository in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        check_access(repository)
        create_repository(repository, private=True)
        messages.append("")
    except HubError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def test_tokens_that_cannot_write_are_refused_by_name(hub: HubState) -> None:
    hub.files["models/other/public"] = {}
    cases = {
        (
            None,
            "me/new",
        ): "push to me/new: there is no token: set HF_TOKEN to one that may write to me",
        ("expired", "me/new"): f"the Hub did not accept the token (HF_TOKEN, or of 'hf auth login') ({hub.address})",
        ("reader", "me/new"): 'the token "me\'s" of me may only read: create one with the role write',
        (
            "writer",
            "other/new",
        ): "is of me, a member of team, and cannot write to other: choose me/new, or another token",
        ("scoped", "team/new"): "push to team/new: the repository can neither be created nor written to",
        # It exists, so that creating it is no error.
        ("scoped", "other/public"): "push to other/public: the repository can neither be created nor written to",
        ("writer", "team/new"): "",
        ("scoped", "me/new"): "",
    }
    command = [sys.executable, "-c", CHECKS, json.dumps(list(cases))]
    names = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"} | variables(hub, None)
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=names)
    assert process.returncode == 0, process.stderr
    messages = json.loads(process.stdout.splitlines()[-1])
    for message, (case, expected) in zip(messages, cases.items(), strict=True):
        assert (expected in message) if expected else not message, (case, message)
    assert {"models/team/new", "models/me/new"} < hub.files.keys()
    assert hub.private == {"team/new", "me/new"}
    assert not any("commit" in path for path in hub.requests)


def write_pushed_run(folder: Path, model: Path, **settings: Any) -> None:
    write_lines(folder / "data.jsonl", ({"text": text} for text in ("one two", "three four")))
    data = {"path": "data.jsonl", "global_batch_size": 2}
    write_run(folder, model=str(model), output="run", steps=2, data=data, **settings)


def test_a_failed_upload_keeps_the_export_and_is_repeated_by_its_command(small_model, hub, tmp_path) -> None:
    write_pushed_run(tmp_path, small_model, engine="single", push={"repository": "me/small"})
    refused = forked(hub, tmp_path, "train", "run.yaml", token=None)
    assert refused.returncode == 2, refused.stderr
    assert "HubError: push to me/small: there is no token" in refused.stderr
    assert not (tmp_path / "run").exists()

    hub.failing.add("commit/")
    failed = forked(hub, tmp_path, "train", "run.yaml")
    assert failed.returncode == 2, failed.stderr
    [line] = [line for line in failed.stderr.splitlines() if line.startswith("HubError")]
    assert "run/hf is complete, but was not uploaded: push to me/small: the upload failed" in line
    command = line.rpartition("To repeat it: ")[2]
    assert command == "megascend push run/hf me/small"
    exported = {path.name: path.read_bytes() for path in (tmp_path / "run" / "hf").iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "README.md"} <= exported.keys()
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2

    hub.failing.clear()
    _, *arguments = shlex.split(command)
    repeated = forked(hub, tmp_path, *arguments)
    assert repeated.returncode == 0, repeated.stderr
    assert f"run/hf -> {hub.address}/me/small/commit/" in repeated.stdout
    stored = hub.files["models/me/small"]
    assert {name: content for name, content in stored.items() if name != ".gitattributes"} == exported
    assert hub.private == {"me/small"}
    # The weights were stored by the upload that failed.
    assert sum(path.startswith("storage/") and path.count("/") == 1 for path in hub.requests) == 1
    card = stored["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1]) == {"library_name": "transformers", "tags": ["megascend"]}
    for row in ("| base model | qwen3 |", "| data | data.jsonl |", "| steps | 2 |", "| data.global_batch_size | 2 |"):
        assert row in card
    assert str(tmp_path) not in card


def test_a_card_and_an_adapter_name_models_and_data_of_the_hub(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    base = str(cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc")
    data = {"sources": [{"path": str(cache / "datasets--owner--chats" / "snapshots" / "def"), "weight": 1.0}]}
    run = tmp_path / "tuned"
    adapter = run / "adapter"
    (adapter / "templates").mkdir(parents=True)
    (adapter / "templates" / "tools.jinja").write_text("{{ messages }}")
    settings = RunConfig(model=base, output=run, data=data, lora={"rank": 8})  # type: ignore[arg-type]
    (run / "config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": base}))
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")

    assert find_export(run) == find_export(adapter) == adapter
    rows = [{"step": step, "loss": 4.0 - step} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "events.jsonl").write_text(json.dumps({"event": "finished", "step": 3, "exported_step": 2}) + "\n")
    card = model_card(adapter)
    assert "| steps | 2, the best one of 3 |\n| loss of step 2 | 2 |" in card
    metadata = {
        "library_name": "peft",
        "tags": ["megascend"],
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["owner/chats"],
    }
    assert yaml.safe_load(card.split("---")[1]) == metadata
    assert "# tuned" in card
    assert "| base model | Qwen/Qwen3-0.6B |" in card
    assert "| lora.rank | 8 |" in card
    assert str(tmp_path) not in card

    uploaded = with_base_model(adapter, tmp_path / "links")
    files = {str(path.relative_to(uploaded)): path.read_bytes() for path in uploaded.rglob("*") if path.is_file()}
    assert json.loads(files.pop("adapter_config.json")) == {"r": 8, "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    assert files == {"adapter_model.safetensors": b"weights", "templates/tools.jinja": b"{{ messages }}"}
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == base

    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds both a model and an adapter"):
        find_export(run)
    with pytest.raises(CheckpointError, match=r"holds no exported model or adapter; expected config.json or"):
        find_export(tmp_path)
