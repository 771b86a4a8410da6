"""Apex's extension of this name, by Transformer Engine, for ``bench_verl.py`` where Apex is not installed.

Megatron-Core's own linear layers (here the output layer) refuse ``gradient_accumulation_fusion`` without it.
"""

import torch
from transformer_engine.pytorch.cpp_extensions import general_gemm


def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """``main_grad += grad_output.T @ inputs`` in one product: [tokens, in], [tokens, out] and [out, in] in fp32."""
    general_gemm(inputs, grad_output, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
