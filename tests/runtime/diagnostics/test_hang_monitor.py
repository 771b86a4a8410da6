"""Diagnosis of hangs, the heartbeat thread that publishes each rank's state, and the end of a stuck rank."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from megascend.config import Parallel
from megascend.errors import CollectiveTimeoutError, DataError, PeerLostError, ProcessGroupError
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.diagnostics.diagnosis import (
    MAX_LISTED,
    PeerStatus,
    PeerVerdict,
    PhaseFailure,
    RankRecord,
    diagnose,
)
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
from megascend.runtime.diagnostics.survey import Observer, Pace
from megascend.runtime.diagnostics.upstream_errors import is_secondary, library_of
from megascend.runtime.diagnostics.watchdog import EXIT_PEER_LOST
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.distributed.objects import agree
from megascend.runtime.distributed.process_groups import initialize
from megascend.runtime.topology.topology import plan
from megascend.testing import Lost, run_distributed
from weightwire.liveness import Identity

pytestmark = pytest.mark.waiting

# --- the diagnosis (pure functions) ---

REDUCING = RankRecord(
    heartbeat=7,
    step=3,
    label="grad reduce",
    seconds=8.0,
    outer="grad reduce",
    counts={"forward and backward": 3, "grad reduce": 3},
    open=["grad reduce"],
    frame="all_reduce (distributed_c10d.py:1)",
    waiting=True,
)
IN_FORWARD = replace(
    REDUCING,
    label="forward",
    seconds=61.0,
    outer="forward and backward",
    counts={"forward and backward": 3, "grad reduce": 2},
    open=["forward and backward"],
    frame="tokenize (data.py:40)",
    waiting=False,
)
UPDATING = replace(REDUCING, label="update", outer="update", open=["update"], counts=REDUCING.counts | {"update": 3})
BETWEEN = replace(UPDATING, inside=False, open=[])
FAILED = replace(IN_FORWARD, failure=PhaseFailure("forward of step 3", "forward and backward", "DataError: bad", False))
GAVE_UP = replace(REDUCING, failure=PhaseFailure("grad reduce of step 3", "grad reduce", "PeerLostError: x", True))
FINE = PeerStatus(REDUCING)


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (PeerStatus(FAILED), PeerVerdict.FAILED, "rank 1 failed in forward of step 3 with DataError: bad"),
        (PeerStatus(FAILED, silent=9.0), PeerVerdict.FAILED, "rank 1 failed in forward of step 3 with DataError: bad"),
        (
            PeerStatus(REDUCING, 3.2, 12.4),
            PeerVerdict.GONE,
            "rank 1 is gone: last heard of 12 s ago in grad reduce of step 3",
        ),
        (
            PeerStatus(IN_FORWARD, 0.1, 1.0, "ended"),
            PeerVerdict.GONE,
            "rank 1 is gone: its process has ended, last heard of 1 s ago in forward of step 3",
        ),
        (
            PeerStatus(BETWEEN, 5.0, 1.0, "stopped"),
            PeerVerdict.GONE,
            "rank 1 is gone: its process is stopped, last heard of 5 s ago after update of step 3",
        ),
        (
            PeerStatus(replace(BETWEEN, ended=True), 30.0),
            PeerVerdict.GONE,
            "rank 1 has ended: it left its process groups after update of step 3",
        ),
        (
            PeerStatus(IN_FORWARD),
            PeerVerdict.LATE,
            "rank 1 has not arrived: in forward of step 3 for 61 s, at tokenize (data.py:40)",
        ),
        (
            PeerStatus(IN_FORWARD, 7.0, 7.0, "running"),
            PeerVerdict.LATE,
            "rank 1 has not arrived: in forward of step 3 for 61 s, at tokenize (data.py:40); its process runs and has been "
            "silent for 7 s",
        ),
        (None, PeerVerdict.LATE, "rank 1 has sent no heartbeat"),
        (
            PeerStatus(replace(REDUCING, waiting=False, frame="write (log.py:3)")),
            PeerVerdict.LATE,
            "rank 1 has not arrived: in grad reduce of step 3 for 8 s, at write (log.py:3)",
        ),
        (
            PeerStatus(UPDATING),
            PeerVerdict.LEFT,
            "rank 1 has left grad reduce of step 3 without the others (now in update of step 3)",
        ),
        (
            PeerStatus(BETWEEN),
            PeerVerdict.LEFT,
            "rank 1 has left grad reduce of step 3 without the others (now between phases)",
        ),
        (PeerStatus(GAVE_UP), PeerVerdict.GAVE_UP, "rank 1 failed in grad reduce of step 3 with PeerLostError: x"),
    ],
)
def test_diagnosis_of_one_peer(status: PeerStatus | None, kind: PeerVerdict, reason: str) -> None:
    diagnosis = diagnose(0, REDUCING, {1: status, 2: FINE})
    assert (diagnosis.kind, diagnosis.culprits, diagnosis.reasons) == (kind, (1,), (reason,))


def test_first_cause_is_blamed_and_its_consequences_are_not() -> None:
    peers = {1: PeerStatus(GAVE_UP), 2: PeerStatus(UPDATING), 3: PeerStatus(IN_FORWARD), 4: PeerStatus(REDUCING, 4.0)}
    assert diagnose(0, REDUCING, peers).culprits == (4,)
    assert diagnose(0, REDUCING, peers | {5: PeerStatus(FAILED)}).culprits == (5,)
    assert diagnose(0, REDUCING, {1: peers[1], 2: peers[2], 3: peers[3]}).culprits == (3,)
    assert diagnose(0, REDUCING, {1: peers[1], 2: peers[2]}).culprits == (2,)


def test_healthy_peers_are_not_blamed() -> None:
    diagnosis = diagnose(0, REDUCING, {1: FINE, 2: FINE})
    assert (diagnosis.kind, diagnosis.culprits, diagnosis.reasons) == (PeerVerdict.FINE, (), ())
    assert diagnose(0, REDUCING, {}).kind is PeerVerdict.FINE


def test_suspects_are_blamed_unless_a_rank_is_gone() -> None:
    diagnosis = diagnose(0, REDUCING, {1: FINE, 2: FINE}, suspects=[2])
    assert (diagnosis.kind, diagnosis.culprits) == (PeerVerdict.LATE, (2,))
    assert diagnosis.reasons[0].startswith("rank 2 has not arrived: in grad reduce of step 3 for 8 s")
    assert diagnose(0, REDUCING, {1: PeerStatus(REDUCING, 9.0), 2: FINE}, suspects=[2]).culprits == (1,)


def test_frames_are_no_evidence_if_this_rank_does_not_wait_in_python() -> None:
    """Blame no rank by its frame if this rank's own wait is on the device, where Python frames do not show it."""
    local = replace(REDUCING, waiting=False)
    assert diagnose(0, local, {1: PeerStatus(replace(REDUCING, waiting=False, frame="item"))}).kind is PeerVerdict.FINE


def test_background_phase_is_compared_with_open_phases_of_peers() -> None:
    local = replace(REDUCING, label="write", outer="write", counts={"write": 1}, open=["grad reduce", "write"])
    writing = replace(UPDATING, counts=UPDATING.counts | {"write": 1}, open=["update", "write"], waiting=True)
    assert diagnose(0, local, {1: PeerStatus(writing)}).kind is PeerVerdict.FINE
    assert diagnose(0, local, {1: PeerStatus(UPDATING)}).kind is PeerVerdict.LATE


def test_positions_are_a_short_list_that_includes_the_culprits() -> None:
    peers = dict.fromkeys(range(1, 1000), FINE) | {700: PeerStatus(REDUCING, 5.0)}
    diagnosis = diagnose(0, REDUCING, peers)
    assert diagnosis.culprits == (700,)
    assert diagnosis.positions.startswith(
        "Ranks: 0 in grad reduce of step 3 for 8 s; 1 in grad reduce of step 3 for 8 s; "
    )
    assert diagnosis.positions.endswith(f"; 700 gone, last in grad reduce of step 3; and {1000 - MAX_LISTED} more")
    assert diagnosis.positions.count(";") == MAX_LISTED


# --- the observer, with an explicit clock ---


def test_silence_is_measured_by_the_observer() -> None:
    observer, record = Observer(Pace(1)), RankRecord(heartbeat=1, clock=100.0)
    observer.poll({1: record, 2: None}, now=10.0, clock=100.5, timeout_s=5)
    assert observer.statuses([1, 2]) == {1: PeerStatus(record, 0.0, 0.5), 2: None}
    assert not observer.certain(observer.statuses([1, 2]), since=9.0), "one poll is not enough"
    observer.poll({1: record, 2: None}, now=12.0, clock=102.5, timeout_s=5)
    assert observer.statuses([1])[1] == PeerStatus(record, 2.0, 2.5)
    observer.poll({1: record}, now=13.5, clock=104.0, timeout_s=5)
    assert observer.statuses([1])[1].gone  # type: ignore[union-attr]
    assert observer.certain(observer.statuses([1]), since=9.0)
    observer.poll({1: replace(record, heartbeat=2)}, now=14.0, clock=104.5, timeout_s=5)
    assert not observer.statuses([1])[1].gone  # type: ignore[union-attr]
    assert observer.certain(observer.statuses([1]), since=9.0), "its heartbeat has advanced"


def test_observer_that_was_stopped_blames_no_rank() -> None:
    observer, record = Observer(Pace(1)), RankRecord(heartbeat=1)
    for now in (10.0, 11.0, 500.0):
        observer.poll({1: record}, now, clock=0.0, timeout_s=5)
    assert observer.statuses([1])[1].silent == 0.0  # type: ignore[union-attr]


# --- errors of the libraries ---


@pytest.mark.parametrize(
    ("error", "library"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"), "gloo"),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5ms"), "gloo"),
        (RuntimeError("Gloo connectFullMesh failed with [..]"), "gloo"),
        (dist.DistNetworkError("Connection reset by peer"), "torch.distributed"),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690"), "torch.distributed"),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), "nccl"),
        (RuntimeError("[ERROR] (PID:1, Device:0, RankID:0) ERR02200 DIST call hccl api failed."), "hccl"),
        (RuntimeError("EI0002: The wait execution of the Notify register times out."), "hccl"),
        (RuntimeError("my loss met gloo"), None),
        (RuntimeError("connection to the reward model refused"), None),
        (type("UserError", (RuntimeError,), {})("[gloo/a.cc:1] Timed out"), None),
        (ValueError("NCCL error"), None),
        (ConnectionError("Connection closed by peer"), None),
    ],
)
def test_library_of_an_error(error: BaseException, library: str | None) -> None:
    assert library_of(error) == library
    assert is_secondary(error) == (library is not None)


# --- the thread ---


def wait_until(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"the condition did not hold within {seconds} s"
        time.sleep(0.02)


def two_monitors(tmp_path, timeout_s: float = 30.0):
    """Build the monitors of two ranks in one process, and a function that reads a rank's published record."""
    launches = [Launch(rank=rank, world_size=2, store_path=str(tmp_path / "store")) for rank in range(2)]
    monitors = [HangMonitor(rank, 2, timeout_s, launch.store(5)) for rank, launch in enumerate(launches)]
    store = launches[0].store(5)
    return monitors, lambda rank: RankRecord.decode(store.get(f"monitor/{rank}"))


def test_innermost_phase_is_published_and_outer_phase_restored(tmp_path) -> None:
    (monitor, other), read = two_monitors(tmp_path)
    try:
        with monitor.phase("forward and backward"):
            with monitor.phase("object gather", "gather_objects on group 'tp'"):
                wait_until(lambda: read(0).label == "gather_objects on group 'tp'")
                assert read(0).open == ["forward and backward"]
            wait_until(lambda: read(0).label == "forward and backward")
        wait_until(lambda: not read(0).inside)
        monitor.step = 7
        wait_until(lambda: read(0).location == "after forward and backward of step 7")
        heartbeat = read(0).heartbeat
        wait_until(lambda: read(0).heartbeat > heartbeat + 1)
        assert read(0).counts == {"forward and backward": 1}
    finally:
        monitor.close()
        other.close()
    assert read(0).ended
    with monitor.phase("after the end"):  # has no effect after close
        pass


def test_exception_is_published_until_the_rank_continues(tmp_path) -> None:
    (monitor, other), read = two_monitors(tmp_path)
    error = DataError("no such\ntoken")
    try:
        with pytest.raises(DataError) as caught, monitor.phase("forward and backward"), monitor.phase("forward"):
            raise error
        assert caught.value is error
        assert read(0).failure == PhaseFailure(
            "forward of step 1", "forward and backward", "DataError: no such token", False
        )
        with monitor.phase("update"):
            wait_until(lambda: read(0).failure is None)
        with pytest.raises(PeerLostError, match="Rank 0 failed in update of step 1 with KeyError: 'x'") as peer_error:  # noqa: PT012, SIM117
            with other.phase("update"):
                with pytest.raises(KeyError), monitor.phase("update"):
                    raise KeyError("x")
                raise RuntimeError("[gloo/pair.cc:1] Connection closed by peer")
        assert isinstance(peer_error.value.__cause__, RuntimeError)
    finally:
        monitor.close()
        other.close()


class Frozen(Exception):
    """An exception whose class forbids new attributes by slots and by ``__setattr__``."""

    __slots__ = ("number",)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is read-only")


ERRORS = [DataError, KeyError, RuntimeError, Frozen, KeyboardInterrupt, SystemExit, StopIteration]


@pytest.fixture
def monitored(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Return (a monitor, the list of published (phase, error), a function that reads the published failure)."""
    (monitor, other), read = two_monitors(tmp_path)
    published: list[tuple[str, str]] = []
    publish = monitor._publish_failure

    def note(phase: Any, error: BaseException, **options: Any) -> None:
        publish(phase, error, **options)
        published.append((phase.label, f"{type(error).__name__}: {error}"))

    monkeypatch.setattr(monitor, "_publish_failure", note)
    monkeypatch.setattr(monitor, "_poll_peers", dict)  # without a wait for the other rank's next heartbeat
    yield monitor, published, lambda: read(0).failure
    monitor.close()
    other.close()


@pytest.mark.parametrize("kind", ERRORS)
def test_error_is_published_once_on_its_way_out(monitored, kind: type[BaseException]) -> None:
    monitor, published, failure = monitored
    with pytest.raises(kind), monitor.phase("save"):  # noqa: PT012
        try:
            with monitor.phase("write"), monitor.phase("gather"):
                raise kind("x")
        finally:
            with monitor.phase("clean up"):
                pass
    assert [phase for phase, _ in published] == ["gather"], "it must not be published again by outer phases"
    assert failure().phase == "gather of step 1"


def test_error_that_leaves_after_another_was_handled_is_the_failure(monitored) -> None:
    monitor, _, failure = monitored
    with pytest.raises(DataError), monitor.phase("save"):  # noqa: PT012
        try:
            with monitor.phase("write"):
                raise DataError("disk")
        finally:
            with suppress(OSError), monitor.phase("clean up"):
                raise OSError("busy")
    assert (failure().phase, failure().error) == ("write of step 1", "DataError: disk")


def test_handled_error_is_withdrawn_when_its_phase_ends_well(monitored) -> None:
    monitor, _, failure = monitored
    with monitor.phase("step"):
        with suppress(DataError), monitor.phase("try"):
            raise DataError("x")
        assert failure().error == "DataError: x"
    wait_until(lambda: failure() is None)


def test_error_from_another_thread_is_published_for_the_thread_it_is_raised_in(monitored) -> None:
    monitor, published, failure = monitored

    def write() -> None:
        with monitor.phase("write"):
            raise DataError("disk")

    with ThreadPoolExecutor(1) as pool, pytest.raises(DataError), monitor.phase("save"):
        pool.submit(write).result()
    assert published == [("write", "DataError: disk"), ("save", "DataError: disk")]
    assert failure().outer == "save"


def test_communication_error_without_a_lost_rank_raises_process_group_error(tmp_path) -> None:
    (monitor, other), _ = two_monitors(tmp_path)
    try:
        with pytest.raises(ProcessGroupError, match="No rank is missing, and none has failed"), other.phase("update"):  # noqa: SIM117
            with monitor.phase("update"):
                raise RuntimeError("[gloo/pair.cc:1] op.preamble.length <= op.nbytes")
    finally:
        monitor.close()
        other.close()


def test_lost_store_raises_peer_lost_error() -> None:
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    monitor = HangMonitor(0, 2, 600.0, dist.PrefixStore("start", store))
    assert monitor._heartbeat is not None
    wait_until(lambda: server.check(["start/monitor/0"]))
    port = server.port
    server = None  # ends the server
    wait_until(lambda: not monitor._heartbeat.alive)  # type: ignore[union-attr]
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=f"store for the ranks' records does not answer.*:{port} is gone"):  # noqa: SIM117
        with monitor.phase("update"):
            raise RuntimeError("[gloo/pair.cc:1] Connection closed by peer")
    assert time.monotonic() - start < 300  # half of the timeout
    monitor.close()


def test_forked_child_of_a_rank_is_not_monitored(runtime: Runtime) -> None:
    def work() -> int:
        groups = initialize(plan(Parallel(), 2), runtime.platform, 30)
        child = os.fork()
        if child == 0:
            try:
                with groups.monitor.phase("forward"):
                    raise RuntimeError("[gloo/pair.cc:1] Connection closed by peer")
            except RuntimeError as error:
                os._exit(0 if type(error) is RuntimeError else 1)
        _, status = os.waitpid(child, 0)
        groups.destroy()
        return status

    assert run_distributed(work, 2, init=False) == [0, 0]


def test_adopted_group_is_monitored(runtime: Runtime) -> None:
    def work() -> str:
        for _ in range(2):
            groups = initialize(plan(Parallel(), 2), runtime.platform, 30)
            if groups.rank == 0:
                with pytest.raises(CollectiveTimeoutError, match="ank 1 has not arrived: after start-up for") as caught:  # noqa: SIM117
                    with groups.monitor.phase("forward"):
                        raise RuntimeError("[gloo/pair.cc:1] Connection closed by peer")
            dist.barrier()
            groups.destroy()
            dist.barrier()
        return str(caught.value) if dist.get_rank() == 0 else ""

    assert run_distributed(work, 2)[0].startswith("rank 0: forward of step 1 failed after ")


def test_silent_rank_whose_process_runs_is_late_and_not_gone(runtime: Runtime) -> None:
    """Hold the GIL of rank 1, as a long call of an extension does: its heartbeats stop, and it may come back."""

    def work() -> str:
        groups = initialize(plan(Parallel(), 2), runtime.platform, 60.0)
        if groups.rank == 1:
            ctypes.PyDLL(None).sleep(3600)
        groups.channel("world").timeout_s = 4.0
        with pytest.raises(CollectiveTimeoutError) as caught:
            agree("a call", groups)
        assert not isinstance(caught.value, PeerLostError)
        return str(caught.value)

    message, end = run_distributed(work, 2, init=False, expect_lost={1})
    assert end == Lost(None)
    # In start-up, if the GIL was taken before the heartbeat that would have said that it is over.
    assert re.search(
        r"Rank 1 has not arrived: (after|in) start-up for .*; its process runs and has been silent for \d+ s", message
    )


# --- a rank that is stuck ---


def impatient(groups, timeout_s: float) -> None:
    """Shorten the monitor's timeout after start-up, which needs a longer one on a busy machine."""
    watchdog = groups.monitor._watchdog
    watchdog._timeout_s, watchdog.check_after_s = timeout_s, 0.5 * timeout_s


def test_rank_that_waits_for_a_dead_peer_exits(runtime: Runtime, tmp_path) -> None:
    """End a rank whose wait no exception can interrupt, as a wait for a device; here it sleeps in Python."""
    error_file, output = tmp_path / "error.json", tmp_path / "stderr"

    def work() -> None:
        groups = initialize(plan(Parallel(), 3), runtime.platform, 60.0)
        impatient(groups, 2.0)
        if groups.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if groups.rank == 0:
            (tmp_path / "process").write_bytes(pickle.dumps(Identity.current()))
            os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file)
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
            groups.monitor.step = 3
            with groups.monitor.phase("forward"):
                time.sleep(3600)
        wait_until(error_file.exists, 150)
        stuck = pickle.loads((tmp_path / "process").read_bytes())
        wait_until(lambda: stuck.state() == "ended")
        time.sleep(1)  # its main thread has ended; its other threads may take a moment

    results = run_distributed(work, 3, init=False, timeout_s=180, expect_lost={0, 1})
    assert results == [Lost(EXIT_PEER_LOST), Lost(-signal.SIGKILL), None]
    lines = output.read_text().splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("rank 0: forward of step 3 has taken ")
    assert "rank 1 is gone: its process has ended, last heard of" in lines[0]
    assert lines[1].endswith(f"exiting with code {EXIT_PEER_LOST}")
    error = json.loads(error_file.read_text())["message"]
    assert error["message"].startswith("PeerLostError: rank 0: forward of step 3 has taken ")
    assert "time.sleep(3600)" in error["extraInfo"]["py_callstack"]


def test_slow_rank_is_waited_for_with_one_warning(runtime: Runtime, tmp_path) -> None:
    """Write exactly one line to stderr."""
    output, finished = tmp_path / "stderr", tmp_path / "enough"

    def work() -> str:
        groups = initialize(plan(Parallel(), 2), runtime.platform, 60.0)
        impatient(groups, 0.5)
        if groups.rank == 1:
            wait_until(finished.exists, 150)
            return "slow"
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
        with groups.monitor.phase("forward"):
            wait_until(lambda: output.stat().st_size > 0, 150)
            time.sleep(4)  # eight times the timeout, for a second line
        finished.touch()
        return "waited"

    assert run_distributed(work, 2, init=False) == ["waited", "slow"]
    (line,) = output.read_text().splitlines()
    assert line.startswith("rank 0: forward of step 1 has taken ")
    assert "rank 1 has not arrived: after start-up" in line
