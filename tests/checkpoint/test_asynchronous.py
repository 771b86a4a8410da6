"""Saving beside training: what is written is the state of one moment, and nothing waits for ever."""

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
from small_runs import exact_state, files_of, make_backend, small_model, train

from megascend import CheckpointError, ConfigError
from megascend.checkpoint import manifest
from megascend.distributed.objects import gather_objects
from megascend.errors import MegascendError
from megascend.testing import run_distributed

pytestmark = pytest.mark.usefixtures("megatron_imported")


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    return small_model(parity_folder)


def slow_disk(seconds):
    """Every ``fsync`` of this process takes ``seconds`` from now on."""
    fsync = os.fsync

    def slowly(descriptor):
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slowly
    return fsync


def held_disk():
    """No ``fsync`` of a thread that writes comes back before the event that is returned is set."""
    fsync, moves_on = os.fsync, threading.Event()

    def held(descriptor):
        if threading.current_thread() is not threading.main_thread():
            assert moves_on.wait(120)
        fsync(descriptor)

    os.fsync = held
    return moves_on


class DiskOfWhoWaits:
    """Nothing is written before the main thread waits for it; it then waits for ``PAUSE_S`` at least.

    Attributes:
        stuck: nor then.
    """

    PAUSE_S = 0.2

    def __init__(self, monitor):
        self.stuck = False
        self._moves_on, self._phase = held_disk(), monitor.phase
        monitor.phase = self._watched

    @contextlib.contextmanager
    def _watched(self, name, *details):
        waits = bool(details) and details[0].startswith("waiting for ") and not self.stuck
        with self._phase(name, *details):
            if waits:
                time.sleep(self.PAUSE_S)
                self._moves_on.set()
            yield
        if waits:
            self._moves_on.clear()


def on_two_ranks(body, checkpoint, **options):
    def work():
        with make_backend(checkpoint, **options) as backend:
            return body(backend)

    return run_distributed(work, 2, init=False, timeout_s=180)


def test_saves_loads_and_steps_in_every_order(checkpoint, tmp_path):
    """On a disk that waits, one after the other without waiting: each checkpoint has the state in which it was taken."""

    def body(backend):
        train(backend)
        backend.save(tmp_path / "one", wait=True)  # the first takes memory and makes its group
        disk = DiskOfWhoWaits(backend.groups.monitor)
        states = {}

        # Two saves in a row, the second after steps during the first
        states["one"] = exact_state(backend)
        one = backend.save(tmp_path / "one", progress={"at": (1, "one")})
        train(backend, 3)
        assert not one.done
        states["two"] = exact_state(backend)
        two = backend.save(tmp_path / "two", progress={"at": 2})
        assert one.done
        assert not two.done
        states["three"] = exact_state(backend)
        three = backend.save(tmp_path / "three")
        assert two.done
        assert (one.step, two.step, three.step) == (1, 4, 4)
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


def test_a_checkpoint_is_on_disk_before_it_has_its_name(checkpoint, tmp_path):
    """Each file, and each directory that holds one, is synchronised before the directory is renamed."""

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
        everything = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
        # Another rank's files are complete before rank 0 renames: the renaming waits for their digests.
        known = set().union(
            *gather_objects(before if backend.rank == 0 else list(synchronised), "world", backend.groups)
        )
        return [
            str(path) for path in everything if path.stat().st_ino not in known
        ], tmp_path.stat().st_ino in synchronised

    (left, parent), _ = on_two_ranks(body, checkpoint)
    assert left == []
    assert parent


def test_with_hf_there_is_a_model_for_transformers_in_it(checkpoint, tmp_path):
    def body(backend):
        train(backend)
        backend.save(tmp_path / "new", hf=True, wait=True)
        backend.export_hf(tmp_path / "exported")
        train(backend)
        backend.load(tmp_path / "new")

    on_two_ranks(body, checkpoint)
    assert files_of(tmp_path / "new" / "hf") == files_of(tmp_path / "exported")
    for name in files_of(tmp_path / "exported"):
        assert (tmp_path / "new" / "hf" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes()


def test_whatever_goes_wrong_is_told_to_every_rank_and_the_next_save_works(checkpoint, tmp_path):
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
        told = [refused("ZeroDivisionError: ", after=lambda path: 1 / 0)]
        told.append(refused("nowhere", after=lambda path: (tmp_path / "nowhere" / "x").write_text("")))

        # A rank that cannot write
        fsync = os.fsync
        if backend.rank == 1:
            os.fsync = lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        train(backend)
        told.append(refused("Input/output error"))
        os.fsync = fsync
        assert len(set(gather_objects(tuple(told), "world", backend.groups))) == 1

        # What is no JSON is refused before anything is written
        for progress in ({"loss": torch.ones(2)}, {"path": tmp_path}, {(1, 2): 3}):
            with pytest.raises(ConfigError, match="progress must be JSON"):
                backend.save(tmp_path / "last", progress=progress)
        backend.save(tmp_path / "keys", progress={1: "a", "1": "b", "pair": (1, 2)}, wait=True)
        assert backend.load(tmp_path / "keys") == {"1": "b", "pair": [1, 2]}

        # An export that fails leaves nothing either
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


def test_a_failure_that_nobody_waited_for_is_raised_by_the_next_call_once(checkpoint, tmp_path):
    def body(backend):
        found = []
        for call in (lambda: backend.save(tmp_path / "b"), lambda: backend.load(tmp_path / "good"), backend.close):
            if not (tmp_path / "good").exists():
                backend.save(tmp_path / "good", wait=True)
            pending = backend.save(tmp_path / "a", after=lambda path: 1 / 0)
            while not pending.done:
                time.sleep(0.01)
            with pytest.raises(CheckpointError, match="ZeroDivisionError"):
                call()
            found.append(pending.reported)
        return found

    def work():
        backend = make_backend(checkpoint)
        return body(backend)

    assert run_distributed(work, 2, init=False, timeout_s=180) == [[True] * 3] * 2


def test_one_rank_that_loses_timeout_stops_the_next_call_on_all(checkpoint, tmp_path):
    """Each rank waits by a clock of its own."""

    def body(backend):
        moves_on = held_disk()
        slow = backend.save(tmp_path / "slow")
        wait = slow._wait
        if backend.rank == 1:
            slow._timeout_s = 0.01
            slow._wait = lambda seconds: (wait(seconds), moves_on.set())[0]
        else:
            moves_on.set()
        with pytest.raises(CheckpointError, match=r"slow is not complete 0\.01 s after it was waited for"):
            backend.save(tmp_path / "next")
        slow._timeout_s = 30
        backend.save(tmp_path / "next", wait=True)
        return manifest.read(tmp_path / "slow").step, manifest.read(tmp_path / "next").step

    assert on_two_ranks(body, checkpoint) == [(0, 0)] * 2


def test_a_link_in_place_of_the_directory_is_followed(checkpoint, tmp_path):
    """``last`` may be a link to another disk; saving over it again and again keeps it one."""
    (tmp_path / "disk").mkdir()

    def body(backend):
        backend.save(tmp_path / "disk" / "real", wait=True)
        if backend.rank == 0:
            (tmp_path / "last").symlink_to("disk/real")
        dist.barrier()
        for step in (1, 2):
            train(backend)
            pending = backend.save(tmp_path / "last", wait=True)
            assert pending.path == tmp_path / "last"
            backend.load(tmp_path / "last")
            assert backend.step_count == step

    on_two_ranks(body, checkpoint)
    assert (tmp_path / "last").is_symlink()
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == ["real"]
    assert manifest.read(tmp_path / "disk" / "real").step == 2


# --- leaving while a checkpoint is being written ---


def test_an_error_in_the_block_waits_a_moment_for_the_checkpoint(checkpoint, tmp_path):
    def work():
        try:
            with make_backend(checkpoint) as backend:
                slow_disk(0.2)
                backend.save(tmp_path / "last")
                raise KeyError("mine")
        except KeyError as error:
            return str(error)

    assert run_distributed(work, 2, init=False, timeout_s=180) == ["'mine'"] * 2
    assert manifest.problems(tmp_path / "last", files := manifest.read(tmp_path / "last").files, files) == []


@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_an_error_in_the_block_does_not_wait_for_ever(checkpoint, tmp_path, monkeypatch, who):
    """The disk hangs. The error that ended the block comes out all the same; ranks that have none are told."""
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
                if backend.rank in who:
                    raise KeyError("mine")
                train(backend, 1000)
        except (KeyError, MegascendError) as error:
            return type(error), str(error), time.monotonic() - started
        return None

    results = run_distributed(work, 2, init=False, timeout_s=120)
    for rank, (kind, message, seconds) in enumerate(results):
        assert seconds < 100  # of a disk that takes an hour
        if rank in who:
            assert kind is KeyError
        else:
            assert issubclass(kind, MegascendError)
            assert "rank 1" in message
    assert manifest.problems(tmp_path / "last", files := manifest.read(tmp_path / "last").files, files) == []


def test_a_forked_child_that_exits_does_not_wait_for_a_thread_that_it_has_not(checkpoint, tmp_path):
    def work():
        with make_backend(checkpoint) as backend:
            moves_on = held_disk()
            pending = backend.save(tmp_path / "last")
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                backend._saver._at_exit()
                os._exit(0)
            assert not pending.done
            moves_on.set()
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
def test_a_script_that_ends_without_closing_leaves_a_complete_checkpoint(checkpoint, tmp_path, ends):
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
    found = manifest.read(tmp_path / "last")
    assert (found.step, found.progress) == (1, {"who": "a script"})
    assert manifest.problems(tmp_path / "last", found.files, found.files) == []
    assert json.loads((tmp_path / "last" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
