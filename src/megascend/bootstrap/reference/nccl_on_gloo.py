"""Process groups that a program asks of NCCL, made of Gloo: NCCL communicates between GPUs only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megascend.changes import patch

FUNCTIONS = ("init_process_group", "new_group")


def install() -> list[str]:
    """Redirect; a second call does nothing. ``torch.distributed.get_backend()`` then says "gloo", which is the truth."""
    for name in FUNCTIONS:
        original = getattr(dist, name)
        if not hasattr(original, "__megascend__"):
            function = _on_gloo(original)
            for owner in (dist, distributed_c10d):
                patch(owner, name, function, "backend nccl means gloo")
    return []


def gloo_for(backend: Any) -> Any:
    """``backend`` as it can be had on a CPU: "nccl", alone or for a kind of device, becomes "gloo"."""
    return "gloo" if isinstance(backend, str) and "nccl" in backend.lower() else backend


def _on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    position = {"init_process_group": 0, "new_group": 2}[original.__name__]

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        asked = args[position] if len(args) > position else kwargs.get("backend")
        given = gloo_for(asked)
        if given != asked:
            if len(args) > position:
                args = (*args[:position], given, *args[position + 1 :])
            else:
                kwargs["backend"] = given
            kwargs.pop("pg_options", None)  # of NCCL
        if getattr(kwargs.get("device_id"), "type", None) == "cuda":
            kwargs.pop("device_id")
        return original(*args, **kwargs)

    function.__megascend__ = True  # type: ignore[attr-defined]
    return function
