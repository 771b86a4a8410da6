"""Detection, on a CPU, of places where the host would wait for a device.

A program that never reads a device value runs ahead of the device. On a GPU ``torch.cuda.set_sync_debug_mode`` reports reads;
on a CPU nothing waits. So some tensors are treated as device tensors: results of
:func:`~megascend.training.kernels.host_copy.to_device` or ``Tensor.to(device)``, tensors created with ``device=`` a torch.device,
and all tensors computed from them.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from megascend.training.kernels import host_copy

READS = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "_unique2"))
"""Operators whose result, or the size of it, the host reads."""
MAKERS = ("arange", "as_tensor", "empty", "full", "ones", "tensor", "zeros")
FROM_HOST = ("as_tensor", "tensor")
"""The subset of ``MAKERS`` that copies from pageable memory."""

PASSED_OVER = ("/torch/", "/tensordict/", "/contextlib.py")
"""Frames in these paths are skipped when a wait is located."""


class HostWaits(TorchDispatchMode):
    """Context that counts reads of device tensors and copies from pageable memory: the host waits for both.

    Not detected: ``.to("cpu")`` of a device tensor (use ``.cpu()``), and whatever reads memory from C++.

    Attributes:
        found: number of waits by ``operation at FILE:LINE``, the innermost line outside torch and tensordict.

    Args:
        ignored: suffixes of file paths whose waits occur only on a CPU.
    """

    def __init__(self, ignored: Iterable[str] = ()) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._ignored = tuple(ignored)
        self._storages: dict[int, weakref.ref] = {}
        self._undo: list[Callable[[], None]] = []

    @property
    def count(self) -> int:
        return self.found.total()

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Treat these as device tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))

    def __enter__(self) -> HostWaits:
        self._patch_methods()
        self._patch_makers()
        self._patch_copies()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._undo:
            self._undo.pop()()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # nested tensor: its operations on plain tensors are dispatched here too
        name = func.overloadpacket.__name__
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        on_device = [value for value in tensors if self._holds(value)]
        if name == "copy_" and len(on_device) < 2 and on_device and not kwargs.get("non_blocking"):
            self._wait("copy_")
        elif name in READS and on_device:
            self._wait(name)
        elif name in ("index", "index_put_", "index_put") and self._holds(args[0]):
            indices = [value for value in args[1] if value is not None]
            if any(value.dtype in (torch.bool, torch.uint8) for value in indices):
                self._wait(f"{name} by a mask")
            elif any(not self._holds(value) and value.dim() for value in indices):
                self._wait(f"{name} by indices of the host")
        elif name == "repeat_interleave" and on_device and kwargs.get("output_size") is None:
            self._wait(name)
        result = func(*args, **kwargs)
        if on_device and not (name == "copy_" and args[0] not in on_device):
            self.mark(value for value in tree_iter(result) if isinstance(value, Tensor))
            if name.endswith("_"):
                self.mark(value for value in tree_iter(args[0]) if isinstance(value, Tensor))
        return result

    def _holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def _wait(self, operation: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            if frame.filename != __file__ and not any(part in frame.filename for part in PASSED_OVER):
                break
        if not frame.filename.endswith(self._ignored or ("\0",)):
            self.found[f"{operation} at {'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}"] += 1

    # --- calls that dispatch no operator on a CPU ---

    def watch(self, owner: Any, name: str) -> None:
        """Count every call of ``owner.name``, which copies to or from the device, within the context."""

        def make(before: Any) -> Any:
            def function(*args: Any, **kwargs: Any) -> Any:
                self._wait(name)
                return before(*args, **kwargs)

            return function

        self._replace(owner, name, make)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before, has_own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, make(before))
        self._undo.append(lambda: setattr(owner, name, before) if has_own else delattr(owner, name))

    def _patch_methods(self) -> None:
        def read(name: str) -> Callable[[Any], Any]:
            def make(before: Any) -> Any:
                def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                    if type(tensor) not in (Tensor, torch.nn.Parameter) or not self._holds(tensor):
                        return before(tensor, *args, **kwargs)
                    self._wait(name)
                    return before(tensor.detach().clone() if name == "cpu" else tensor, *args, **kwargs)

                return method

            return make

        def to(before: Any) -> Any:
            def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                result = before(tensor, *args, **kwargs)
                arguments = (*args, kwargs.get("device"))
                device = next((value for value in arguments if isinstance(value, torch.device)), None)
                if device is None or type(tensor) is not Tensor or self._holds(tensor):
                    return result
                if not kwargs.get("non_blocking"):
                    self._wait("to(device)")
                result = result.clone() if result is tensor else result
                self.mark([result])
                return result

            return method

        for name in ("tolist", "numpy", "cpu"):
            self._replace(Tensor, name, read(name))
        self._replace(Tensor, "to", to)

    def _patch_makers(self) -> None:
        def maker(name: str) -> Callable[[Any], Any]:
            def make(before: Any) -> Any:
                def function(*args: Any, **kwargs: Any) -> Any:
                    result = before(*args, **kwargs)
                    values = sys._getframe(1).f_locals.get(
                        "values"
                    )  # of a nested tensor, which is created on their device
                    nested = sys._getframe(1).f_code.co_name == "jagged_from_list"
                    on_host = nested and isinstance(values, Tensor) and not self._holds(values)
                    if isinstance(kwargs.get("device"), torch.device) and not on_host and not self._holds(result):
                        if name in FROM_HOST:
                            self._wait(f"{name}(device=)")
                        self.mark([result])
                    return result

                return function

            return make

        for name in MAKERS:
            self._replace(torch, name, maker(name))

    def _patch_copies(self) -> None:
        """Patch ``host_copy``: copies to the device never wait; copies from it wait if read before any other wait."""
        original = host_copy.to_device

        def to_device(values: Tensor, device: torch.device) -> Tensor:
            copy = values.detach().clone()
            self.mark([copy])
            return copy

        for module in list(sys.modules.values()):
            if vars(module).get("to_device") is original:
                self._replace(module, "to_device", lambda _: to_device)

        waits_at_start: weakref.WeakKeyDictionary[host_copy.HostCopy, int] = (
            weakref.WeakKeyDictionary()
        )  # how many waits there had been

        def start(before: Any) -> Any:
            def method(copy: host_copy.HostCopy, values: Tensor) -> None:
                if self._holds(values):
                    waits_at_start[copy] = self.count
                with _disable_current_modes():
                    before(copy, values.detach().clone())  # unknown to this mode: it is on the host

            return method

        def read(before: Any) -> Any:
            def method(copy: host_copy.HostCopy) -> Tensor:
                if waits_at_start.pop(copy, None) == self.count:
                    self._wait("HostCopy.read")
                return before(copy)

            return method

        self._replace(host_copy.HostCopy, "__init__", start)
        self._replace(host_copy.HostCopy, "read", read)
