"""Full, read-only and slow disks: an error on every rank, no partial files, and training continues if configured."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from megascend import Adam, Adapters, Batching, CheckpointError, Lora
from megascend.config import RunConfig
from megascend.errors import PlatformError
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.distributed.objects import gather_objects
from megascend.testing import faults, run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import Retention
from support.forked_programs import run_command

pytestmark = pytest.mark.usefixtures("megatron_imported")

MIB = 2**20
DISK = 12 * MIB


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    return case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)


@pytest.fixture
def disk():
    """Mount a disk of 12 MiB, enough for several checkpoints of about 2 MiB."""
    try:
        with faults.full_disk(DISK) as folder:
            yield folder
    except PlatformError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


def make_backend(checkpoint, **options):
    from megascend.backends import MegatronBackend

    settings = {"precision": "fp32", "optimizer": Adam(lr=1e-2), "batching": Batching(micro_batch_tokens=512)}
    return MegatronBackend(checkpoint, timeout_s=30, **settings | options)


def train(backend, adapter=None):
    backend.forward_backward(backend.shard(causal_samples(token_lists(lengths=(9, 12, 7, 10)))), adapter=adapter)
    backend.optimizer_step()


def parameters(backend):
    return [p.detach().numpy().tobytes() for chunk in backend.engine.bare_chunks for p in chunk.parameters()]


def free(folder):
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def leave(folder, room):
    """Fill a disk except for ``room`` bytes."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free(folder) - room)


def on_rank_0(action):
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def common_message(backend, call):
    """Return the message of the CheckpointError of ``call``, or None; it must be equal on every rank."""
    try:
        call()
        message = None
    except CheckpointError as error:
        message = str(error)
    messages = gather_objects(message, "world", backend.groups)
    assert len(set(messages)) == 1, messages
    return message


def test_full_disk_at_any_point_of_a_save_keeps_the_previous_checkpoint(checkpoint, disk):
    """Save with room for nothing, part of a file, or some files: an error, and the previous checkpoint stays."""
    retention = Retention(disk / "checkpoints")

    def work():
        with make_backend(checkpoint) as backend:
            train(backend)
            backend.save(retention.path(1), after=retention.committed, wait=True)
            before = parameters(backend)
            size = sum(path.stat().st_size for path in retention.path(1).rglob("*") if path.is_file())
            train(backend)
            present, failed = parameters(backend), []
            on_rank_0(lambda: leave(disk, 0))
            rooms = [0, 4096, 8192, size // 4, size // 2, size - size // 10, *range(size - 16384, size + 40960, 8192)]
            for room in rooms:
                on_rank_0(lambda room=room: leave(disk, room // 4096 * 4096))
                left = free(disk)
                message = common_message(
                    backend, lambda: backend.save(retention.path(2), after=retention.committed).wait()
                )
                failed.append(message is not None)
                if message is None:
                    break
                assert "No space left on device" in message, message
                assert "step-00000002" in message
                dist.barrier()
                if retention.path(2).exists():  # only the file `latest` did not fit
                    assert "could not be put in place" in message
                    assert manifest.problems(retention.path(2), f := manifest.read(retention.path(2)).files, f) == []
                    on_rank_0(lambda: shutil.rmtree(retention.path(2)))
                assert abs(free(disk) - left) <= 8192  # tolerance for `latest` and directories
                dist.barrier()
                assert [path.name for path in retention.candidates()][:1] == ["step-00000001"]
                assert manifest.problems(retention.path(1), f := manifest.read(retention.path(1)).files, f) == []
                backend.load(retention.candidates()[0])
                assert parameters(backend) == before
                train(backend)
                assert parameters(backend) == present
                dist.barrier()
            on_rank_0((disk / "filler").unlink)
            backend.save(retention.path(2), after=retention.committed, wait=True)
            train(backend)
            backend.load(retention.candidates()[0])
            assert parameters(backend) == present
            return failed

    failed, _ = run_distributed(work, 2, init=False, timeout_s=180)
    assert failed[:6] == [True] * 6
    assert not failed[-1]  # the last room was large enough
    assert retention.latest() == 2
    assert sorted(p.name for p in (disk / "checkpoints").iterdir()) == ["latest", "step-00000001", "step-00000002"]


def test_full_disk_leaves_no_partial_adapters_or_exports(checkpoint, disk):
    """Write adapters, adapter checkpoints, exported models, and checkpoints with an exported model."""

    def work():
        with make_backend(checkpoint, adapters=Adapters(max_count=2)) as backend:
            backend.add_adapter("a", Lora(rank=8))
            train(backend, "a")
            targets = {
                "adapter": lambda path: backend.save_adapter("a", path),
                "merged": lambda path: backend.export_hf(path, adapter="a"),
                "base": backend.export_hf,
                "checkpoint": lambda path: backend.save(path, wait=True),
                "with hf": lambda path: backend.save(path, hf=True, wait=True),
            }
            sizes, messages = {}, []
            for name, write in targets.items():
                write(disk / name)
                dist.barrier()
                sizes[name] = sum(path.stat().st_size for path in (disk / name).rglob("*") if path.is_file())
            before = contents_of(disk)
            for name, write in targets.items():
                for room in (0, 4096, sizes[name] // 3, sizes[name] - 4096):
                    on_rank_0(lambda room=room: leave(disk, room // 4096 * 4096))
                    for target in (disk / name, disk / "new"):
                        message = common_message(backend, lambda write=write, target=target: write(target))
                        assert message is not None, (name, room)
                        messages.append((name, room, message))
                    dist.barrier()
                    on_rank_0((disk / "filler").unlink)
                    assert contents_of(disk) == before, (name, room)  # no partial files at either target
                    dist.barrier()
            for name, write in targets.items():
                write(disk / name)
            backend.load(disk / "with hf")
            return messages

    messages, _ = run_distributed(work, 2, init=False, timeout_s=120)
    for name, room, message in messages:
        assert "No space left" in message or "os error 28" in message.lower(), (name, room, message)


def contents_of(folder):
    """Return everything below a directory."""
    return {str(path.relative_to(folder)): path.is_dir() or path.read_bytes() for path in sorted(folder.rglob("*"))}


# --- a run ---


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Write a model with tokenizer, and data."""
    folder = tmp_path_factory.mktemp("run")
    command("new-model", folder / "model", "--hidden", "64", "--layers", "2", "--context", "128", check=True)
    lines = [{"text": f"the number {number} is followed by {number + 1}"} for number in range(16)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def settings(prepared, output, **checkpoint):
    return {
        "model": str(prepared / "model"),
        "output": str(output),
        "data": {"path": str(prepared / "text.jsonl"), "global_batch_size": 4},
        "steps": 40,
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": 0.001},
        "plot": False,
        "export": False,
        "timeout_s": 60,
        "checkpoint": {"every": 2, "keep_last": 1, **checkpoint},
    }


def command(*arguments, check=False):
    completed = run_command(*arguments, timeout_s=180)
    assert not check or completed.returncode == 0, completed.stderr
    return completed


def events(output):
    path = Path(output) / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def test_run_continues_on_a_full_disk_and_saves_again_later(prepared, disk):
    """Fill the run's disk, metrics included, and clear it while the run continues."""
    from megascend.apps.train.train import train as train_run

    output, stop = disk / "run", threading.Event()

    def watch():
        """Fill the disk after the first checkpoint; clear it after three failures."""
        wait_for(lambda: any(event["event"] == "saved" for event in events(output)), stop)
        leave(disk, 64 * 1024)
        wait_for(lambda: sum(event["event"] == "save_failed" for event in events(output)) >= 3, stop)
        (disk / "filler").unlink()

    def work():
        result = train_run(RunConfig(**settings(prepared, output, on_failure="continue")))
        return result.steps

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert run_distributed(work, 2, init=False, timeout_s=180) == [40, 40]
    finally:
        stop.set()
        watcher.join(10)
    kinds = [event["event"] for event in events(output) if event["event"] in ("saved", "save_failed")]
    failures = kinds.count("save_failed")
    assert failures >= 3
    assert kinds[0] == kinds[-1] == "saved"
    assert kinds.index("save_failed") < len(kinds) - 1
    assert all("No space left" in event["problem"] for event in events(output) if event["event"] == "save_failed")
    retention = Retention(output / "checkpoints")
    assert retention.candidates() == [retention.path(40)]
    assert manifest.problems(retention.path(40), f := manifest.read(retention.path(40)).files, f) == []
    assert sorted(path.name for path in retention.directory.iterdir()) == ["latest", "step-00000040"]
    rows = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 41))


def test_failed_checkpoint_of_the_last_step_is_retried(prepared, checkpoint, disk):
    from megascend.apps.train.checkpoint_policy import CheckpointPolicy
    from megascend.apps.train.event_log import EventLog
    from megascend.apps.train.run_directory import OutputDirectory

    config = RunConfig(**settings(prepared, disk / "run", on_failure="continue"))
    retention, last = Retention(disk / "run" / "checkpoints"), config.checkpoint.every

    def work():
        with make_backend(checkpoint) as backend:
            log = EventLog(config.output, Launch.from_environment(), active=True)
            learner: Any = SimpleNamespace(state=dict, best_step=None)
            saves = CheckpointPolicy(OutputDirectory(config, backend, log), learner, {})
            train(backend)
            on_rank_0(lambda: leave(disk, 0))
            saves.after_step(last, stop=False)
            while saves.problem is None:
                saves.after_step(last + 1, stop=False)
            problem = saves.problem
            on_rank_0(lambda: leave(disk, 8 * MIB))
            saves.finish(last)
            return problem, saves.problem, retention.steps()

    for problem, afterwards, steps in run_distributed(work, 2, init=False, timeout_s=180):
        assert "No space left" in problem
        assert afterwards is None
        assert steps == [last]


def wait_for(condition, stop, seconds=60):
    until = time.monotonic() + seconds
    while not condition() and not stop.is_set() and time.monotonic() < until:
        time.sleep(0.005)


@pytest.mark.nightly
def test_run_exits_with_code_2_on_a_full_disk_and_resumes(prepared, disk):
    output = disk / "run"
    (prepared / "stop.yaml").write_text(yaml.safe_dump(settings(prepared, output, on_failure="stop", keep_last=9)))
    completed = command("train", prepared / "stop.yaml", "--nproc", "2")  # the disk has no room for twenty checkpoints
    assert completed.returncode == 2, completed.stderr
    assert "No space left on device" in completed.stderr
    assert "Traceback" not in completed.stderr
    retention = Retention(output / "checkpoints")
    steps = retention.steps()
    assert steps
    assert retention.latest() == steps[-1] < 40
    assert all(
        manifest.problems(retention.path(s), f := manifest.read(retention.path(s)).files, f) == [] for s in steps
    )
    assert not [path for path in retention.directory.iterdir() if path.name.startswith(".step")]
    shutil.rmtree(retention.path(steps[0]))  # make room
    arguments = ("--resume", "auto", "--set", "checkpoint.keep_last=1", "--set", f"steps={steps[-1] + 2}")
    completed = command("train", prepared / "stop.yaml", "--nproc", "2", *arguments)
    assert completed.returncode == 0, completed.stderr
    assert f"resumed from {retention.path(steps[-1])} after step {steps[-1]}" in completed.stdout
    assert retention.steps() == [steps[-1] + 2]


# --- slow disks ---
