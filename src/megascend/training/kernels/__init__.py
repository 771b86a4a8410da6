"""Fused computations that need less memory or time than their parts: plain PyTorch, and Triton on CUDA."""
