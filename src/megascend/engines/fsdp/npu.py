"""What is different on NPUs beside attention: products of experts by torch_npu's grouped operator, and what there is not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from megascend.changes import patch
from megascend.config import Fsdp
from megascend.errors import ConfigError, VersionError
from megascend.kernels.npu import GroupedProduct

MODULE, FUNCTION = "transformers.integrations.moe", "_grouped_mm"


def check_settings(fsdp: Fsdp) -> None:
    """Raise ConfigError for settings that this engine does not have on NPUs."""
    if fsdp.compile:
        raise ConfigError(
            "engine fsdp: fsdp.compile is not there on NPUs: torch's inductor has no compiler for them; set compile: false"
        )


def use_grouped_operator() -> None:
    """Have transformers' grouped experts multiply with torch_npu's operator.

    torch's own product is one call an expert where a device has no kernel for it, after a wait for the groups' sizes; before
    torch 2.10 there is none at all.

    Raises:
        VersionError: this transformers has another function there.
    """
    module: Any = import_module(MODULE)
    if not hasattr(module, FUNCTION):
        raise VersionError(
            f"engine fsdp on NPUs replaces {MODULE}.{FUNCTION}, which transformers {import_module('transformers').__version__} "
            "does not have; install 5.10 to 5.23"
        )
    patch(module, FUNCTION, _grouped, "experts' products are torch_npu's grouped operator")


def _grouped(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """[n, k], [experts, k, m] and the ends of the experts' rows to [n, m]; names are transformers'."""
    rows = input.to(weight.dtype)
    if not len(rows):  # the operator takes no empty factors; the gradients are 0
        return rows @ weight[0]
    return GroupedProduct.apply(rows, weight, offs)  # type: ignore[reportReturnType]
