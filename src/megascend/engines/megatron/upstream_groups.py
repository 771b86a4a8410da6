"""Process groups that upstream makes for itself and keeps in module globals: bounded, and forgotten with the rest.

A group that lingers is used for the next layout (mcore-bridge), or destructed at the next initialisation, where a process
forked meanwhile waits for ever for threads that only its parent has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType

import torch.distributed as dist

from megascend.bootstrap import current_runtime
from megascend.changes import changed

KEEPERS = (
    "megatron.core.parallel_state",  # destroy_model_parallel() forgets some: _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
    "mcore_bridge.bridge.gpt_bridge",  # EP x PP, made with the first ModelConfig
)


def kept() -> Iterator[tuple[ModuleType, str, dist.ProcessGroup]]:
    """(module, attribute, group) of every global that holds a group other than the default one."""
    default = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    provider = current_runtime("Megatron's process groups").provider
    for name in (*KEEPERS, *(provider.keeps_groups_in if provider is not None else ())):
        module = sys.modules.get(name)
        if module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, dist.ProcessGroup) and value is not default:
                yield module, attribute, value


def forget(destroy: bool) -> None:
    """Empty every global that holds a group.

    Args:
        destroy: also destroy them; for a default group that lives on. Destroying the default group takes them along.
    """
    for module, attribute, group in kept():
        changed(f"process groups in globals of {module.__name__}", "forgotten when a backend is closed")
        setattr(module, attribute, None)
        if destroy and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def limit(timeout_s: float) -> None:
    """Give every such group the run's timeout: upstream leaves torch's 30 minutes on some."""
    timeout = timedelta(seconds=timeout_s)
    for _, _, group in kept():
        for device in group._device_types:
            # Not every backend can change it later; those whose makers took a timeout have it from the start.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                group._get_backend(device)._set_default_timeout(timeout)  # type: ignore[reportAttributeAccessIssue]
