"""Import to hide packages of GPU kernels, so that transformers computes linear attention in plain torch, on any machine."""

import sys

for _package in ("fla", "causal_conv1d"):
    sys.modules[_package] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
