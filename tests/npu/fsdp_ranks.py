"""Jobs of FSDP engine ranks on the simulated device: those of ranks.py and adapter_ranks.py of tests/engines/fsdp.

DTensors cannot be cast here, as on cards with a torch_npu whose own cast is not known to DTensor (ms-swift#7871): whatever needs
it must be cast before it is sharded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "fsdp"))

import adapter_ranks
import ranks


def refuse(operator: Any, args: Any, kwargs: Any) -> NoReturn:
    raise NotImplementedError("Operator npu._npu_dtype_cast.default does not have a sharding strategy registered.")


def casts_fail() -> bool:
    """Check on a separate rank that casting a DTensor is an error in this process."""

    def on_rank() -> bool:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sharded = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
        try:
            sharded.bfloat16()
        except NotImplementedError as error:
            return "_npu_dtype_cast" in str(error)
        return False

    return ranks.on_ranks(on_rank, 1)[0]


if __name__ == "__main__":
    dispatcher = DTensor._op_dispatcher  # type: ignore[reportAttributeAccessIssue]
    dispatcher._custom_op_handlers[torch.ops.aten._to_copy.default] = refuse
    ranks.do_jobs(vars(ranks) | vars(adapter_ranks) | {"casts_fail": casts_fail})
