"""Groups of a layout as lists of ranks."""

from __future__ import annotations

from megascend.config import Parallel
from megascend.runtime.topology.topology import plan, rank_lists


def test_every_set_of_ranks_is_listed_once_under_its_first_name() -> None:
    topology = plan(Parallel(tensor=2), 4)
    assert rank_lists(topology) == {
        (0, 1, 2, 3): "world",
        (0, 1): "tp",
        (2, 3): "tp",
        (0, 2): "dp",
        (1, 3): "dp",
    }
    assert list(rank_lists(topology, ("dp", "dp_cp", "world"))) == [(0, 2), (1, 3), (0, 1, 2, 3)]
    assert rank_lists(plan(Parallel(), 1)) == {}
