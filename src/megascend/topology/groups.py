"""Which ranks communicate with each other: the groups of a layout, by name. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from megascend.errors import ProcessGroupError
from megascend.topology.topology import ATTENTION_AXES, Topology

GROUP_AXES: dict[str, tuple[str, ...]] = {
    "world": ATTENTION_AXES,
    "tp": ("tensor",),
    "pp": ("pipeline",),
    "cp": ("context",),
    "dp": ("data",),
    "dp_cp": ("data", "context"),
    "tp_cp": ("tensor", "context"),
    "tp_dp_cp": ("tensor", "data", "context"),
    "mp": ("tensor", "pipeline"),
    "ep": ("expert",),
    "etp": ("expert_tensor",),
    "etp_ep": ("expert_tensor", "expert"),
    "edp": ("expert_data",),
}
"""Name of every group, and the axes of the topology it spans (``edp``: expert data parallel)."""


def axes_of(name: str) -> tuple[str, ...]:
    """The axes of group ``name``.

    Raises:
        ProcessGroupError: there is no group of this name.
    """
    if name not in GROUP_AXES:
        raise ProcessGroupError(f"no process group {name!r}; there are {', '.join(GROUP_AXES)}")
    return GROUP_AXES[name]


def rank_lists(topology: Topology, names: Iterable[str] = tuple(GROUP_AXES)) -> dict[tuple[int, ...], str]:
    """Every set of two or more ranks that is a group, once, with the first of its names in ``names``.

    The order is the same on all ranks: that in which they create the groups.
    """
    found: dict[tuple[int, ...], str] = {}
    for name in names:
        for ranks in topology.groups(*axes_of(name)):
            if len(ranks) > 1:
                found.setdefault(tuple(ranks), name)
    return found
