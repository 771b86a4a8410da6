"""Read the launcher's environment: this process's rank, the world size, and the store for the rendezvous.

No other module reads the launcher's variables. Child processes that are not ranks are started without them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.errors import CollectiveTimeoutError, ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import Store


LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "MEGASCEND_STORE"),
    *("NODE_RANK", "NCCL_COMM_ID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASK_PID"),
    *("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
)
"""Set for each rank by torchrun, ``run_distributed``, an MPI launcher or srun; ``NCCL_COMM_ID`` is the address of one group."""
LAUNCHER_PREFIXES = (
    *("TORCHELASTIC_", "PET_", "OMPI_", "PMI_", "PMI2_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MV2_COMM_WORLD_"),
    *("SLURM_STEP_", "SLURM_STEPID", "SLURM_SRUN_", "SLURM_LAUNCH_", "SLURM_CPU_BIND"),
)
"""Prefixes of torchrun's other variables (PET: its options), and of those that MPI launchers and srun set for their ranks."""


def child_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child process that is not a rank: this one without the launcher's variables.

    A child that inherits RANK or MASTER_PORT behaves like a rank of this run: torch in it waits for a store that nobody serves,
    or answers instead of the parent.
    """
    environment = os.environ if environment is None else environment
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }


def plain_environment() -> dict[str, str]:
    """Return the environment of a helper process: plain packages on the CPU, one thread, a world of one, on any platform."""
    from simnpu.environment import own_paths
    from simnpu.settings import ACTIVE_VARIABLE

    # The simulated NPU puts stand-ins of torch_npu and other packages on sys.path; a helper process must not import them.
    simulated = {str(path) for path in own_paths()} if ACTIVE_VARIABLE in os.environ else set()
    # sys.path, not PYTHONPATH: the parent may have extended it at run time, and relative entries depend on its directory.
    path = [str(Path(entry).absolute()) for entry in sys.path if entry and entry not in simulated]
    environment = child_environment()
    environment.pop(ACTIVE_VARIABLE, None)
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        # One thread: the ranks themselves need the other cores.
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Stops torch from importing torch_npu: helpers use plain packages.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }


@dataclass(frozen=True)
class Launch:
    """Rank, world size, and the address of the store.

    Attributes:
        local_rank, local_size: rank and number of processes on this host.
        store_path: file of a ``FileStore`` (``MEGASCEND_STORE``, as set by ``megascend.testing.run_distributed``).
        master: host and port of the TCP store (torchrun's ``MASTER_ADDR`` and ``MASTER_PORT``).
        agent_store: True if the launcher serves the TCP store, so that rank 0 need not.
        attempt: number of restarts by torchrun (``--max-restarts``), as counted on this host; its store outlives the attempts.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    store_path: str | None = None
    master: tuple[str, int] | None = None
    agent_store: bool = False
    attempt: int = 0
    local_size: int = 1

    @property
    def several_hosts(self) -> bool:
        """Check whether some ranks run on other hosts."""
        return self.world_size > self.local_size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read the variables of torchrun or ``run_distributed``; without any, the world is this process."""
        environment = os.environ if environment is None else environment
        variables = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
        if not variables:
            return cls()
        if len(variables) < 2:
            raise ProcessGroupError(
                f"of RANK and WORLD_SIZE only {next(iter(variables))} is set; start with torchrun, which sets both, "
                "or unset it to run as a single process"
            )
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ProcessGroupError(f"RANK={rank} is outside WORLD_SIZE={world_size}")
        store_path = environment.get("MEGASCEND_STORE")
        master = None
        if world_size > 1 and not store_path:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
            if missing:
                raise ProcessGroupError(
                    f"WORLD_SIZE={world_size}, without {' and '.join(missing)}: the ranks cannot meet; "
                    "start with torchrun"
                )
            master = environment["MASTER_ADDR"], _number(environment, "MASTER_PORT")
        return cls(
            rank=rank,
            # Launchers that set only RANK and WORLD_SIZE are taken to start all ranks on one host.
            local_rank=_number(environment, "LOCAL_RANK", rank),
            local_size=_number(environment, "LOCAL_WORLD_SIZE", world_size),
            world_size=world_size,
            store_path=store_path,
            master=master,
            # torchrun writes Python's str(True).
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        )

    def store(self, timeout_s: float, start: str | None = None) -> Store:
        """Open the store. Does not wait for other ranks, except for the one that serves it.

        Keys have a prefix for this start, so keys of an earlier attempt are not visible.

        Args:
            start: name that the ranks agreed on; default: the number of the attempt, which ranks of one host share.
        """
        import torch.distributed as dist

        if self.store_path:
            # World size -1 keeps the file, which its owner removes. With a size, the rank that closes a first set of groups
            # last would delete it under ranks that have already opened it again.
            store: Store = dist.FileStore(self.store_path, -1)
        elif self.master is None:
            # A world of one: in memory, no port.
            store = dist.HashStore()
        else:
            host, port = self.master
            serves = self.rank == 0 and not self.agent_store
            try:
                store = dist.TCPStore(
                    host,
                    port,
                    self.world_size,
                    is_master=serves,
                    timeout=timedelta(seconds=timeout_s),
                    # True would block here without a chance to name the missing ranks; wait_for_all() does.
                    wait_for_workers=False,
                    # A rank opens the store two or three times; without this, rank 0's second server could not bind the port.
                    multi_tenant=True,
                )
            except dist.DistError as error:
                if serves:
                    raise ProcessGroupError(f"rank 0 cannot serve the store at {host}:{port}: {error}") from error
                raise CollectiveTimeoutError(
                    f"rank {self.rank}: no store answers at {host}:{port} (MASTER_ADDR:MASTER_PORT) within "
                    f"{timeout_s:g} s; rank 0 has not started, or the address is wrong: {error}"
                ) from error
        store.set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore(f"attempt-{self.attempt}" if start is None else start, store)


def reconnect(store: Store, timeout_s: float) -> Store | None:
    """Open a second connection to the same store, without its prefixes; None for kinds of stores that allow none."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    second: Store
    if isinstance(store, dist.TCPStore):
        second = dist.TCPStore(
            store.host, store.port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    elif isinstance(store, dist.FileStore):
        second = dist.FileStore(store.path, -1)  # type: ignore[reportAttributeAccessIssue]  torch's stub lacks it
    else:
        return None
    second.set_timeout(timedelta(seconds=timeout_s))
    return second


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in environment:
        return default
    try:
        return int(environment[name])
    except ValueError:
        raise ProcessGroupError(f"{name}={environment[name]!r} is not a whole number") from None
