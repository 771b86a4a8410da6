"""Steps of an engine held against Hugging Face's, each from the weights that the engine had before it.

Mixtures of experts amplify rounding: Adam makes up to the learning rate of a gradient that is about 0, probabilities of routers
move by 1e-4, and a choice that is nearly a tie goes the other way, at a step that depends on the processor. Two right
trajectories have nothing in common then; their steps have.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from megascend.testing import parity
from megascend.testing.reference import run_reference

HF_STEPS = Path(__file__).with_name("hf_steps.py")

STEP_WEIGHTS = 5e-6
"""Bound for weights after one step. Rounding is 2e-7; a step without weight decay would be off by 5e-5."""


def apart_by_step(
    losses: list[float], norms: list[float], weights: list[dict[str, Tensor]], checkpoint: Path, folder: Path
) -> tuple[float, float, float]:
    """Return the differences of losses, norms and weights of each step from Hugging Face's with torch AdamW.

    The reference has the engine's weights before each step, and its own moments from the first step on.

    Args:
        weights: before each step and after the last one, by the names of a checkpoint.
        folder: for files.
    """
    weights_file, job, result = folder / "at", folder / "by-step.json", folder / "by-step"
    tensors = {f"{n}.{name}": part for n, step_weights in enumerate(weights) for name, part in step_weights.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights_file)
    settings = {"lr": parity.LR, "weight_decay": parity.WEIGHT_DECAY, "max_grad_norm": parity.MAX_GRAD_NORM}
    samples = [{"token_ids": ids, "prompt_length": parity.PROMPT} for ids in parity.token_lists()]
    script = Path(parity.__file__).with_name("hf_reference.py")
    files = {"checkpoint": str(checkpoint), "at": str(weights_file), "hf_reference": str(script)}
    run = {"samples": samples, "loss": "cross_entropy", "aux_loss": 0.0, "steps": len(losses)}
    job.write_text(json.dumps(settings | files | run))
    completed = run_reference(HF_STEPS, job, result)
    assert completed.returncode == 0, completed.stderr[-4000:]
    expected = {name: values.tolist() for name, values in load_file(result).items()}
    loss, norm = (
        max(abs(a - b) for a, b in zip(actual, expected[name], strict=True))
        for actual, name in ((losses, "losses"), (norms, "grad_norms"))
    )
    return loss, norm, max(expected["weights"])
