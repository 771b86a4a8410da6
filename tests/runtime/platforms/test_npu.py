"""Decisions of the npu platform without a card: the ports of a job."""

from __future__ import annotations

import pytest

from megascend.runtime.platforms.npu import (
    FIRST_PORT,
    HCCL_PORTS,
    LAST_PORT,
    choose_hccl_port,
    hccl_base_port,
    limit_hccl,
)


def job(port):
    return {"MASTER_ADDR": "node0", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}


def test_all_ranks_of_a_job_derive_the_same_port():
    ranks = [hccl_base_port(job(29500) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(8)]
    assert len(set(ranks)) == 1


def test_two_jobs_of_a_host_do_not_share_ports():
    """Derive ports from consecutive rendezvous ports, as launchers assign them."""
    bases = [hccl_base_port(job(port)) for port in range(29500, 29508)]
    assert len(set(bases)) == len(bases)
    assert all((base - FIRST_PORT) % HCCL_PORTS == 0 for base in bases)
    assert all(base >= FIRST_PORT and base + HCCL_PORTS <= LAST_PORT + HCCL_PORTS < 32_768 for base in bases)


@pytest.mark.parametrize("name", ["HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE"])
def test_port_of_the_user_is_respected(name):
    environment = job(29500) | {name: "50000"}
    assert choose_hccl_port(environment) == []
    assert environment[name] == "50000"


def test_hccl_gets_the_runs_timeout_within_hccl_limits():
    environment: dict[str, str] = {}
    assert limit_hccl(environment, 600) == ["HCCL_CONNECT_TIMEOUT=600", "HCCL_EXEC_TIMEOUT=612"]
    assert environment == {"HCCL_CONNECT_TIMEOUT": "600", "HCCL_EXEC_TIMEOUT": "612"}
    assert limit_hccl({}, 30) == ["HCCL_CONNECT_TIMEOUT=120", "HCCL_EXEC_TIMEOUT=68"]
    assert limit_hccl({"HCCL_EXEC_TIMEOUT": "1836"}, 600) == ["HCCL_CONNECT_TIMEOUT=600"]
