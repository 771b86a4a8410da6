"""Every call and command that takes a model takes its name on the Hub, here from a cache in huggingface_hub's layout, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascend.testing import write_tiny_checkpoint

NAME, COMMIT = "owner/tiny", "0123456789abcdef0123456789abcdef01234567"
ENTRANCES = {
    "init": "cli(['init', 'sft', NAME, 'run.yaml'])",
    "plan": "cli(['plan', NAME, '--cards', '1'])",
    "generate": "cli(['generate', NAME, 'prompts.jsonl', '--max-tokens', '1', '--platform', 'cpu', '--dtype', 'torch.float32'])",
    "chat": "sys.stdin = io.StringIO(''); cli(['chat', NAME, '--platform', 'cpu', '--dtype', 'fp32'])",
    "export": "cli(['export', NAME, 'out', '--engine', 'single', '--dtype', 'float32'])",
    "backend": "megascend.SingleBackend(model=NAME, precision='fp32', platform='cpu').close()",
    "revision": "megascend.SingleBackend(model=NAME + '@main', precision='fp32', platform='cpu').close()",
    "teacher": "print(with_snapshots(RlConfig(**RUN, rollout={'prompts': 'p'}, teacher={'model': NAME})).teacher.model)",
    "eval": "print(inference_settings(Path(NAME), None, None, 'single', 'cpu', 'fp32', 1).model / 'config.json')",
    "distillation": "print(with_snapshots(RunConfig(**RUN, distillation={'teacher': NAME})).distillation.teacher)",
    "serve": "print(with_snapshots(ServeConfig(model=NAME)))",
    "local engine": "LocalEngine(NAME, own_process=False)",
}
PROGRAM = """
import io, sys
from pathlib import Path
import megascend
from megascend.cli.generate import inference_settings
from megascend.cli.main import app
from megascend.config import RunConfig
from megascend.config.rl import RlConfig
from megascend.config.serve import ServeConfig
from megascend.huggingface.hub import with_snapshots
from megascend.rollout.engines.local import LocalEngine

NAME, RUN = "owner/tiny", {"model": "owner/tiny", "output": "out"}


def cli(arguments):
    try:
        app(arguments, prog_name="megascend")
    except SystemExit as end:
        assert not end.code, end.code
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a HF_HOME whose cache holds a tiny model: refs/main names the commit, its snapshot links to blobs."""
    folder = tmp_path_factory.mktemp("hub")
    checkpoint = write_tiny_checkpoint(folder / "checkpoint", "qwen3", num_hidden_layers=1)
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


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_name_on_the_hub_is_taken(entrance: str, home: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    completed = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}\n{ENTRANCES[entrance]}"],
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    if entrance == "init":  # the run file names what the user named
        assert f"model: {NAME}\n" in (tmp_path / "run.yaml").read_text()
    if entrance in ("teacher", "eval", "distillation", "serve"):
        assert COMMIT in completed.stdout
    if entrance == "serve":
        assert f"name='{NAME}'" in completed.stdout
