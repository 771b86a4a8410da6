"""Computations written out here because they need less memory or time than their parts: plain PyTorch, Triton on CUDA."""
