"""The provider that stands in for Transformer Engine, and on the CPU for ``torch.cuda``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ClassVar

from megascend import reference_te
from megascend.bootstrap.providers import PatchProvider, one_connection


class Reference(PatchProvider):
    name: ClassVar[str] = "reference"

    def before_megatron(self) -> list[str]:
        if self.setup.platform.device_type == "cuda":
            return one_connection(os.environ) + reference_te.install(force=True)
        changes = []
        # Spares megatron-core's functions a compilation for the CPU.
        if os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") == "1":
            changes.append("TORCHDYNAMO_DISABLE=1")
        from megascend.bootstrap.reference import cuda_redirect, gloo_strides, nccl_on_gloo

        changes += reference_te.install() + cuda_redirect.install()
        return changes + nccl_on_gloo.install() + gloo_strides.install()

    def when_imported(self) -> dict[str, Callable[[], list[str]]]:
        if self.setup.platform.device_type == "cuda":
            return {}
        from megascend.bootstrap.reference import cuda_redirect, gloo_uneven, training_device

        patches: dict[str, Callable[[], list[str]]] = {gloo_uneven.MAPPINGS: gloo_uneven.install}
        for module in cuda_redirect.MOE_MODULES:
            patches[module] = functools.partial(cuda_redirect.patch_moe_device_check, module)
        for module in training_device.MODULES:
            patches[module] = functools.partial(training_device.install, module)
        patches[training_device.FUSED_KERNELS] = training_device.without_fused_kernels
        return patches
