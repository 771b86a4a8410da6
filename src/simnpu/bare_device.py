"""``npu`` without a number: the current device, also where PyTorch asks its device guard, which knows ``npu:0`` only.

Operators are told which device was meant and resolve it themselves. Conversions are not: PyTorch fills in the number
first. The functions that convert are therefore replaced by ones that fill it in before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from simnpu.torch_functions import replace_function
from simnpu.visible import CURRENT, DEVICE

FUNCTIONS = ("tensor", "as_tensor", "asarray")
METHODS = ("to", "new_tensor")


def install() -> None:
    """Let conversions to ``npu`` go to the current device."""
    for name in FUNCTIONS:
        replace_function(name, _numbered)
    for name in METHODS:
        setattr(torch.Tensor, name, _numbered(getattr(torch.Tensor, name)))
    DeviceContext.__torch_function__ = _constructing(DeviceContext.__torch_function__)  # type: ignore[method-assign]


def with_number(device: Any) -> Any:
    """A device argument, with the current device's number if it names ``npu`` alone."""
    if (type(device) is torch.device and device.type == DEVICE and device.index is None) or device == DEVICE:
        return torch.device(DEVICE, CURRENT.index)
    return device


def _numbered(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if CURRENT.index:  # else PyTorch's answer is right
            args = tuple(with_number(arg) if type(arg) in (str, torch.device) else arg for arg in args)
            if "device" in kwargs:
                kwargs["device"] = with_number(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _constructing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``with torch.device("npu")`` and ``torch.set_default_device("npu")``."""

    @functools.wraps(function)
    def __torch_function__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if CURRENT.index and func in _device_constructors() and (kwargs or {}).get("device") is None:
            kwargs = {**(kwargs or {}), "device": with_number(self.device)}
        return function(self, func, types, args, kwargs)

    return __torch_function__
