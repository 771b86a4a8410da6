"""Groups of the same single rank are one; all others, and those of other kinds, are made as they were."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megascend.distributed.single_rank_groups import shared_single_rank_groups, sharing


def test_only_groups_of_the_same_rank_and_kind_are_one() -> None:
    made: list[object] = []

    def new_group(*args: Any, **options: Any) -> object:
        made.append(object())
        return made[-1]

    shared = sharing(new_group)
    first = shared([3], timeout=30, backend="nccl", pg_options=object(), group_desc="TP")
    assert shared(ranks=[3], timeout=30, backend="nccl", pg_options=None, group_desc="PP") is first
    others = [
        shared([2], 30, "nccl"),
        shared([3], 30, "gloo"),
        shared([3], 40, "nccl"),
        shared([3], 30, "nccl", use_local_synchronization=True),
        *(shared([2, 3], 30, "nccl") for _ in range(2)),
        *(shared(None, 30, "nccl") for _ in range(2)),
    ]
    assert len({id(group) for group in (first, *others)}) == len(made) == 9


def test_torch_is_as_it_was_afterwards() -> None:
    before = dist.new_group
    with shared_single_rank_groups():
        assert dist.new_group is not before
    assert dist.new_group is before
