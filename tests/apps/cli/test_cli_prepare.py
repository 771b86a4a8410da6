"""``megascend prepare``: samples made on one machine are read on another without the data, if nothing they depend on differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
from megascend.apps.data.files import read_documents
from megascend.apps.data.order import fingerprint_of
from megascend.apps.data.samples import SampleLimits, build_samples
from megascend.apps.train.run_samples import RunSamples
from megascend.config import load_config
from megascend.models.checkpoint_files.tokenizer import load_tokenizer
from support.forked_programs import COMMAND, environment, run_forked

WITHOUT_DEVICES = f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n{COMMAND}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare two sources and validation data in a process that sees no device."""
    folder = tmp_path_factory.mktemp("prepare")
    write_checkpoint(folder / "model", ModelSize(hidden=32, layers=1, heads=2, kv_heads=2, context=64), 0)
    for name, count in (("a", 5), ("b", 3), ("held_out", 2)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(count)))
    sources = [{"path": f"{name}.jsonl", "weight": 1} for name in ("a", "b")]
    run = {"model": "model", "output": "run", "data": {"sources": sources}, "validation": {"path": "held_out.jsonl"}}
    (folder / "run.yaml").write_text(json.dumps(run | {"parallel": {"tensor": 2}}))
    command = ("prepare", "run.yaml", "--output", "tokens")
    variables = environment(MEGASCEND_CACHE=str(folder / "cache"))
    process = run_forked(WITHOUT_DEVICES, *command, directory=folder, variables=variables)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        "learned: 8 samples, 24 tokens",
        "held out: 2 samples, 20 tokens",
        "written to tokens: set data.prepared: tokens where the run starts",
    ]
    repeated = run_forked(WITHOUT_DEVICES, *command, directory=folder, variables=variables)
    assert repeated.returncode == 2
    assert "--output: tokens exists and is not an empty directory" in repeated.stderr
    return folder


def samples(folder: Path, **changes: Any) -> RunSamples:
    config = load_config("run.yaml", ["data.prepared=tokens", *(f"{name}={value}" for name, value in changes.items())])
    limits = SampleLimits(64, vocab_size=None, budget=config.batching.budget)
    return RunSamples.prepare(config, load_tokenizer(config.model), limits)


@pytest.fixture
def elsewhere(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the model, the run file and the prepared samples, without the data, to another folder, with an empty cache."""
    for name in ("model", "tokens"):
        shutil.copytree(prepared / name, tmp_path / name)
    shutil.copy(prepared / "run.yaml", tmp_path)
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_prepared_samples_are_read_without_the_data(prepared: Path, elsewhere: Path) -> None:
    run_samples = samples(elsewhere)
    tokenizer = load_tokenizer(elsewhere / "model")
    documents = [*read_documents(prepared / "a.jsonl"), *read_documents(prepared / "b.jsonl")]
    assert fingerprint_of(list(run_samples.train)) == fingerprint_of(build_samples(documents, tokenizer, 64))
    assert run_samples.held_out is not None
    assert len(run_samples.held_out) == 2
    assert not (elsewhere / "cache").exists(), "nothing is tokenised"
