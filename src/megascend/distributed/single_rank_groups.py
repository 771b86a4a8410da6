"""One group for all that consist of the same single rank.

Megatron makes twenty groups, and with one rank, or where an axis has one rank, most are of a single one. On NCCL each has a
communicator, threads that watch it, and a fraction of a second to leave; nothing ever travels in it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from megascend.changes import patched


@contextlib.contextmanager
def shared_single_rank_groups() -> Iterator[None]:
    """Have ``torch.distributed.new_group`` make one group for a rank, a backend and a timeout, not several, within the context.

    All ranks decide alike, by the arguments: a call that makes no group makes none anywhere.
    """
    with patched(dist, "new_group", sharing(dist.new_group), "one group of Megatron's for each that is of one rank"):
        yield


def sharing(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``new_group`` so that groups of a single rank are made once."""
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
        options = {"pg_options": pg_options, "use_local_synchronization": use_local_synchronization, **extra}
        if ranks is None or len(ranks) != 1:
            return new_group(ranks, timeout, backend, **options)
        # Some calls are for all ranks and some for the members alone, who then have a group that others do not know of.
        key = (*ranks, timeout, backend, use_local_synchronization)
        if key not in cache:
            cache[key] = new_group(ranks, timeout, backend, **options)
        return cache[key]

    return function
