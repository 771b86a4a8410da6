"""A double of vllm-ascend's ``PyHcclCommunicator``, on the simulated device.

As the real one: it takes a ``StatelessProcessGroup`` or a process group, loads a library by HCCL_SO_PATH, and where
that fails sets ``disabled`` and returns from everything without a word. Where it works, its bytes travel over the
simulated HCCL.
"""

import ctypes
import os
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from vllm.distributed.utils import StatelessProcessGroup


class hcclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 4108)]


class PyHcclCommunicator:
    def __init__(self, group, device, library_path=None):
        assert isinstance(group, StatelessProcessGroup)
        self.rank, self.world_size, self.device = group.rank, group.world_size, torch.device(device)
        self.available, self.disabled = False, True
        if not os.path.exists(library_path or os.environ.get("HCCL_SO_PATH", "libhccl.so")):
            return
        self.available, self.disabled = True, False
        unique_id = hcclUniqueId()
        if self.rank == 0:
            ctypes.memmove(unique_id.internal, uuid.uuid4().bytes, 16)
        unique_id = group.broadcast_obj(unique_id, src=0)
        name = bytes(unique_id)[:16].hex()
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options._timeout = timedelta(seconds=20)
        store = dist.PrefixStore(name, group.store)
        self.backend = ProcessGroupHCCL(store, self.rank, self.world_size, options)
        self.comm = dist.ProcessGroup(store, self.rank, self.world_size)
        self.comm._register_backend(torch.device("npu"), dist.ProcessGroup.BackendType.CUSTOM, self.backend)

    def broadcast(self, tensor, src, stream=None):
        if self.disabled:
            return
        assert tensor.device == self.device
        options = dist.BroadcastOptions()
        options.rootRank = src
        self.comm.broadcast([tensor], options).wait()
