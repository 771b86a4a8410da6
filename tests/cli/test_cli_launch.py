"""Starting ranks here: the result comes back, and of several failures the one that caused the others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megascend.cli.launch import WorkerError, launch
from megascend.errors import DataError


def ranks_see_torchrun_variables(word: str) -> tuple[str, str, str, str]:
    return word, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]


def rank_1_finds_a_mistake(sign: Path) -> None:
    if os.environ["RANK"] == "1":
        sign.touch()
        raise DataError("chat.jsonl:7: broken")
    while not sign.exists():
        time.sleep(0.001)
    raise RuntimeError("Connection closed by peer")


def rank_1_has_a_bug() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("weight")
    time.sleep(60)


def rank_0_is_killed() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_the_result_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(ranks_see_torchrun_variables, "hello", nproc=2) == ("hello", "0", "2", "1")
    assert "OMP_NUM_THREADS" not in os.environ
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ


def test_our_error_wins_over_what_it_caused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^chat\.jsonl:7: broken$"):
        launch(rank_1_finds_a_mistake, tmp_path / "sign", nproc=2)


def test_another_exception_keeps_its_traceback() -> None:
    with pytest.raises(WorkerError, match=r"rank 1 raised KeyError: 'weight'") as caught:
        launch(rank_1_has_a_bug, nproc=2)
    assert "rank_1_has_a_bug" in str(caught.value)


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 .* SIGKILL"):
        launch(rank_0_is_killed, nproc=2)


def test_nproc_under_torchrun_is_refused(megascend, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\noutput: o\ndata: {path: d}\n")
    done = megascend("train", tmp_path / "run.yaml", "--nproc", "2", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "--nproc 2 under torchrun" in done.stderr
