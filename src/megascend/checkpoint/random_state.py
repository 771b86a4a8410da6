"""The random generators of a rank: Python's, NumPy's, torch's, the device's, and Megatron's tracker of several."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """Where every generator of this process stands."""
    from megatron.core import tensor_parallel  # here: a program may import megascend before the bootstrap

    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),  # type: ignore[reportOptionalMemberAccess]
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set every generator to where it stood."""
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])  # type: ignore[reportOptionalMemberAccess]
