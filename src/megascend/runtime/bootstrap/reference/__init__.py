"""Provider for Megatron-Core without accelerators: the reference Transformer Engine, and patches for the CPU.

On CUDA it is used on request (``provider="reference"`` or ``MEGASCEND_REFERENCE_TE=1``), with torch.cuda unchanged.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ClassVar

from megascend.reference import fla as reference_fla
from megascend.reference import te as reference_te
from megascend.runtime.bootstrap.patches import CLIPPING, patch_gradient_clipping
from megascend.runtime.bootstrap.providers import PatchProvider, one_connection


class Reference(PatchProvider):
    name: ClassVar[str] = "reference"

    def before_megatron(self) -> list[str]:
        if self.setup.platform.device_type == "cuda":
            return one_connection(os.environ) + reference_te.install(force=True) + reference_fla.install()
        changes = []
        # Avoids the compilation of megatron-core's functions for the CPU.
        if os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") == "1":
            changes.append("TORCHDYNAMO_DISABLE=1")
        from megascend.runtime.bootstrap.reference import cuda_redirect, gloo

        return changes + reference_te.install() + cuda_redirect.install() + gloo.install()

    def when_imported(self) -> dict[str, Callable[[], list[str]]]:
        patches: dict[str, Callable[[], list[str]]] = {CLIPPING: patch_gradient_clipping}
        if self.setup.platform.device_type == "cuda":
            return patches
        from megascend.runtime.bootstrap.reference import cuda_redirect, gloo, training_device

        patches[gloo.MAPPINGS] = gloo.add_uneven_splits
        for module in cuda_redirect.MOE_MODULES:
            patches[module] = functools.partial(cuda_redirect.patch_moe_device_check, module)
        for module in training_device.MODULES:
            patches[module] = functools.partial(training_device.install, module)
        patches[training_device.FUSED_KERNELS] = training_device.without_fused_kernels
        return patches
