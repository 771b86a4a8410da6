"""Faults in a real vLLM's workers, as a vLLM plug-in. The file that ``WEIGHTWIRE_FAULT`` names lists the active faults.

``load``: a commit fails after five tensors; ``load:1``: only in the second worker. ``restore``: restoring the old weights fails.
``slow``: a commit takes two seconds longer. ``exchange``: an exchange in place stops in its third group of tensors;
``exchange:1``: only in the second worker. ``undo``: undoing an exchange fails. ``apart``: new kernels of experts in fp8 blocks
have a tensor that is none of the layer's parameters.

With ``WEIGHTWIRE_PLAIN_LINEAR=1`` linear layers on the CPU compute with the weights as they are loaded, as on GPUs; vLLM's own
layers repack them for oneDNN. With ``WEIGHTWIRE_PLAIN_FP8=1`` layers and experts with weights in fp8 blocks compute with the
dequantised weights on any CPU; vLLM's own kernels need AMX. ``WEIGHTWIRE_SCRATCH_BYTES`` sets the size of an exchange's groups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def active_faults() -> set[str]:
    """Return the faults that are active now."""
    path = Path(os.environ.get("WEIGHTWIRE_FAULT", "/nonexistent"))
    return set(path.read_text().split()) if path.exists() else set()


def failing(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield tensors until the fault raises."""
    import torch.distributed as dist

    names = {"load", f"load:{dist.get_rank()}"}
    for index, tensor in enumerate(tensors):
        if index == 5 and names & active_faults():
            raise RuntimeError("the fault of a test: no sixth tensor")
        yield tensor


def register() -> None:
    """Install the faults, once per process."""
    from weightwire.vllm import exchange, in_place, model, updates

    load, restore = updates.load, model.Snapshot.restore
    if getattr(load, "faulty", False):
        return

    def faulty_load(module: Any, config: Any, tensors: Iterable[tuple[str, Any]]) -> None:
        if "slow" in active_faults():
            time.sleep(2)
        load(module, config, failing(tensors))

    def faulty_restore(self: model.Snapshot) -> None:
        if "restore" in active_faults():
            raise RuntimeError("the fault of a test: no way back")
        restore(self)

    copy, swap, undo = exchange._CopyGroup.exchange, exchange._KernelGroup.exchange, exchange.Exchange.undo
    groups = {"count": 0}

    def faulty_run(self: exchange.Exchange, staging: Any, run: Any = exchange.Exchange.run) -> None:
        if "slow" in active_faults():
            time.sleep(2)
        groups["count"] = 0
        run(self, staging)

    def is_third() -> bool:
        import torch.distributed as dist

        groups["count"] += 1
        return groups["count"] == 3 and bool({"exchange", f"exchange:{dist.get_rank()}"} & active_faults())

    def faulty_swap(self: exchange._KernelGroup) -> None:
        if is_third():
            self._exchanged = 0
            raise RuntimeError("the fault of a test: no third group")
        swap(self)

    def faulty_copy(self: exchange._CopyGroup) -> None:
        import torch

        if is_third():
            torch._foreach_copy_(self._scratch, self.targets)
            self._steps = 1
            torch._foreach_zero_(self.targets)  # half of it
            raise RuntimeError("the fault of a test: no third group")
        copy(self)

    def faulty_undo(self: exchange.Exchange) -> None:
        if "undo" in active_faults():
            raise RuntimeError("the fault of a test: no way back")
        undo(self)

    exchange.Exchange.run, exchange.Exchange.undo = faulty_run, faulty_undo  # type: ignore[method-assign]
    exchange._CopyGroup.exchange, exchange._KernelGroup.exchange = faulty_copy, faulty_swap  # type: ignore[method-assign]
    if size := os.environ.get("WEIGHTWIRE_SCRATCH_BYTES"):
        in_place.SEPARATE_BYTES = exchange.SCRATCH_BYTES = exchange.SWAP_BYTES = int(size)
    if os.environ.get("WEIGHTWIRE_PLAIN_LINEAR") == "1":
        from vllm.model_executor.layers import utils

        def plain(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = torch_linear()

        utils.dispatch_cpu_unquantized_gemm = plain
    if os.environ.get("WEIGHTWIRE_PLAIN_FP8") == "1":
        import torch
        from vllm.model_executor.kernels import linear
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config
        from vllm.platforms import PlatformEnum

        linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, plain_fp8_kernel())
        dtypes = Fp8Config.get_supported_act_dtypes()
        # So that log-probabilities can be compared to 1e-5.
        Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [*dtypes, torch.float32])
        plain_fp8_experts()
    faulty_load.faulty = True  # type: ignore[attr-defined]
    updates.load, model.Snapshot.restore = faulty_load, faulty_restore  # type: ignore[method-assign]


def torch_linear() -> Any:
    """Return torch's own product with a weight."""
    import torch

    return torch.nn.functional.linear


def plain_fp8_kernel() -> Any:
    """Return a kernel of vLLM's for weights in fp8 blocks, in plain torch; its base class prepares weights as on GPUs."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel

    class PlainFp8Kernel(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            rows, columns = self.weight_group_shape
            scales = Bs.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: B.shape[0], : B.shape[1]]
            return torch.nn.functional.linear(A, (B.float() * scales).to(A.dtype))

    return PlainFp8Kernel


def plain_fp8_experts() -> None:
    """Make experts in fp8 blocks compute in plain torch with the layout of vLLM's Triton kernel: weights as they are loaded."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8

    class PlainFp8Experts(CPUExpertsFp8):
        def __init__(self, moe_config: Any, quant_config: Any) -> None:
            super().__init__(moe_config, quant_config)
            if "apart" in active_faults():
                self.derived = quant_config.w1_scale + 1.0

        def apply(
            self,
            output: Any,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            rows, columns = self.quant_config.block_shape
            first, second = (
                (
                    weights.float()
                    * scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[
                        :, : weights.shape[1], : weights.shape[2]
                    ]
                ).to(output.dtype)
                for weights, scales in ((w1, self.w1_scale), (w2, self.w2_scale))
            )
            output.zero_()
            for token, (experts, shares) in enumerate(zip(topk_ids.tolist(), topk_weights, strict=True)):
                for expert, share in zip(experts, shares, strict=True):
                    gate, up = (first[expert] @ hidden_states[token]).chunk(2)
                    output[token] += share * (second[expert] @ (torch.nn.functional.silu(gate) * up))

    fp8.select_fp8_moe_backend = lambda *args, **kwargs: (Fp8MoeBackend.TRITON, PlainFp8Experts)
