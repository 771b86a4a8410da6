"""Megatron's process groups: created through ``parallel_state``, and forgotten with the rest.

So are those that upstream makes for itself and keeps in module globals. One that lingers is used for the next layout
(mcore-bridge), or destructed at the next initialisation, where a process forked meanwhile waits for ever for threads that only
its parent has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state

from megascend.bootstrap import current_runtime
from megascend.changes import changed
from megascend.distributed.engine_groups import EngineGroups
from megascend.distributed.single_rank_groups import shared_single_rank_groups
from megascend.errors import ProcessGroupError
from megascend.topology.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


KEEPERS = (
    "megatron.core.parallel_state",  # destroy_model_parallel() forgets some: _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
    "mcore_bridge.bridge.gpt_bridge",  # EP x PP, made with the first ModelConfig
)


def require_none_alive() -> None:
    """Raise ProcessGroupError if Megatron's groups exist: one backend at a time."""
    if parallel_state.is_initialized():
        raise ProcessGroupError(
            "Megatron's process groups exist already; close the previous backend first (backend.close())"
        )


class MegatronGroups:
    """Creates Megatron's groups for :func:`megascend.distributed.process_groups.initialize`."""

    def __init__(self) -> None:
        self._began = False

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """All groups of ``topology``, as Megatron makes them. Collective.

        Raises:
            ProcessGroupError: Megatron's groups exist already.
        """
        require_none_alive()
        self._began = True
        with shared_single_rank_groups():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=topology.tensor,
                pipeline_model_parallel_size=topology.pipeline,
                virtual_pipeline_model_parallel_size=topology.virtual_pipeline
                if topology.virtual_pipeline > 1
                else None,
                context_parallel_size=topology.context,
                expert_model_parallel_size=topology.expert,
                expert_tensor_parallel_size=topology.expert_tensor,
                distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]  goes into a timedelta, fractions work
                order="tp-cp-ep-dp-pp",
                create_gloo_process_groups=True,
            )
        return EngineGroups(_device_groups(), _cpu_groups())

    def limit_timeouts(self, timeout_s: float) -> None:
        """Give groups that upstream has made meanwhile the timeout of this run, in seconds."""
        _limit_kept_groups(timeout_s)

    def forget(self, destroy: bool) -> None:
        """Let upstream's globals go of the groups that :meth:`create` has made; with ``destroy``, destroy them too."""
        if not self._began:  # those that exist are somebody else's
            return
        self._began = False
        _forget_kept_groups(destroy=destroy)  # before Megatron forgets them itself, without destroying them
        parallel_state.destroy_model_parallel()


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
    """The second ones that Megatron makes on Gloo, and that nothing else uses here."""
    return {  # type: ignore[reportReturnType]
        "dp": parallel_state.get_data_parallel_group_gloo(),
        "dp_cp": parallel_state.get_data_parallel_group_gloo(with_context_parallel=True),
        "edp": parallel_state.get_expert_data_parallel_group_gloo(),
    }


def _kept_groups() -> Iterator[tuple[ModuleType, str, dist.ProcessGroup]]:
    """Yield (module, attribute, group) of every global that holds a group other than the default one."""
    default = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    provider = current_runtime("Megatron's process groups").provider
    for name in (*KEEPERS, *(provider.keeps_groups_in if provider is not None else ())):
        module = sys.modules.get(name)
        if module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, dist.ProcessGroup) and value is not default:
                yield module, attribute, value


def _forget_kept_groups(destroy: bool) -> None:
    """Empty every global that holds a group.

    Args:
        destroy: also destroy them; for a default group that lives on. Destroying the default group takes them along.
    """
    for module, attribute, group in _kept_groups():
        changed(f"process groups in globals of {module.__name__}", "forgotten when a backend is closed")
        setattr(module, attribute, None)
        if destroy and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def _limit_kept_groups(timeout_s: float) -> None:
    """Give every such group the run's timeout: upstream leaves torch's 30 minutes on some."""
    timeout = timedelta(seconds=timeout_s)
    for _, _, group in _kept_groups():
        for device in group._device_types:
            # Not every backend can change it later; those whose makers took a timeout have it from the start.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                group._get_backend(device)._set_default_timeout(timeout)  # type: ignore[reportAttributeAccessIssue]
