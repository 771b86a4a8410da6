"""A simulated Ascend device: run an unmodified NPU program, with the real MindSpeed, on a machine without a card.

``torch.device("npu")`` becomes a device on CPU memory, ``hccl`` runs over Gloo, and ``import torch_npu`` finds a
stand-in whose fused operators are written in plain PyTorch and check their arguments as the Ascend kernels do.

What a run here proves: the call surface (every name exists, every argument fits), the arguments and shapes of the fused
operators (a mask that the kernel rejects is rejected with the kernel's message), the order of the collectives, the
separation of CPU and NPU tensors, and the numbers up to floating-point arithmetic. What it does not prove: the numerics
of the real kernels, speed, an allocator's memory, the concurrency of streams (everything runs at once and in order),
Triton kernels, graph mode.

Two ways in:

* ``python -m simnpu -- torchrun --nproc_per_node 8 train.py`` (or :func:`environment` for a subprocess of your own);
* :func:`activate` in the running process, before torch_npu, MindSpeed and Megatron are imported.

Beside a real, working torch_npu both refuse. ``torch_npu.__version__`` ends in ``+simnpu`` and one line on stderr says
what the device is, so that no measurement taken here can pass for one taken on hardware. Importing this module imports
no torch.
"""

from __future__ import annotations

from simnpu.activation import activate, is_active
from simnpu.environment import environment
from simnpu.errors import NotSimulatedError

__all__ = ["NotSimulatedError", "__version__", "activate", "environment", "is_active"]

__version__ = "0.2.0"
