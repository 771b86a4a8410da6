"""Asynchronous saving: a checkpoint has the state of one moment, and nothing waits forever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from small_runs import exact_state, make_backend, train

from megascend import CheckpointError, ConfigError
from megascend.errors import MegascendError
from megascend.runtime.distributed.objects import gather_objects
from megascend.testing import run_distributed
from megascend.training.checkpoint import manifest

pytestmark = pytest.mark.usefixtures("megatron_imported")


def slow_disk(seconds):
    """Delay every ``fsync`` of this process by ``seconds``."""
    fsync = os.fsync

    def slowly(descriptor):
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slowly
    return fsync


def block_disk():
    """Block every ``fsync`` of writer threads until the returned event is set."""
    fsync, release = os.fsync, threading.Event()

    def wait_then_sync(descriptor):
        if threading.current_thread() is not threading.main_thread():
            assert release.wait(120)
        fsync(descriptor)

    os.fsync = wait_then_sync
    return release


class WaitingDisk:
    """Disk that writes only while the main thread waits for a checkpoint, after at least ``PAUSE_S`` seconds.

    Attributes:
        stuck: do not write even then.
    """

    PAUSE_S = 0.2

    def __init__(self, monitor):
        self.stuck = False
        self._release, self._phase = block_disk(), monitor.phase
        monitor.phase = self._watched

    @contextlib.contextmanager
    def _watched(self, name, *details):
        waits = bool(details) and details[0].startswith("waiting for ") and not self.stuck
        with self._phase(name, *details):
            if waits:
                time.sleep(self.PAUSE_S)
                self._release.set()
            yield
        if waits:
            self._release.clear()


def on_two_ranks(body, checkpoint, **options):
    def work():
        with make_backend(checkpoint, **options) as backend:
            return body(backend)

    return run_distributed(work, 2, init=False, timeout_s=180)


def test_saves_loads_and_steps_in_every_order(checkpoint, tmp_path):
    """Overlap saves, loads and steps on a waiting disk: each checkpoint has the state at its save call."""

    def body(backend):
        train(backend)
        backend.save(tmp_path / "one", wait=True)  # the first save allocates memory and creates its group
        disk = WaitingDisk(backend.groups.monitor)
        states = {}

        # Two saves in a row, the second after steps during the first
        states["one"] = exact_state(backend)
        first = backend.save(tmp_path / "one", progress={"at": (1, "one")})
        train(backend, 3)
        assert not first.done
        states["two"] = exact_state(backend)
        two = backend.save(tmp_path / "two", progress={"at": 2})
        assert first.done
        assert not two.done
        states["three"] = exact_state(backend)
        three = backend.save(tmp_path / "three")
        assert two.done
        assert (first.step, two.step, three.step) == (1, 4, 4)
        assert two.stall_s > disk.PAUSE_S  # the second has waited for the first

        # A load, of the very checkpoint that is being written
        train(backend)
        assert not three.done
        assert backend.load(tmp_path / "three") == {}
        assert three.done
        assert exact_state(backend) == states["three"]

        # A load of an earlier one, while another is being written
        train(backend)
        states["four"] = exact_state(backend)
        four = backend.save(tmp_path / "four")
        assert not four.done
        assert backend.load(tmp_path / "one") == {"at": [1, "one"]}
        assert four.done

        # Deadlines
        five = backend.save(tmp_path / "five")
        disk.stuck = True
        with pytest.raises(TimeoutError, match=r"five is not complete after 0\.05 s"):
            five.wait(timeout_s=0.05)
        disk.stuck = False
        five.wait()
        states["five"] = states["one"]
        for name, expected in states.items():
            backend.load(tmp_path / name)
            assert exact_state(backend) == expected, name

        # The end, while a checkpoint is being written
        backend.save(tmp_path / "last")
        return True

    assert on_two_ranks(body, checkpoint) == [True, True]
    assert manifest.problems(tmp_path / "last", files := manifest.read(tmp_path / "last").files, files) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["five", "four", "last", "one", "three", "two"]


def test_files_and_directories_are_synced_before_the_rename(checkpoint, tmp_path):
    """Sync each file, and each directory that holds one, before the directory is renamed."""

    def body(backend):
        synchronised, fsync, before = set(), os.fsync, []
        os.fsync = lambda descriptor: (synchronised.add(os.fstat(descriptor).st_ino), fsync(descriptor))
        exchange = os.replace

        def replace(source, target):
            if str(target).endswith("/new"):
                before.extend(synchronised)
            exchange(source, target)

        os.replace = replace
        train(backend)
        backend.save(tmp_path / "new", hf=True, wait=True)
        paths = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
        # Another rank's files are complete before rank 0 renames: the renaming waits for their digests.
        synced_inodes = set().union(
            *gather_objects(before if backend.rank == 0 else list(synchronised), "world", backend.groups)
        )
        return [
            str(path) for path in paths if path.stat().st_ino not in synced_inodes
        ], tmp_path.stat().st_ino in synchronised

    (left, parent), _ = on_two_ranks(body, checkpoint)
    assert left == []
    assert parent


def test_failed_save_raises_on_every_rank_and_the_next_save_works(checkpoint, tmp_path):
    def body(backend):
        train(backend)
        backend.save(tmp_path / "last", wait=True)
        state = exact_state(backend)
        train(backend)

        def refused(match, **options):
            with pytest.raises(CheckpointError, match=match) as caught:
                backend.save(tmp_path / "last", **options).wait()
            return str(caught.value)

        # An error of the caller's function, of any kind, after the checkpoint is in place
        messages = [refused("ZeroDivisionError: ", after=lambda path: 1 / 0)]
        messages.append(refused("nowhere", after=lambda path: (tmp_path / "nowhere" / "x").write_text("")))

        # A rank that cannot write
        fsync = os.fsync
        if backend.rank == 1:
            os.fsync = lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        train(backend)
        messages.append(refused("Input/output error"))
        os.fsync = fsync
        assert len(set(gather_objects(tuple(messages), "world", backend.groups))) == 1

        # Values that are not JSON are refused before anything is written
        for progress in ({"loss": torch.ones(2)}, {"path": tmp_path}, {(1, 2): 3}):
            with pytest.raises(ConfigError, match="progress must be JSON"):
                backend.save(tmp_path / "last", progress=progress)
        backend.save(tmp_path / "keys", progress={1: "a", "1": "b", "pair": (1, 2)}, wait=True)
        assert backend.load(tmp_path / "keys") == {"1": "b", "pair": [1, 2]}

        # A failed export leaves no files either
        backend.engine.export, export = (
            (lambda path, adapter: (_ for _ in ()).throw(CheckpointError("no export"))),
            backend.engine.export,
        )
        refused("no export", hf=True)
        backend.engine.export = export

        backend.save(tmp_path / "good", wait=True)
        dist.barrier()
        return [entry.name for entry in tmp_path.iterdir()], state == exact_state(backend)

    for names, _ in on_two_ranks(body, checkpoint):
        assert sorted(names) == ["good", "keys", "last"]


def test_unobserved_failure_is_raised_once_by_the_next_call(checkpoint, tmp_path):
    def body(backend):
        reported = []
        for call in (lambda: backend.save(tmp_path / "b"), lambda: backend.load(tmp_path / "good"), backend.close):
            if not (tmp_path / "good").exists():
                backend.save(tmp_path / "good", wait=True)
            pending = backend.save(tmp_path / "a", after=lambda path: 1 / 0)
            while not pending.done:
                time.sleep(0.01)
            with pytest.raises(CheckpointError, match="ZeroDivisionError"):
                call()
            reported.append(pending.reported)
        return reported

    def work():
        backend = make_backend(checkpoint)
        return body(backend)

    assert run_distributed(work, 2, init=False, timeout_s=180) == [[True] * 3] * 2


def test_timeout_on_one_rank_fails_the_next_call_on_all(checkpoint, tmp_path):
    """Fail on both ranks although only one reaches its deadline: ranks have separate clocks."""

    def body(backend):
        release = block_disk()
        slow = backend.save(tmp_path / "slow")
        wait = slow._wait
        if backend.rank == 1:
            slow._timeout_s = 0.01
            slow._wait = lambda seconds: (wait(seconds), release.set())[0]
        else:
            release.set()
        with pytest.raises(CheckpointError, match=r"slow is not complete 0\.01 s after it was waited for"):
            backend.save(tmp_path / "next")
        slow._timeout_s = 30
        backend.save(tmp_path / "next", wait=True)
        return manifest.read(tmp_path / "slow").step, manifest.read(tmp_path / "next").step

    assert on_two_ranks(body, checkpoint) == [(0, 0)] * 2


# --- leaving while a checkpoint is being written ---


def test_exception_in_the_block_waits_for_the_pending_checkpoint(checkpoint, tmp_path):
    def work():
        try:
            with make_backend(checkpoint) as backend:
                slow_disk(0.2)
                backend.save(tmp_path / "last")
                raise KeyError("caller")
        except KeyError as error:
            return str(error)

    assert run_distributed(work, 2, init=False, timeout_s=180) == ["'caller'"] * 2
    assert manifest.problems(tmp_path / "last", files := manifest.read(tmp_path / "last").files, files) == []


def test_exception_in_the_block_of_one_rank_does_not_wait_forever(checkpoint, tmp_path, monkeypatch):
    """Hang the disk: the block's exception is still raised, and the other rank's error names rank 1."""
    from megascend import backend as module

    monkeypatch.setattr(module, "GRACE_S", 0.5)

    def work():
        started = None
        try:
            with make_backend(checkpoint, timeout_s=8) as backend:
                train(backend)
                backend.save(tmp_path / "last", wait=True)
                slow_disk(3600)
                backend.save(tmp_path / "last")
                started = time.monotonic()
                if backend.rank == 1:
                    raise KeyError("caller")
                train(backend, 1000)
        except (KeyError, MegascendError) as error:
            return type(error), str(error), time.monotonic() - started
        return None

    (other, message, _), (raised, *_) = results = run_distributed(work, 2, init=False, timeout_s=120)
    assert all(seconds < 100 for *_, seconds in results)  # the disk would take an hour
    assert raised is KeyError
    assert issubclass(other, MegascendError)
    assert "rank 1" in message
    assert manifest.problems(tmp_path / "last", files := manifest.read(tmp_path / "last").files, files) == []


def test_forked_child_exits_without_waiting_for_the_writer_thread(checkpoint, tmp_path):
    def work():
        with make_backend(checkpoint) as backend:
            release = block_disk()
            pending = backend.save(tmp_path / "last")
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                backend._saver._at_exit()
                os._exit(0)
            assert not pending.done
            release.set()
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_distributed(work, 1, init=False, timeout_s=180) == [0]


SCRIPT = """
import os, sys, time
import megascend

megascend.bootstrap("cpu")
from megascend import Adam, MegatronBackend
from megascend.testing.parity import causal_samples

backend = MegatronBackend(sys.argv[1], precision="fp32", optimizer=Adam(lr=1e-2), timeout_s=60)
backend.forward_backward(causal_samples([[5, 6, 7, 8, 9, 10]]))
backend.optimizer_step()
fsync = os.fsync
os.fsync = lambda descriptor: (time.sleep(0.3), fsync(descriptor))
pending = backend.save(sys.argv[2] + "/last", progress={"who": "a script"})
print("pending" if not pending.done else "done", flush=True)
if sys.argv[3] == "error":
    raise SystemError("in the script")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("ends", ["normally", "error"])
def test_script_that_ends_without_close_leaves_a_complete_checkpoint(checkpoint, tmp_path, ends):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MEGASCEND_STORE": str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(tmp_path), ends]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert out == "pending\n", err
        assert rank.returncode == (0 if ends == "normally" else 1), err
        assert ends == "normally" or "SystemError: in the script" in err
    saved = manifest.read(tmp_path / "last")
    assert (saved.step, saved.progress) == (1, {"who": "a script"})
    assert manifest.problems(tmp_path / "last", saved.files, saved.files) == []
    assert json.loads((tmp_path / "last" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
