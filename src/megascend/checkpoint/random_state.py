"""The random generators of a rank: Python's, NumPy's, torch's, the device's, and those of the engine's own."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from megascend.engines.base import Engine


def random_state(engine: Engine) -> dict[str, Any]:
    """Where every generator of this process stands."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": None if engine.device.type == "cpu" else torch.get_device_module(engine.device).get_rng_state(),
        "tracker": engine.random_streams(),
    }


def set_random_state(engine: Engine, state: dict[str, Any]) -> None:
    """Set every generator to where it stood."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if engine.device.type != "cpu":
        torch.get_device_module(engine.device).set_rng_state(state["device"])
    engine.restore_random_streams(state["tracker"])
