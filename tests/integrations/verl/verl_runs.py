"""Files and commands of the tests that start verl's own programs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DEADLINE_S = 400

FP32 = "+engine.override_transformer_config.params_dtype=float32"


def environment(**more: str) -> dict[str, str]:
    """For a process that imports verl on this machine's CPU; ``vendor`` megascend unless ``more`` says otherwise."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_VENDOR": "megascend", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **own, **more}


def python(arguments: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A program of verl's interpreter, which is this one, to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def write_data(folder: Path) -> None:
    """24 conversations of different lengths to train on, 8 to hold out."""
    import pandas

    rows = []
    for number in range(32):
        count = 1 + number * 7 % 9
        answer = " ".join(WORDS[1 : count + 1])
        turns = [{"role": "user", "content": f"count to {WORDS[count]}"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns})
    pandas.DataFrame(rows[:24]).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[24:]).to_parquet(folder / "val.parquet")


def sft_command(folder: Path, model: str, name: str, ranks: int, *settings: str) -> list[str]:
    """verl's SFT trainer under torchrun; two epochs of three steps, validation after each."""
    return [
        *("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={random.randint(20000, 60000)}"),
        *("-m", "verl.trainer.sft_trainer", "engine=megatron", "optim=megatron", FP32),
        f"model.path={folder / model}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        *("data.train_batch_size=8", "data.max_token_len_per_gpu=256", "data.num_workers=0"),
        *("optim.lr=1e-2", "optim.weight_decay=0", "trainer.logger=[file]", "trainer.total_epochs=2"),
        *("trainer.device=cpu", "trainer.test_freq=3", f"trainer.default_local_dir={folder / name}"),
        *settings,
    ]


def logged(path: Path) -> dict[str, Any]:
    """What verl's file logger has written: (loss, norm) by step, validation losses by step."""
    steps, validation = {}, {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        data = record["data"]
        if "train/loss" in data:
            steps[record["step"]] = (data["train/loss"], data["train/grad_norm"])
        if "val/loss" in data:
            validation[record["step"]] = data["val/loss"]
    return {"steps": steps, "validation": validation}
