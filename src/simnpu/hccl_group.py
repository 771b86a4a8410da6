"""One hccl group: a Gloo of its own, whose connections are made at their first use.

As with HCCL, making a group costs nothing and asks nobody: the communicator comes about at the first collective, on all
ranks of the group at once, and belongs to the list of its ranks. A rank may therefore make only the groups that it is
a member of, which ``torch.distributed.new_group`` does not promise but HCCL's programs rely on: PyTorch's own names for
groups, which number the calls of a process, then mean different groups on different ranks.
"""

from __future__ import annotations

import collections
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, distributed_c10d

from simnpu.errors import ConfigError
from simnpu.visible import card


class Options(Backend.Options):
    """Options of an HCCL process group. Kept for the program to read back; Gloo, which carries it, obeys the timeout.

    ``hccl_config`` holds e.g. ``{"hccl_buffer_size": 200, "group_name": "tp"}``.
    """

    hccl_config: dict[str, Any] = {}  # noqa: RUF012  # the class has it, too: MindSpeed asks by hasattr

    def __init__(self) -> None:
        super().__init__("hccl")
        self.op_timeout = self._timeout
        self.is_high_priority_stream = False
        self.hccl_config = {}
        self.group_id = ""


BACKEND = "hccl"
COMM_PREFIX = "simnpu_hccl_"
CONNECT_VARIABLE = "HCCL_CONNECT_TIMEOUT"
CONNECT_S = 120  # HCCL's default
CONNECT_RANGE = range(120, 7201)
ABORT_TAG = 2**31 - 1  # of a message that nobody sends

_group_counts: collections.Counter[tuple[int, ...]] = collections.Counter()  # groups of this process, by their ranks
_alive: dict[str, ProcessGroupHCCL] = {}  # by group name: C++ keeps no Python object


class ProcessGroupHCCL(ProcessGroupGloo):
    """The backend of an hccl group, under torch_npu's name.

    Args:
        store: store private to this group, through which its ranks rendezvous.
        rank: rank of this process in the group.
        size: size of the group.
        options: its timeout is obeyed, the rest is kept to be read back. A timedelta is a timeout.
    """

    Options = Options  # type: ignore[assignment]
    supports_splitting = False  # type: ignore[assignment]  # as torch_npu's

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        if isinstance(options, timedelta):
            timeout, options = options, Options()
            options._timeout = timeout
        self.hccl_options = options or Options()
        self.ranks: list[int] = list(self.hccl_options.global_ranks_in_group) or list(range(size))
        self.store = store
        self.joined = False
        self.device_index = 0
        gloo: Any = ProcessGroupGloo._Options()  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs
        gloo._devices = [ProcessGroupGloo.create_default_device(lazy_init=True)]
        gloo._threads = 1  # collectives of a group run in order, as on a device stream
        gloo._timeout = self.hccl_options._timeout
        gloo.global_ranks_in_group = self.hccl_options.global_ranks_in_group
        gloo.group_name = self.hccl_options.group_id
        super().__init__(store, rank, size, gloo)

    def name(self) -> str:
        return BACKEND

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """Return the name that operators take as ``hcom``, which :func:`group_of` reads."""
        return COMM_PREFIX + self.hccl_options.group_id

    def abort_hccl_comm(self, abort_reason: str | None, /) -> None:
        """End the communicator: operations in flight raise at once, on the other ranks too.

        torch_npu makes a new communicator at the next collective; here the group is unusable from now on.
        """
        for peer in range(self.size()):
            if peer == self.rank():
                continue
            # Gloo closes all connections of a group when a wait of its caller has expired. A lost peer's is closed already.
            try:
                super().recv([torch.empty(1, dtype=torch.uint8)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))  # type: ignore[reportAttributeAccessIssue]
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return

    def join(self) -> None:
        """Wait, before the first collective, until every rank of the group is at its own."""
        if self.joined:
            return
        limit = min(connect_timeout(), self.hccl_options._timeout)
        keys = [f"joined/{rank}" for rank in range(self.size())]
        self.store.set(keys[self.rank()], card(self.device_index))
        try:
            self.store.wait(keys, limit)
        except RuntimeError as error:
            late = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self.store.check([key])]
            raise RuntimeError(
                f"timed out after {limit.total_seconds():g} s ({CONNECT_VARIABLE}): rank {self.ranks[self.rank()]} is at the "
                f"first collective of the hccl group of ranks {self.ranks}, and of these {late} did not come"
            ) from error
        cards = [self.store.get(key).decode() for key in keys]
        if same := [rank for rank, name in zip(self.ranks, cards, strict=True) if cards.count(name) > 1]:
            raise RuntimeError(
                f"ranks {same} of the hccl group of ranks {self.ranks} share a card ({cards[self.ranks.index(same[0])]}): HCCL "
                "needs one for each; call torch.npu.set_device(LOCAL_RANK) first"
            )
        self.joined = True


def create(options: Any, backend_options: Any = None) -> ProcessGroupHCCL:
    """Create a group of the backend ``hccl`` for ``torch.distributed``.

    The group's keys in the store begin with its ranks and, among groups of the same ranks, its number.
    """
    ranks = tuple(options.global_ranks_in_group)  # none: the default group
    _group_counts[ranks] += 1
    above = distributed_c10d._get_default_store() if ranks else options.store
    store = PrefixStore(f"hccl/{'-'.join(map(str, ranks))}/{_group_counts[ranks]}", above)
    group_options = backend_options if isinstance(backend_options, Options) else Options()
    group_options._timeout = options.timeout
    group_options.global_ranks_in_group = options.global_ranks_in_group
    group_options.group_id = options.group_id
    backend = ProcessGroupHCCL(store, options.group_rank, options.group_size, group_options)
    _alive[options.group_id] = backend
    return backend


def group_of(hcom: str) -> ProcessGroup:
    """Return the process group behind a name of :meth:`ProcessGroupHCCL.get_hccl_comm_name`."""
    name = hcom.removeprefix(COMM_PREFIX)
    if not hcom.startswith(COMM_PREFIX) or name not in _alive:
        raise RuntimeError(f"hcom {hcom!r} names no hccl group of this process: get it from get_hccl_comm_name")
    return distributed_c10d._resolve_process_group(name)  # type: ignore[reportAttributeAccessIssue]


def is_hccl(group: ProcessGroup, device: Any) -> bool:
    """Check whether ``group`` carries tensors of ``device`` over hccl."""
    return torch.device(device).type == "npu" and BACKEND in str(dist.get_backend_config(group))


def forget_when_shut_down() -> None:
    """Let a group's connections end with it."""
    cls: Any = ProcessGroup

    def forgetting(end: Any) -> Any:
        def call(group: ProcessGroup) -> None:
            end(group)
            _alive.pop(group.group_name, None)

        return call

    cls.shutdown, cls.abort = forgetting(cls.shutdown), forgetting(cls.abort)


def connect_timeout() -> timedelta:
    text = os.environ.get(CONNECT_VARIABLE, str(CONNECT_S))
    if not text.isdigit() or int(text) not in CONNECT_RANGE:
        raise ConfigError(f"{CONNECT_VARIABLE}={text!r}: expected 120 to 7200, in seconds")
    return timedelta(seconds=int(text))
