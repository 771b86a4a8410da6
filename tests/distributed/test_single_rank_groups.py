"""Groups of the same single rank and kind are shared; all other groups are created as usual."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megascend.distributed.single_rank_groups import shared_single_rank_groups, sharing


def test_only_groups_of_the_same_rank_and_kind_are_shared() -> None:
    groups: list[object] = []

    def new_group(*args: Any, **options: Any) -> object:
        groups.append(object())
        return groups[-1]

    shared = sharing(new_group)
    first = shared([3], timeout=30, backend="nccl", pg_options=object(), group_desc="TP")
    assert shared(ranks=[3], timeout=30, backend="nccl", pg_options=None, group_desc="PP") is first
    distinct = [
        shared([2], 30, "nccl"),
        shared([3], 30, "gloo"),
        shared([3], 40, "nccl"),
        shared([3], 30, "nccl", use_local_synchronization=True),
        *(shared([2, 3], 30, "nccl") for _ in range(2)),
        *(shared(None, 30, "nccl") for _ in range(2)),
    ]
    assert len({id(group) for group in (first, *distinct)}) == len(groups) == 9


def test_new_group_is_restored_afterwards() -> None:
    before = dist.new_group
    with shared_single_rank_groups():
        assert dist.new_group is not before
    assert dist.new_group is before
