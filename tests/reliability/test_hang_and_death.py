"""A rank dies, stops, hangs or skips a collective: every other rank raises in time and names the rank and its phase."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from faulty_runs import DEADLINE_S, KILLED, LONG_TIMEOUT_S, TIMEOUT_S, caught, run, save, timeout_of, train

from megascend.backend import GRACE_S
from megascend.config import Fsdp, Parallel
from megascend.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    DistributedTestError,
    MegascendError,
    PeerLostError,
)
from megascend.runtime.diagnostics.watchdog import EXIT_PEER_LOST
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.distributed.process_groups import initialize
from megascend.runtime.topology.topology import plan
from megascend.testing import faults, run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples
from support.forked_programs import run_forked

pytestmark = pytest.mark.waiting

DIAGNOSIS_S = 60.0  # three seconds of polling; the rest is for busy machines (14 s were measured)


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    return case_checkpoint(parity_folder, "qwen3")


def meet(runtime, world, timeout_s=TIMEOUT_S):
    """Create the groups, and gather twice."""

    def gather(start):
        groups = initialize(plan(Parallel(), world), runtime.platform, timeout_s)
        for name in ("first", "second"):
            start[0] = time.monotonic()
            gather_objects(name, "world", groups)
            groups.monitor.step += 1
        groups.destroy()

    return caught(gather)


def assert_named(outcomes, fault, phase):
    """Check that every survivor has raised in time and names the lost rank and its state."""
    location = phase if phase == "start-up" else f"{phase} of step {fault.step}"
    for rank, (kind, message, seconds) in outcomes.items():
        assert message.startswith(f"rank {rank}: "), message
        noticed_by = LONG_TIMEOUT_S if timeout_of(fault) == LONG_TIMEOUT_S else TIMEOUT_S + DIAGNOSIS_S
        assert seconds < noticed_by, message
        lowered = message.lower()
        if fault.action == "hang":
            assert kind is CollectiveTimeoutError, message
            assert f"rank {fault.rank} has not arrived: in {location} for " in lowered, message
        else:
            assert kind is PeerLostError, message
            reason = "its process has ended" if fault.action == "die" else "its process is stopped"
            assert f"rank {fault.rank} is gone: {reason}, last heard of " in lowered, message
            assert f"s ago in {location}" in lowered, message


@pytest.mark.nightly_cases("stop", "hang")  # covered: die
@pytest.mark.parametrize("action", ["die", "stop", "hang"])
def test_rank_lost_at_start_up_is_named(action, runtime):
    fault = faults.Fault(action, rank=1, phase="start-up", step=1)
    assert_named(run(fault, 3, meet, runtime, 3), fault, "start-up")


@pytest.mark.nightly_cases("stop")  # covered: hang
@pytest.mark.parametrize("action", ["die", "stop", "hang"])
def test_rank_lost_in_object_gather_is_named(action, runtime):
    fault = faults.Fault(action, rank=2, phase="object gather", step=2)
    outcomes = run(fault, 3, meet, runtime, 3, timeout_of(fault))
    assert_named(outcomes, fault, "gather_objects")
    for _, message, _ in outcomes.values():
        assert f"1 of 3 ranks did not arrive at gather_objects within {timeout_of(fault):g} s: rank 2." in message


LAYOUTS = {"DP2": Parallel(), "TP2": Parallel(tensor=2), "PP2": Parallel(pipeline=2)}


@pytest.mark.core_cases("TP2-stop*")
@pytest.mark.parametrize(
    ("layout", "action", "rank"),
    [
        pytest.param("DP2", "die", 1, marks=pytest.mark.nightly),  # covered: TP2-stop; die at start-up and in a save
        pytest.param("TP2", "die", 1, marks=pytest.mark.nightly),  # covered: PP2-die; TP2-stop
        ("PP2", "die", 1),
        pytest.param("TP2", "hang", 1, marks=pytest.mark.nightly),  # covered: TP2-stop
        pytest.param("PP2", "hang", 0, marks=pytest.mark.nightly),  # covered: TP2-stop
        ("TP2", "stop", 0),
    ],
)
def test_rank_lost_in_forward_is_named(layout, action, rank, checkpoint, megatron_imported):
    fault = faults.Fault(action, rank=rank, phase="forward", step=2)
    assert_named(
        run(fault, 2, train, "megatron", checkpoint, timeout_of(fault), {"parallel": LAYOUTS[layout]}), fault, "forward"
    )


@pytest.mark.nightly_cases(
    "stop",  # covered: die; forward: TP2-stop
    "hang",  # covered: die; object_gather-hang; a rank that skips a reduction
)
@pytest.mark.parametrize("action", ["die", "stop", "hang"])
def test_rank_lost_in_grad_reduce_is_named(action, checkpoint, megatron_imported):
    fault = faults.Fault(action, rank=1, phase="grad reduce", step=2)
    assert_named(run(fault, 2, train, "megatron", checkpoint, timeout_of(fault), {}), fault, "grad reduce")


@pytest.mark.nightly_cases(
    "save-stop",  # covered: a rank that stops while it writes
    "save-hang",  # covered: save-die; object_gather-hang
    "write-die",  # covered: save-die; a rank that stops while it writes
    "write-hang",  # covered: object_gather-hang; a rank that stops while it writes
)
@pytest.mark.parametrize(
    ("phase", "action"), [("save", "die"), ("save", "stop"), ("save", "hang"), ("write", "die"), ("write", "hang")]
)
def test_rank_lost_in_save_is_named(phase, action, checkpoint, megatron_imported, tmp_path):
    """Lose a rank after step 2 (counted as step 3) on the main or the writer thread; the first checkpoint stays complete."""
    fault = faults.Fault(action, rank=1, phase=phase, step=3)
    alive = (phase, action) == ("write", "hang")  # only the writer thread hangs
    with faults.inject(fault):
        results = run_distributed(
            save,
            2,
            "megatron",
            checkpoint,
            tmp_path,
            init=False,
            timeout_s=DEADLINE_S,
            expect_lost=set() if alive else {1},
        )
    for kind, message, seconds in results if alive else results[:1]:
        if alive:
            assert kind is CheckpointError
            assert f"is not complete {TIMEOUT_S:g} s after it was waited for" in message
            assert seconds < TIMEOUT_S + GRACE_S + DIAGNOSIS_S
            continue
        assert seconds < TIMEOUT_S + DIAGNOSIS_S, message
        if action == "hang":
            assert kind is CollectiveTimeoutError
            assert "ank 1 has not arrived: in save of step 3 for " in message, message
        else:
            assert issubclass(kind, PeerLostError | CheckpointError), message
            assert "ank 1 is gone: its process " in message, message
    assert alive or results[1] == KILLED[action]
    assert_only_the_first(tmp_path)


def test_rank_stopped_while_writing_ends_the_waiting_rank(checkpoint, megatron_imported, tmp_path):
    """End the other rank by its hang monitor: it waits for the checkpoint outside of any collective."""
    with (
        faults.inject(faults.Fault("stop", rank=1, phase="write", step=3)),
        pytest.raises(DistributedTestError, match=f"rank 0 exited with code {EXIT_PEER_LOST}") as error,
    ):
        run_distributed(save, 2, "megatron", checkpoint, tmp_path, init=False, timeout_s=DEADLINE_S, expect_lost={1})
    assert "waiting for 2 of step 3 has taken " in str(error.value)
    assert "rank 1 is gone: its process is stopped" in str(error.value)
    assert_only_the_first(tmp_path)


def assert_only_the_first(folder):
    """Check that only the checkpoint from before the fault exists."""
    assert [path.name for path in folder.iterdir() if (path / "megascend.json").is_file()] == ["1"]
    assert not (folder / "2").exists()


def test_rank_that_skips_a_reduction_is_named(checkpoint, megatron_imported):
    """Skip a reduction and enter the next collective: both ranks time out and name the other's position."""
    with faults.inject(faults.Fault("skip", rank=1, phase="grad reduce", step=2)):
        (kind, message, seconds), other = run_distributed(
            train, 2, "megatron", checkpoint, TIMEOUT_S, {}, init=False, timeout_s=DEADLINE_S
        )
    assert kind is CollectiveTimeoutError
    assert "ank 1 has left grad reduce of step 2 without the others (" in message
    assert seconds < TIMEOUT_S + DIAGNOSIS_S
    assert issubclass(other[0], CollectiveTimeoutError)
    assert re.search("ank 0 (has not arrived: in|failed in) grad reduce of step 2", other[1]), other[1]


def test_failed_rank_is_named_with_its_error(checkpoint, megatron_imported):
    """Raise an exception on one rank whose process stays alive, as in a debugger."""

    def work():
        from megascend.backends import MegatronBackend

        backend = MegatronBackend(checkpoint, Parallel(), "fp32", platform="cpu", timeout_s=TIMEOUT_S)

        def broken(model, batch):
            raise KeyError("reward")

        if backend.rank == 1:  # in the model, between two collectives; an error of a loss is raised on all ranks
            backend.engine._forward_chunk = broken
        try:
            backend.forward_backward(causal_samples([list(range(1, 9))]))
            backend.optimizer_step()
        except MegascendError as error:
            return type(error), str(error)
        except KeyError as error:
            time.sleep(TIMEOUT_S)
            return type(error), str(error)
        return None

    (kind, message), user_error = run_distributed(work, 2, init=False, timeout_s=DEADLINE_S)
    assert user_error == (KeyError, "'reward'")  # the user's exception is unchanged
    assert kind is PeerLostError
    assert "ank 1 failed in forward of step 1 with KeyError: 'reward'" in message


FSDP_FAULTS = [
    ("hang", 1, "backward", {}),
]
MORE_FSDP_FAULTS = [
    ("die", 1, "forward", {}),  # covered: a hang; under Megatron: the same monitor
    ("stop", 0, "forward", {}),
    ("hang", 0, "forward", {}),
    ("die", 0, "backward", {}),
    ("stop", 1, "gradient norm", {}),
    ("hang", 1, "gradient norm", {}),
    ("die", 1, "forward", {"fsdp": Fsdp(replicate=2)}),
    ("die", 1, "forward", {"parallel": Parallel(context=2, context_algorithm="ulysses")}),
]


def run_fsdp_faults(cases, checkpoint, folder):
    """Run faults one after the other in processes without Megatron, and check the survivors' errors."""
    all_faults = [faults.Fault(action, rank=rank, phase=phase, step=2) for action, rank, phase, _ in cases]
    jobs = [
        (fault, 2, "train", "fsdp", checkpoint, timeout_of(fault), settings)
        for fault, (*_, settings) in zip(all_faults, cases, strict=True)
    ]
    torch.save(jobs, folder / "job")
    program = Path(__file__).with_name("faulty_runs.py")
    completed = run_forked(program, folder / "job", folder / "result", timeout_s=len(jobs) * DEADLINE_S)
    assert completed.returncode == 0, completed.stderr[-6000:]
    for fault, outcomes in zip(all_faults, torch.load(folder / "result", weights_only=False), strict=True):
        assert_named(outcomes, fault, fault.phase)


def test_lost_rank_is_named_under_fsdp(checkpoint, tmp_path):
    run_fsdp_faults(FSDP_FAULTS, checkpoint, tmp_path)


@pytest.mark.nightly
def test_lost_rank_is_named_under_fsdp_in_further_cases(checkpoint, tmp_path):
    run_fsdp_faults(MORE_FSDP_FAULTS, checkpoint, tmp_path)


@pytest.mark.nightly
def test_lost_rank_is_named_under_fsdp_with_experts(parity_folder, tmp_path):
    """Use expert parallelism, which adds all-to-all collectives."""
    experts = {"parallel": Parallel(expert=2)}
    cases = [("hang", 1, "forward", experts), ("die", 0, "backward", experts)]
    run_fsdp_faults(cases, case_checkpoint(parity_folder, "qwen3_moe", num_hidden_layers=2), tmp_path)
