"""Races between streams, in strict mode: each program of ``race_probes`` with its synchronisation, and without."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import simnpu
from simnpu.settings import STRICT_VARIABLE

PROGRAM = Path(__file__).with_name("race_probes.py")
RACES = {
    "stream_waits_for_stream": "aten::mul.Tensor on npu:{rank} stream .* reads what aten::full on npu:{rank} stream 0 writes",
    "stream_waits_for_event": "aten::add.Tensor .* stream 0 reads what aten::mul.Tensor .*: wait_stream or wait_event",
    "event_is_recorded_after_the_work": "aten::_to_copy .* reads what aten::mul.Tensor",
    "waiting_is_transitive": "aten::_to_copy .* reads what aten::mul.Tensor",
    "nested_streams": "aten::mul.Tensor .* reads what aten::mul.Tensor",
    "item_waits_for_the_current_stream_only": "aten::_local_scalar_dense .* reads what aten::sum",
    "overwritten_while_another_stream_reads": "aten::zero_ .* overwrites what aten::add.Tensor .* reads",
    "overwritten_while_another_stream_writes": "aten::fill_.Scalar .* overwrites what aten::zero_ .* writes",
    "freed_while_another_stream_reads": "an allocation .* reuses what aten::add.Tensor .* reads, .*: record_stream",
    "resized_while_another_stream_reads": "an allocation .* reuses what aten::sub.Tensor .* reads",
    "copy_to_pinned_memory": None,  # the host's reads are not seen
    "non_blocking_to_cpu": None,
    "overwritten_during_a_copy_to_the_host": "aten::zero_ .* overwrites what aten::copy_ .* reads",
    "host_memory_back_to_the_device": None,
    "pinned_memory_changed_during_a_copy": "the program .* changes the pinned memory of what aten::_to_copy",
    "integers": "aten::_to_copy .* reads what aten::mul.Tensor",
    "fused_operator": "a fused operator .* reads what aten::div.Tensor",
    "all_reduce": r"aten::add.Tensor .* reads what hccl::allreduce on npu:{rank} hccl group .*: work\.wait\(\)",
    "all_reduce_is_waited_for_by_another_stream": None,  # reported already
    "all_gather_input_is_overwritten": "aten::zero_ .* overwrites what hccl::allgather_base .* reads",
    "changed_in_place_during_all_reduce": "aten::div_.Tensor .* overwrites what hccl::allreduce .* writes",
    "all_reduce_of_what_another_stream_writes": "hccl::allreduce .* overwrites what aten::fill_.Scalar",
    "receive": "aten::add.Tensor .* reads what hccl::recv",
    "barrier_waits_for_the_device": "aten::_to_copy .* reads what aten::mul.Tensor",
}
"""Programs that race without their synchronisation, and the warning."""
NO_RACES = (
    "pageable_memory_needs_no_synchronisation",
    "two_streams_read_the_same",
    "parts_of_one_buffer",
    "backward_of_work_on_another_stream",
    "broadcast_is_read_at_its_root",
)

Reading = tuple[list[float], list[str]]


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, bool], Reading]]:
    """Return what each rank's programs read, and warnings, by name and whether synchronised."""
    return run(tmp_path_factory.mktemp("races"), "1")


def run(folder: Path, strict: str) -> list[dict[tuple[str, bool], Reading]]:
    environment = simnpu.environment() | {STRICT_VARIABLE: strict, "OMP_NUM_THREADS": "1", "SIMNPU_DEVICES": "2"}
    commands = [[sys.executable, str(PROGRAM), str(rank), str(folder / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, text=True) for c in commands]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0]
    lines = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    return [{(name, waits): (values, races) for name, waits, values, races in rank} for rank in lines]


def poisoned(value: float) -> bool:
    return math.isnan(value) or value == 2**63 - 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", RACES)
def test_race_is_poisoned_and_named(readings, name: str, rank: int) -> None:
    values, races = readings[rank][name, False]
    assert all(map(poisoned, values)), values
    if pattern := RACES[name]:
        assert len(races) == 1
        assert re.search(pattern.format(rank=rank), races[0]), races


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [*RACES, *NO_RACES])
def test_synchronised_program_reads_right_values(readings, name: str, rank: int) -> None:
    assert readings[rank][name, True] in [([6, 6], []), ([6], [])]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", NO_RACES)
def test_program_without_race_is_left_alone(readings, name: str, rank: int) -> None:
    assert readings[rank][name, False] == ([6, 6], [])


def test_without_strict_mode_races_are_not_seen(tmp_path: Path) -> None:
    readings = run(tmp_path, "0")[0]
    certain = {key for key in readings if not key[0].startswith(("changed_in_place", "all_", "receive"))}
    assert all(readings[key] in [([6, 6], []), ([6], [])] for key in certain)
