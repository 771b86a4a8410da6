"""The ring's process groups: created with Megatron's, if context parallelism was known when it was patched."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from mindspeed.args_utils import get_full_args

_CONTEXT_PARALLEL_GROUP_FOR_SEND_RECV_OVERLAP: dist.ProcessGroup | None = None
_CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW: list[int] | None = None
_CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV: list[int] | None = None
_CONTEXT_PARALLEL_GROUP_FOR_RING_INTRA_WINDOW: dist.ProcessGroup | None = None


def initialize_model_parallel_cp_wrapper(initialize_model_parallel: Callable[..., None]) -> Callable[..., None]:
    """``initialize_model_parallel`` that creates the ring's groups afterwards."""

    @wraps(initialize_model_parallel)
    def initialize(*args: Any, **kwargs: Any) -> None:
        initialize_model_parallel(*args, **kwargs)
        given = inspect.signature(initialize_model_parallel).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["context_parallel_size"] > 1:
            _create_ring()

    return initialize


def destroy_model_parallel_cp_wrapper(destroy_model_parallel: Callable[[], None]) -> Callable[[], None]:
    """``destroy_model_parallel`` that forgets the group for overlapped sending; the ring's own stays, as in the real."""

    @wraps(destroy_model_parallel)
    def destroy() -> None:
        global _CONTEXT_PARALLEL_GROUP_FOR_SEND_RECV_OVERLAP
        destroy_model_parallel()
        _CONTEXT_PARALLEL_GROUP_FOR_SEND_RECV_OVERLAP = None

    return destroy


def get_context_parallel_group_for_send_recv_overlap(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The second group of the ring's ranks, with ``use_cp_send_recv_overlap``."""
    if check_initialized and _CONTEXT_PARALLEL_GROUP_FOR_SEND_RECV_OVERLAP is None:
        raise AssertionError("context parallel group for send-recv overlap is not initialized")
    return _CONTEXT_PARALLEL_GROUP_FOR_SEND_RECV_OVERLAP


def get_ring_ranks_for_intra_window() -> list[int]:
    """Global ranks of this rank's window: ``cp_window_size`` neighbours, by default itself alone."""
    if _CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW is None:
        raise AssertionError("Context parallel ranks for ring intra window not initialized")
    return _CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW


def get_ring_ranks_for_inter_window_kv() -> list[int]:
    """Global ranks of the same place in every window: by default the whole context parallel group."""
    if _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV is None:
        raise AssertionError("Context parallel ranks for ring inter window KV not initialized")
    return _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV


def get_ring_group_for_intra_window() -> dist.ProcessGroup | None:
    """The process group of this rank's window, None if there is none."""
    return _CONTEXT_PARALLEL_GROUP_FOR_RING_INTRA_WINDOW


def _create_ring() -> None:
    """A process group for every window of the world; all ranks take part in creating each."""
    global _CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW, _CONTEXT_PARALLEL_GROUP_FOR_RING_INTRA_WINDOW
    global _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV, _CONTEXT_PARALLEL_GROUP_FOR_SEND_RECV_OVERLAP
    from megatron.core import parallel_state

    args = get_full_args()
    if args.context_parallel_algo != "megatron_cp_algo":
        return
    own, rank, width = list(parallel_state.get_context_parallel_global_ranks()), dist.get_rank(), args.cp_window_size
    for ring in _all_rings(own):
        overlap = dist.new_group(ring) if args.use_cp_send_recv_overlap else None
        for start in range(0, len(ring), width):
            window = ring[start : start + width]
            group = dist.new_group(window)
            if rank in window:
                _CONTEXT_PARALLEL_RANKS_FOR_RING_INTRA_WINDOW = window
                _CONTEXT_PARALLEL_GROUP_FOR_RING_INTRA_WINDOW = group
                _CONTEXT_PARALLEL_RANKS_FOR_RING_INTER_WINDOW_KV = ring[window.index(rank) :: width]
                _CONTEXT_PARALLEL_GROUP_FOR_SEND_RECV_OVERLAP = overlap


def _all_rings(own: list[int]) -> list[list[int]]:
    """All context parallel groups, from the stride of one: with Megatron's order of ranks they differ by a shift."""
    stride, size = own[1] - own[0], len(own)
    block = stride * size
    starts = [base + shift for base in range(0, dist.get_world_size(), block) for shift in range(stride)]
    return [list(range(start, start + block, stride)) for start in starts]
