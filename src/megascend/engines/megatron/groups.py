"""Megatron's process groups: created through ``parallel_state``, and cleared when a backend is closed.

So are those that Megatron and mcore-bridge keep in other module globals. A stale group would be used for the next layout
(mcore-bridge), or destructed at the next initialisation, where a process that was forked in between would wait forever for
threads that only its parent has.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state

from megascend.changes import changed, patched
from megascend.errors import ProcessGroupError
from megascend.runtime.bootstrap import current_runtime
from megascend.runtime.distributed.engine_groups import EngineGroups
from megascend.runtime.topology.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


GROUP_HOLDERS = (
    # Its destroy_model_parallel() does not clear all: _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
    "megatron.core.parallel_state",
    "mcore_bridge.bridge.gpt_bridge",  # EP x PP, created with the first ModelConfig
)
"""Modules that keep process groups in globals."""


def require_none_alive() -> None:
    """Raise ProcessGroupError if Megatron's groups exist: one backend at a time."""
    if parallel_state.is_initialized():
        raise ProcessGroupError(
            "Megatron's process groups exist already; close the previous backend first (backend.close())"
        )


class MegatronGroups:
    """Factory of Megatron's groups for :func:`megascend.runtime.distributed.process_groups.initialize`."""

    _created = False

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """Create all groups of ``topology`` through Megatron. Collective."""
        require_none_alive()
        self._created = True
        # Megatron creates groups of one rank for every axis of size 1; here they share one.
        with shared_single_rank_groups():
            _initialize(topology, timeout_s, gloo=True)
        return EngineGroups(_device_groups(), _cpu_groups())

    def limit_timeouts(self, timeout_s: float) -> None:
        """Set the run's timeout on groups that Megatron and mcore-bridge have created since, some with torch's 30 minutes."""
        timeout = timedelta(seconds=timeout_s)
        for _, _, group in _groups_in_globals():
            for device in group._device_types:
                # Not every backend can change its timeout later; groups that were created with the run's already have it.
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    group._get_backend(device)._set_default_timeout(timeout)  # type: ignore[reportAttributeAccessIssue]

    def forget(self, destroy: bool) -> None:
        """Clear the module globals that hold groups; with ``destroy``, destroy the groups too."""
        if not self._created:  # existing groups belong to other code
            return
        self._created = False
        _clear_globals(destroy=destroy)  # before Megatron forgets them itself, without destroying them
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def fake_groups(topology: Topology) -> Iterator[None]:
    """Create Megatron's groups within the context as rank 0 of ``topology``, on torch's fake backend without communication.

    mcore-bridge's configuration cannot be built without groups, and a dry run has no other ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    require_none_alive()
    dist.init_process_group("fake", rank=0, world_size=topology.world_size, store=FakeStore())
    try:
        _initialize(topology, 600.0, gloo=False)
        yield
    finally:
        _clear_globals(destroy=False)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _initialize(topology: Topology, timeout_s: float, *, gloo: bool) -> None:
    """Create all groups of ``topology`` in ``parallel_state``; with ``gloo`` those on the CPU too. Collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        virtual_pipeline_model_parallel_size=topology.virtual_pipeline if topology.virtual_pipeline > 1 else None,
        context_parallel_size=topology.context,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=topology.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]  goes into a timedelta, fractions work
        # Megatron-LM's default order. Ranks of an axis on the left are neighbours: tensor parallelism, which
        # communicates most, stays within a host.
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=gloo,
    )


def _device_groups() -> dict[str, ProcessGroup]:
    state = parallel_state
    return {  # type: ignore[reportReturnType]
        "world": dist.distributed_c10d._get_default_group(),
        "tp": state.get_tensor_model_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "dp_cp": state.get_data_parallel_group(with_context_parallel=True),
        "tp_cp": state.get_tensor_and_context_parallel_group(),
        "tp_dp_cp": state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "mp": state.get_model_parallel_group(),
        "ep": state.get_expert_model_parallel_group(),
        "etp": state.get_expert_tensor_parallel_group(),
        "etp_ep": state.get_expert_tensor_and_model_parallel_group(),
        "edp": state.get_expert_data_parallel_group(),
    }


def _cpu_groups() -> dict[str, ProcessGroup]:
    """Return the Gloo groups that Megatron creates in addition to its device groups; here it does not use them itself."""
    return {  # type: ignore[reportReturnType]
        "dp": parallel_state.get_data_parallel_group_gloo(),
        "dp_cp": parallel_state.get_data_parallel_group_gloo(with_context_parallel=True),
        "edp": parallel_state.get_expert_data_parallel_group_gloo(),
    }


def _groups_in_globals() -> Iterator[tuple[ModuleType, str, dist.ProcessGroup]]:
    """Yield (module, attribute, group) of every global that holds a group other than the default one."""
    default = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    provider = current_runtime("Megatron's process groups").provider
    for name in (*GROUP_HOLDERS, *(provider.keeps_groups_in if provider is not None else ())):
        module = sys.modules.get(name)
        if module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, dist.ProcessGroup) and value is not default:
                yield module, attribute, value


def _clear_globals(destroy: bool) -> None:
    """Clear every module global that holds a group.

    Args:
        destroy: also destroy the groups, for a default group that stays alive. Destroying that would destroy them all.
    """
    for module, attribute, group in _groups_in_globals():
        changed(f"process groups in globals of {module.__name__}", "forgotten when a backend is closed")
        # A group that is destroyed and still in a global would be used by the next backend of this process.
        setattr(module, attribute, None)
        if destroy and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def shared_single_rank_groups() -> Iterator[None]:
    """Patch ``torch.distributed.new_group`` within the context to reuse a single rank's group of equal backend and timeout.

    Megatron creates about twenty groups, and most of them have one rank if the world, or an axis, has one. On NCCL each costs a
    communicator, its watchdog threads, and a fraction of a second to destroy; nothing is ever sent in it.

    Only the arguments matter, so a call that is answered from the cache is so on every rank.
    """
    with patched(dist, "new_group", sharing(dist.new_group), "Megatron's groups of one rank are a single one"):
        yield


def sharing(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``new_group`` so that groups of a single rank are created once."""
    cache: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(new_group)
    def function(
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        **extra: Any,
    ) -> Any:
        # pg_options are not part of the key: they configure traffic, and a single rank has none.
        options = {"pg_options": pg_options, "use_local_synchronization": use_local_synchronization, **extra}
        if ranks is None or len(ranks) != 1:
            return new_group(ranks, timeout, backend, **options)
        # new_group with local synchronization is called by members only; without it, by all ranks. The two must not be mixed.
        key = (*ranks, timeout, backend, use_local_synchronization)
        if key not in cache:
            cache[key] = new_group(ranks, timeout, backend, **options)
        return cache[key]

    return function
