"""Ulysses sequence parallelism and the mesh, without a model."""

from __future__ import annotations

import pytest

from megascend.engines.fsdp.attention import check_heads
from megascend.engines.fsdp.sharding import mesh_ranks
from megascend.errors import TopologyError


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 3), (6, 4, 2), (8, 3, 2)])
def test_heads_that_ranks_cannot_divide_are_refused(heads, kv_heads, size):
    with pytest.raises(TopologyError, match=rf"parallel.context={size} does not divide the model's {heads}"):
        check_heads(heads, kv_heads, size)
    check_heads(32, 4, 8)


def test_copies_of_the_model_are_neighbours():
    assert mesh_ranks(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(TopologyError, match="replicate=3 does not divide the 8"):
        mesh_ranks(8, 3)
