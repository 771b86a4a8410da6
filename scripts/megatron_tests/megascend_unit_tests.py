"""A plugin for pytest that lets Megatron-Core's own unit tests start without a GPU.

Their set-up takes the rank modulo the number of GPUs. On the CPU platform the number is 0, which is the truth; here, and only
here, it is 1.
"""

from __future__ import annotations

import os

import torch

if os.environ.get("MEGASCEND_RUN_PLATFORM") == "cpu":
    torch.cuda.device_count = lambda: 1
