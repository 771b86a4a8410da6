"""Train every step with Hugging Face and torch AdamW from the weights that an engine had before it. Run as a script.

    python hf_steps.py JOB.json RESULT.safetensors

JOB is one of ``hf_reference.py``, with ``at``: a file with the engine's weights before each step and after the last,
``STEP.NAME``. RESULT: ``losses``, ``grad_norms``, and ``weights``: the distance of the engine's weights after each step from
AdamW's update of the weights before it with all gradients until then, as the largest Euclidean norm of a difference relative to
the weight's. Numbers whose gradients have always been about 0 (:data:`ABOUT_ZERO`) are excluded: Adam divides by their size, so
that rounding decides a part of their update, up to the full learning rate.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ABOUT_ZERO = 1e-5
"""Root mean square of a number's clipped gradients. Their rounding is about 1e-9, and half of them are above 5e-4."""
BETA_2 = 0.999


def main(job_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    with open(job_path) as file:
        job = json.load(file)
    spec = importlib.util.spec_from_file_location("hf_reference", job["hf_reference"])
    assert spec is not None
    assert spec.loader is not None
    hf_reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hf_reference)
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["checkpoint"], dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.train()
    step_weights, differences, optimizers = load_file(job["at"]), [], []

    def before(step: int, optimizer: torch.optim.Optimizer) -> None:
        """Load the engine's weights before its step of this number; return their distance from this model's."""
        optimizers[:] = [optimizer]
        with torch.no_grad():
            distances, counts = [], [(1, 1)]
            for name, parameter in model.named_parameters():
                value = weight(step_weights, f"{step}.{name}", len(parameter))
                difference = parameter - value
                if step:
                    size = (optimizer.state[parameter]["exp_avg_sq"] / (1 - BETA_2**step)).sqrt()
                    compared = (size == 0) | (size > ABOUT_ZERO)
                    counts.append((int(compared.sum()), compared.numel()))
                    difference = difference[compared]
                distances.append(float(difference.norm() / value.norm()))
                parameter.copy_(value)
        compared_count, numbers = (sum(column) for column in zip(*counts, strict=True))
        assert compared_count > 0.95 * numbers, f"step {step}: {compared_count} of {numbers} gradients are not about 0"
        differences.append(max(distances))

    losses, norms = hf_reference.train(model, job["samples"], job, before)
    before(job["steps"], *optimizers)
    result = {"losses": losses, "grad_norms": norms, "weights": differences[1:]}
    save_file({name: torch.tensor(values) for name, values in result.items()}, result_path)


def weight(at: dict[str, torch.Tensor], name: str, experts: int) -> torch.Tensor:
    """Return a parameter by transformers' own name, with experts stacked."""
    if name in at:
        return at[name]
    prefix, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return torch.stack([torch.cat([at[f"{prefix}.{e}.{part}.weight"] for part in parts]) for e in range(experts)])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
