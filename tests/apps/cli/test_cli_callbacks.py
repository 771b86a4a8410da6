"""A callback of a run file stops a run: exit code and messages of the commands."""

from __future__ import annotations

from pathlib import Path

from support.runs import write_lines, write_run

CALLBACK = """
import megascend

class Stop(megascend.Callback):
    def on_step(self, control, record):
        control.should_training_stop = True
"""


def test_stop_ends_with_75_and_says_how_to_resume(megascend, small_model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "texts.jsonl", ({"text": f"number {n}"} for n in range(4)))
    (tmp_path / "mine.py").write_text(CALLBACK)
    data = {"path": "texts.jsonl", "global_batch_size": 2}
    write_run(tmp_path, model=str(small_model), data=data, steps=4, engine="single", callbacks=["mine.py:Stop"])
    completed = megascend("train", "run.yaml", cwd=tmp_path, code=75)
    assert "stopped by callback mine.py:Stop after step 1; resume with --resume auto" in completed.stdout
    assert (tmp_path / "out" / "checkpoints" / "step-00000001").is_dir()
    report = megascend("doctor", "--run", tmp_path / "out")
    assert "stopped by callback mine.py:Stop after step 1 of 4" in report.stdout
