"""A simulated Ascend device: a real ``npu`` torch device, in Python, over CPU memory.

It exists to run and test NPU training code without an NPU. Unlike CPU tensors under a false flag, npu tensors have
their own device, dispatch key, autocast state and random state, and refuse to meet CPU tensors, so that the mistakes
that hardware would show appear here too. Results are the CPU kernels', bit for bit.

Needs a PyTorch that can register a device from Python (``_setup_privateuseone_for_python_backend`` in
``torch.utils.backend_registration``); tested on torch 2.13. A process sees several devices (``visible``), although
PyTorch's guard for such a device counts one: what it is asked is answered elsewhere (``accelerator``, ``bare_device``,
``backward``).

The first backward pass of a process, even one on CPU tensors, starts autograd's thread for the device. Processes forked
after that cannot run a backward pass ("Unable to handle autograd's threading in combination with fork-based
multiprocessing"): fork first.
"""

from __future__ import annotations

import atexit
from typing import Any

import torch
from torch.utils import backend_registration

from simnpu import accelerator, backward, bare_device, dynamo, host_memory, kernels, storage
from simnpu.errors import PlatformError
from simnpu.memory import cpu_view, npu_view
from simnpu.random import generator
from simnpu.visible import DEVICE

__all__ = ["cpu_view", "generator", "npu_view", "register"]

_libraries: list[torch.library.Library] = []  # kernels live as long as their library object


def register(module: Any) -> None:
    """Make ``npu`` a device of this process. Idempotent; cannot be undone.

    Args:
        module: what becomes ``torch.npu``, unless one is registered already; :mod:`simnpu.npu` is made for it.

    Raises:
        PlatformError: this PyTorch cannot register a device from Python, or another package has taken its place.
    """
    if _libraries:
        return
    module._initialized = True  # without it torch.utils.checkpoint neither saves nor restores the random state
    _check_torch()
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch.utils.generate_methods_for_privateuse1_backend()
    if not hasattr(torch, DEVICE):
        torch._register_device_module(DEVICE, module)
    acc: Any = torch._C._acc  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs
    acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    _libraries.extend(kernels.register())
    storage.install()
    host_memory.install()
    accelerator.install()
    bare_device.install()
    backward.install()
    dynamo.install()
    atexit.register(_end_profile)


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


def _end_profile() -> None:
    """A profile still running when the process ends takes PyTorch's down with it."""
    if torch.autograd._profiler_enabled():
        torch.autograd._disable_profiler()
