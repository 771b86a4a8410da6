"""Checkpoints in object storage: a real S3 server (moto's), reached through a proxy that is slow, refuses or cuts connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from megascend.apps.train import object_storage
from megascend.apps.train.object_storage import ObjectStorage, Uploads, fetch_checkpoint
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.config.run import Checkpoint
from megascend.errors import CheckpointError, ConfigError, DistributedTestError, MissingDependencyError
from megascend.testing import faults, run_distributed
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import Retention
from support.runs import events, run_config, tiny_run
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("megatron_imported")
moto = pytest.importorskip("moto.server", reason="moto (the test extra) is not installed")
DEADLINE_S = 240
FILES = {"__0_0.distcp": b"weights" * 5000, "adapters/a/adapter.bin": b"adapter" * 900, "common.pt": b"common"}


class Proxy:
    """TCP proxy to a server, with a fault in the way from the client.

    Attributes:
        refuses: number of connections to close at once.
        cuts: number of connections to close after some thousand bytes of a request.
        delay_s: seconds to wait before each piece of a request.
    """

    def __init__(self, port: int) -> None:
        self.refuses, self.cuts, self.delay_s = 0, 0, 0.0
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self.refuses > 0:
                self.refuses -= 1
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, from_client: bool) -> None:
        sent = 0
        try:
            while piece := source.recv(4096):
                sent += len(piece)
                if from_client:
                    time.sleep(self.delay_s)
                    if sent > 8192 and self.cuts > 0:
                        self.cuts -= 1
                        break
                target.sendall(piece)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield running.get_host_and_port()[1]
    running.stop()


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    between = Proxy(server)
    variables = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    # The client's own repetitions would hide ours.
    variables |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{between.port}", "AWS_MAX_ATTEMPTS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_storage, "RETRY_AFTER_S", 0.01)
    yield between
    between.close()


@pytest.fixture
def remote(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    import boto3

    bucket = f"bucket-{abs(hash(request.node.name))}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/team/run"


def checkpoint(folder: Path, step: int) -> Path:
    path = Retention(folder / "checkpoints").path(step)
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content + b"%d" % step)
    files = {name: manifest.digest(path / name) for name in FILES}
    values: dict[str, Any] = {"precision": "fp32", "model": {}, "layout": {}, "optimizer": None, "adapters": []}
    saved = manifest.CheckpointManifest(step=step, versions={}, files=files, **values)
    (path / manifest.NAME).write_text(saved.to_text())
    return path


def uploads(remote: str, **settings: Any) -> tuple[Uploads, list[tuple[str, str]]]:
    events: list[tuple[str, str]] = []
    log: Any = SimpleNamespace(event=lambda kind, **values: events.append((kind, values["name"])))
    return Uploads(Checkpoint(remote=remote, **settings), log), events


def config(folder: Path, remote: str) -> RunConfig:
    return RunConfig(
        model=folder, output=folder / "run", data={"path": folder / "d.jsonl"}, checkpoint={"remote": remote}
    )


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_checkpoint_comes_back_as_it_was(remote: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path, 10)
    copies, events = uploads(remote)
    with copies:
        copies.check()
        copies.add_checkpoint(source)
    assert events == [("uploaded", source.name)]
    fetch_checkpoint(config(tmp_path, remote), False, "auto")
    assert contents(tmp_path / "run/checkpoints" / source.name) == contents(source)


@pytest.mark.parametrize("fault", ["refuses", "cuts"])
def test_fault_is_repeated_until_the_copy_is_whole(fault: str, proxy: Proxy, remote: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path, 10)
    copies, events = uploads(remote)
    setattr(proxy, fault, 2)
    with copies:
        copies.add_checkpoint(source)
    assert events == [("uploaded", source.name)]
    ObjectStorage(remote).fetch(source.name, tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(source)


def test_lasting_fault_ends_the_run_with_an_error_and_leaves_no_half_checkpoint(
    proxy: Proxy, remote: str, tmp_path: Path
) -> None:
    first, second = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    copies, events = uploads(remote)
    copies.add_checkpoint(first)
    wait_until(lambda: events)
    proxy.cuts = 1_000_000
    copies.add_checkpoint(second)
    with pytest.raises(CheckpointError, match=f"{remote} is not up to date: step-00000020"):
        copies.__exit__(None, None, None)
    assert events == [("uploaded", first.name), ("upload_failed", second.name)]
    proxy.cuts = 0
    assert ObjectStorage(remote).steps() == [10]
    # The next run copies what is missing.
    again, events = uploads(remote)
    with again:
        again.add_checkpoint(second)
    assert ObjectStorage(remote).candidates() == [20, 10]


def test_error_of_the_run_takes_precedence(proxy: Proxy, remote: str, tmp_path: Path) -> None:
    copies, events = uploads(remote)
    proxy.refuses = 1_000_000
    copies.add_checkpoint(checkpoint(tmp_path, 10))
    copies.__exit__(ZeroDivisionError)
    assert events == [("upload_failed", "step-00000010")]


def test_slow_storage_gets_the_newest_and_the_one_in_use_stays(proxy: Proxy, remote: str, tmp_path: Path) -> None:
    steps = [checkpoint(tmp_path, step) for step in (10, 20, 30)]
    copies, events = uploads(remote)
    proxy.delay_s = 0.05
    with copies:
        copies.add_checkpoint(steps[0])
        wait_until(lambda: copies.in_use)
        assert copies.in_use == {10}
        for path in steps[1:]:
            copies.add_checkpoint(path)
        proxy.delay_s = 0
    assert [name for _, name in events] == [steps[0].name, steps[2].name]


def test_superseded_checkpoints_are_removed(remote: str, tmp_path: Path) -> None:
    copies, events = uploads(remote, keep_last=2, keep_every=20)
    with copies:
        for number, step in enumerate((10, 20, 30, 40, 50), 1):
            copies.add_checkpoint(checkpoint(tmp_path, step), keep={10})
            wait_until(lambda number=number: len(events) == number)
    assert ObjectStorage(remote).steps() == [10, 20, 40, 50]


def test_damaged_checkpoint_is_passed_over(remote: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies, events = uploads(remote)
    with copies:
        for number, step in enumerate((10, 20), 1):
            copies.add_checkpoint(checkpoint(tmp_path, step))
            wait_until(lambda number=number: len(events) == number)
    storage = ObjectStorage(remote)
    storage._files.pipe_file(f"{storage._root}/checkpoints/step-00000020/common.pt", b"commoN20")
    fetch_checkpoint(config(tmp_path, remote), False, "auto")
    assert "common.pt is damaged" in caplog.text
    assert Retention(tmp_path / "run/checkpoints").steps() == [10]


def test_earlier_run_is_refused_or_replaced_after_the_first_step(remote: str, tmp_path: Path) -> None:
    copies, _ = uploads(remote)
    with copies:
        copies.add_checkpoint(checkpoint(tmp_path, 100))
    with pytest.raises(ConfigError, match="holds a run \\(step 100\\)"):
        fetch_checkpoint(config(tmp_path, remote), False, None)
    fetch_checkpoint(config(tmp_path, remote), True, None)
    assert not (tmp_path / "run").exists()
    log: Any = SimpleNamespace(event=lambda *_, **__: None)
    with Uploads(Checkpoint(remote=remote), log) as copies:
        assert ObjectStorage(remote).steps() == [100]
        copies.clear()
    assert ObjectStorage(remote).steps() == []


def test_copied_export_does_not_hide_that_a_checkpoint_is_missing(proxy: Proxy, remote: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    copies, events = uploads(remote)
    proxy.refuses = 1_000_000
    copies.add_checkpoint(checkpoint(tmp_path, 10))
    wait_until(lambda: events)
    proxy.refuses = 0
    copies.add_export(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is not up to date: step-00000010"):
        copies.__exit__(None, None, None)
    assert events == [("upload_failed", "step-00000010"), ("uploaded", "hf")]


def test_removal_that_fails_ends(proxy: Proxy, remote: str) -> None:
    copies, events = uploads(remote)
    proxy.refuses = 1_000_000
    copies.clear()
    with pytest.raises(CheckpointError, match="an earlier run's checkpoints"):
        copies.__exit__(None, None, None)
    assert [kind for kind, _ in events] == ["upload_failed"]


def test_what_cannot_work_is_refused_before_the_first_step(remote: str) -> None:
    with pytest.raises(CheckpointError, match="s3://no-such-bucket-here/run cannot be written"):
        uploads("s3://no-such-bucket-here/run")[0].check()
    with pytest.raises(ConfigError, match="Protocol not known: s4"):
        ObjectStorage("s4://bucket/run")
    with pytest.raises(MissingDependencyError, match=r"megascend\[gs\]"):
        ObjectStorage("gs://bucket/run")


@pytest.mark.slow
def test_lost_machine_continues_from_the_storage_bit_for_bit(remote: str, tmp_path: Path) -> None:
    """Kill a run after its checkpoints were copied, and resume it in a new directory, as on a new machine."""
    folder = tiny_run(tmp_path)
    options = {"steps": 8, "export": True}

    def run(output: str, resume: str | None = None, overwrite: bool = False, **saves: Any) -> None:
        settings = run_config(folder, tmp_path / output, **options, checkpoint={"every": 2, **saves})
        run_distributed(
            lambda: train(settings, resume=resume, overwrite=overwrite).steps, 1, init=False, timeout_s=DEADLINE_S
        )

    run("uninterrupted")
    with faults.inject(faults.Fault("raise", rank=0, phase="forward and backward", step=6)), pytest.raises(Exception):  # noqa: B017
        run("lost", remote=remote)
    assert ObjectStorage(remote).candidates()[0] >= 4
    run("new", resume="auto", remote=remote)
    names = ("uninterrupted", "new")
    first, second = (load_file(tmp_path / name / "hf/model.safetensors") for name in names)
    assert all(first[name].equal(second[name]) for name in first.keys() | second.keys())
    steps = (tmp_path / "new/metrics.jsonl").read_text().splitlines()
    assert len(steps) < 8  # the others were done on the machine that was lost
    storage = ObjectStorage(remote)
    exported = {path.rpartition("/")[2] for path in storage._files.ls(f"{storage._root}/hf", detail=False)}
    assert exported == {file.name for file in (tmp_path / "new/hf").iterdir()}


@pytest.mark.slow
def test_restarted_run_keeps_the_copies_of_its_own_checkpoints(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start ``--overwrite`` again after the rank died, as torchrun does: the checkpoints there are no earlier run's by then."""
    saves = {"every": 2, "keep_last": 9, "asynchronous": False, "remote": remote}
    settings = run_config(tiny_run(tmp_path), tmp_path / "run", steps=8, checkpoint=saves)
    copies, _ = uploads(remote)
    with copies:
        copies.add_checkpoint(checkpoint(tmp_path / "earlier", 100))

    def attempt(number: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        run_distributed(lambda: train(settings, overwrite=True).steps, 1, init=False, timeout_s=DEADLINE_S)

    fault = faults.Fault("raise", rank=0, phase="forward and backward", step=6, attempt=0)
    with faults.inject(fault):
        with pytest.raises(DistributedTestError, match="rank 0"):
            attempt(0)
        assert ObjectStorage(remote).steps() == [2, 4]
        attempt(1)
    assert [event["attempt"] for event in events(settings.output, "resumed")] == [1]
    assert ObjectStorage(remote).steps() == [2, 4, 6, 8]
