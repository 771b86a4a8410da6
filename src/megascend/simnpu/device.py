"""A simulated Ascend device: a real ``npu`` torch device, in Python, over CPU memory.

It exists to run and test NPU training code without an NPU. Unlike CPU tensors under a false flag, npu tensors have
their own device, dispatch key, autocast state and random state, and refuse to meet CPU tensors, so that the mistakes
that hardware would show appear here too. Results are the CPU kernels', bit for bit.

Needs a PyTorch that can register a device from Python (``_setup_privateuseone_for_python_backend`` in
``torch.utils.backend_registration``); tested on torch 2.13. One device per process, ``npu:0``: PyTorch's Python device
guard knows no other. Any other index means that device too.

The first backward pass of a process, even one on CPU tensors, starts autograd's thread for the device. Processes forked
after that cannot run a backward pass ("Unable to handle autograd's threading in combination with fork-based
multiprocessing"): fork first.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch.utils import backend_registration

from megascend.errors import PlatformError
from megascend.simnpu import host_memory, kernels, storage
from megascend.simnpu.memory import cpu_view, npu_view
from megascend.simnpu.random import generator

__all__ = ["cpu_view", "generator", "npu_view", "register"]

DEVICE = "npu"
_libraries: list[torch.library.Library] = []  # kernels live as long as their library object


def register(module: Any = None) -> None:
    """Make ``npu`` a device of this process. Idempotent; cannot be undone.

    Args:
        module: what becomes ``torch.npu``. By default a minimal one, unless one is registered already.

    Raises:
        PlatformError: this PyTorch cannot register a device from Python, or another package has taken its place.
    """
    if module is not None and not hasattr(module, "_initialized"):
        module._initialized = True  # without it torch.utils.checkpoint neither saves nor restores the random state
    if _libraries:
        return
    _check_torch()
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch.utils.generate_methods_for_privateuse1_backend()
    if not hasattr(torch, DEVICE):
        torch._register_device_module(DEVICE, module or _minimal_module())
    acc: Any = torch._C._acc  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs
    acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    _libraries.extend(kernels.register())
    storage.install()
    host_memory.install()
    torch._C._accelerator_synchronizeDevice = _synchronize


def _check_torch() -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        raise PlatformError(
            f"the simulated npu needs a PyTorch that can register a device from Python (it is tested on 2.13); found "
            f"{torch.__version__}: install torch 2.13"
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", DEVICE) or torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::empty.memory_format", "PrivateUse1"
    ):
        raise PlatformError(
            f"PyTorch's one slot for an out-of-tree device is taken by {taken!r}: the simulated npu cannot run beside "
            "it. With the real torch_npu installed, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to keep it from loading."
        )


def _synchronize(device_index: int) -> None:
    """``torch.accelerator.synchronize``: PyTorch's Python device guard has no such method, and there is no queue."""


def _minimal_module() -> Any:
    """``torch.npu`` as far as PyTorch itself needs it. The simulated ``torch_npu`` brings a full one."""
    module: Any = types.ModuleType("torch.npu")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._initialized = True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device: contextlib.nullcontext()
    module.synchronize = lambda device=None: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = module.manual_seed
    module.get_rng_state = lambda device=DEVICE: generator().get_state()
    module.set_rng_state = lambda state, device=DEVICE: generator().set_state(state)
    module.default_generators = (generator(),)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    return module
