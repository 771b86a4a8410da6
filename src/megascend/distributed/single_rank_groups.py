"""Share one process group among all groups of the same single rank.

Megatron creates about twenty groups, and most of them have one rank if the world, or an axis, has one. On NCCL each costs a
communicator, its watchdog threads, and a fraction of a second to destroy; nothing is ever sent in it.
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
    """Patch ``torch.distributed.new_group`` within the context to reuse a single rank's group of equal backend and timeout.

    The arguments alone decide, so all ranks decide alike: a call that is answered from the cache is so on every rank.
    """
    with patched(dist, "new_group", sharing(dist.new_group), "one group of Megatron's for each that is of one rank"):
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
