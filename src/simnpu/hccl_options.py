"""The options of an HCCL process group, which Megatron and MindSpeed fill in."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Backend


class Options(Backend.Options):
    """Options of an HCCL process group. Kept for the program to read back; Gloo, which carries it, obeys the timeout.

    ``hccl_config`` holds e.g. ``{"hccl_buffer_size": 200, "group_name": "tp"}``.
    """

    def __init__(self) -> None:
        super().__init__("hccl")
        self.op_timeout = self._timeout
        self.is_high_priority_stream = False
        self.hccl_config: dict[str, Any] = {}
        self.group_id = ""
