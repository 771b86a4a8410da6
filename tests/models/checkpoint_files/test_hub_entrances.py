"""Every call and command that takes a model takes its name on the Hub, here from a cache in huggingface_hub's layout, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint

NAME, COMMIT = "owner/tiny", "0123456789abcdef0123456789abcdef01234567"
PROGRAM = """
import io, json, sys, traceback
from pathlib import Path
import megascend
from megascend.apps.train.layout_plan import model_checkpoint
from megascend.apps.train.exports import inference_settings
from megascend.apps.cli.main import app
from megascend.config import RunConfig
from megascend.config.rl import RlConfig
from megascend.config.serve import ServeConfig
from megascend.models.checkpoint_files.hub import with_snapshots
from megascend.apps.rl.rollout.engines.local import LocalEngine

NAME = "owner/tiny"
RUN = {"model": NAME, "output": "out"}
RL = RUN | {"rollout": {"prompts": "p", "prompts_per_step": 1, "group_size": 2, "max_tokens": 1}, "engines": ["local"]}

REWARD = RL | {"rollout": RL["rollout"] | {"reward": "math:sqrt"}}


def cli(*arguments):
    try:
        app([*arguments], prog_name="megascend")
    except SystemExit as end:
        assert not end.code, end.code


ENTRANCES = {
    "init": lambda: cli("init", "sft", NAME, "run.yaml"),
    "plan": lambda: model_checkpoint(Path(NAME)).__enter__(),
    "generate": lambda: cli("generate", NAME, "prompts.jsonl", "--max-tokens", "1", "--dtype", "torch.float32"),
    "chat": lambda: cli("chat", NAME, "--dtype", "fp32"),
    "export": lambda: cli("export", NAME, "exported", "--engine", "single", "--dtype", "float32"),
    "eval": lambda: inference_settings(Path(NAME), None, None, "single", "cpu", "fp32", 1).model,
    "backend": lambda: megascend.SingleBackend(NAME, precision="fp32", self_check=False).close(),
    "revision": lambda: megascend.EngineSpec.of(NAME + "@main", {}).model,
    "teacher": lambda: with_snapshots(RlConfig(**RL, teacher={"model": NAME})).teacher.model,
    "reference": lambda: with_snapshots(RlConfig(**REWARD, reference={"model": NAME})).reference.model,
    "reference base": lambda: with_snapshots(RlConfig(**REWARD, reference={})).reference.model,
    "distillation": lambda: with_snapshots(
        RunConfig(**RUN, data={"path": "d"}, distillation={"teacher": NAME})).distillation.teacher,
    "serve": lambda: with_snapshots(ServeConfig(model=NAME)),
    "local engine": lambda: LocalEngine(NAME, own_process=False),
}
sys.stdin = io.StringIO("")
megascend.bootstrap("cpu", engine="single")
results = {}
for name, call in ENTRANCES.items():
    try:
        results[name] = repr(call())
    except Exception:
        results[name] = traceback.format_exc()
Path("results.json").write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a HF_HOME whose cache holds a tiny model: refs/main names the commit, its snapshot links to blobs."""
    folder = tmp_path_factory.mktemp("hub")
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, ModelSize(layers=1), seed=1)
    repository = folder / "hub" / "models--owner--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(path for path in checkpoint.iterdir() if path.is_file())):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return folder


def test_name_on_the_hub_is_taken_by_every_entrance(home: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name for name, text in results.items() if "Traceback" in text} == set(), completed.stderr[-2000:]
    for entrance in ("plan", "eval", "revision", "teacher", "reference", "distillation", "serve"):
        assert COMMIT in results[entrance], entrance
    assert f"name='{NAME}'" in results["serve"]  # what clients may call it
    assert f"model: {NAME}\n" in (tmp_path / "run.yaml").read_text()  # the run file names what the user named
