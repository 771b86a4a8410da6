"""Megatron's process groups: created through ``parallel_state``, and forgotten with the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state

from megascend.distributed.engine_groups import EngineGroups
from megascend.distributed.single_rank_groups import shared_single_rank_groups
from megascend.engines.megatron import upstream_groups
from megascend.errors import ProcessGroupError
from megascend.topology.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        upstream_groups.limit(timeout_s)

    def forget(self, destroy: bool) -> None:
        """Let upstream's globals go of the groups that :meth:`create` has made; with ``destroy``, destroy them too."""
        if not self._began:  # those that exist are somebody else's
            return
        self._began = False
        upstream_groups.forget(destroy=destroy)  # before Megatron forgets them itself, without destroying them
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
