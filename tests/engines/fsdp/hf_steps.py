"""What Hugging Face and torch AdamW make of every step from the weights that an engine had before it. Run as a script.

    python hf_steps.py JOB.json RESULT.safetensors

JOB is one of ``hf_reference.py``, with ``at``: a file with the engine's weights before each step and after the last,
``STEP.NAME``. RESULT: ``losses``, ``grad_norms``, and ``weights``, how far the engine's weights after each step are from
those that AdamW makes of the weights before it and of all gradients until then: the largest Euclidean norm of a difference
over the weight's, without the numbers whose gradient has always been about 0 (:data:`ABOUT_ZERO`): Adam divides by its size, so
that rounding decides a part of their step, which may be all of the learning rate.
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
    at, apart, optimizers = load_file(job["at"]), [], []

    def before(step: int, optimizer: torch.optim.Optimizer) -> None:
        """Take the engine's weights, before its step of this number; say how far they are from this model's."""
        optimizers[:] = [optimizer]
        with torch.no_grad():
            distances, counts = [], [(1, 1)]
            for name, parameter in model.named_parameters():
                value = weight(at, f"{step}.{name}", len(parameter))
                difference = parameter - value
                if step:
                    size = (optimizer.state[parameter]["exp_avg_sq"] / (1 - BETA_2**step)).sqrt()
                    compared = (size == 0) | (size > ABOUT_ZERO)
                    counts.append((int(compared.sum()), compared.numel()))
                    difference = difference[compared]
                distances.append(float(difference.norm() / value.norm()))
                parameter.copy_(value)
        compared_of_all, numbers = (sum(each) for each in zip(*counts, strict=True))
        assert compared_of_all > 0.95 * numbers, (
            f"step {step}: {compared_of_all} of {numbers} gradients are not about 0"
        )
        apart.append(max(distances))

    losses, norms = hf_reference.train(model, job["samples"], job, before)
    before(job["steps"], *optimizers)
    result = {"losses": losses, "grad_norms": norms, "weights": apart[1:]}
    save_file({name: torch.tensor(values) for name, values in result.items()}, result_path)


def weight(at: dict[str, torch.Tensor], name: str, experts: int) -> torch.Tensor:
    """By transformers' own name, experts put together."""
    if name in at:
        return at[name]
    prefix, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return torch.stack([torch.cat([at[f"{prefix}.{e}.{part}.weight"] for part in parts]) for e in range(experts)])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
