"""The independent reference of optimizers: Hugging Face's model in float64, torch's AdamW, and Muon written out. Run as a script.

    python plain_optimizers.py JOB.json RESULT.safetensors

JOB is one of ``hf_reference.py``, with its path as ``hf_reference``, ``groups`` (``match``, ``lr_scale``, ``weight_decay``) and
``muon`` (``momentum``, ``nesterov``, ``scale``) or None. RESULT: ``losses``, ``grad_norms`` and ``weights.NAME`` after all steps.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from fnmatch import fnmatchcase
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM


def main(job_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    spec = importlib.util.spec_from_file_location("hf_reference", job["hf_reference"])
    assert spec is not None
    assert spec.loader is not None
    hf_reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hf_reference)
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["checkpoint"],
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    model.train()
    parameters = dict(model.named_parameters())
    muon = {name for name, parameter in parameters.items() if job["muon"] and is_hidden(name, parameter)}
    options = {name: group_of(name, job) for name in parameters}
    adamw = torch.optim.AdamW(
        [
            {
                "params": [parameters[name]],
                "lr": job["lr"] * scale,
                "weight_decay": decay if parameters[name].dim() > 1 else 0.0,
            }
            for name, (scale, decay) in options.items()
            if name not in muon
        ]
    )
    momentum = {name: torch.zeros_like(parameters[name]) for name in muon}
    losses, norms = [], []
    for _ in range(job["steps"]):
        model.zero_grad()
        with hf_reference.InDouble():
            loss = hf_reference.batch_loss(model, job["samples"], "cross_entropy", "mean")
            loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), job["max_grad_norm"])))
        losses.append(float(loss.detach()))
        adamw.step()
        with torch.no_grad():
            for name in muon:
                muon_step(
                    parameters[name], momentum[name], job["lr"] * options[name][0], options[name][1], job["muon"], name
                )
    weights = hf_reference.by_checkpoint_names(model, parameters)
    result = {"losses": torch.tensor(losses), "grad_norms": torch.tensor(norms)}
    save_file(result | {f"weights.{name}": tensor for name, tensor in weights.items()}, result_path)


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Check whether Muon trains a parameter: a matrix of a layer, no router."""
    return ".layers." in name and parameter.dim() > 1 and not name.endswith("mlp.gate.weight")


def group_of(name: str, job: dict[str, Any]) -> tuple[float, float]:
    """Return the factor of the learning rate, and the weight decay, of a parameter."""
    for group in job["groups"]:
        if fnmatchcase(name, group["match"]):
            decay = group.get("weight_decay")
            return group.get("lr_scale", 1.0), job["weight_decay"] if decay is None else decay
    return 1.0, job["weight_decay"]


def muon_step(parameter: Tensor, momentum: Tensor, lr: float, decay: float, options: dict[str, Any], name: str) -> None:
    """Update a parameter in place: each matrix in it by itself, experts and the halves of gate and up."""
    assert parameter.grad is not None
    momentum.mul_(options["momentum"]).add_(parameter.grad)
    direction = parameter.grad + options["momentum"] * momentum if options["nesterov"] else momentum
    parameter.mul_(1 - lr * decay)
    for expert in range(len(parameter) if parameter.dim() == 3 else 1):
        values, update = (parameter[expert], direction[expert]) if parameter.dim() == 3 else (parameter, direction)
        halves = 2 if "gate_up_proj" in name else 1
        for matrix, part in zip(values.chunk(halves), update.chunk(halves), strict=True):
            rows, columns = matrix.shape
            scale = math.sqrt(max(1, rows / columns))
            if options["scale"] == "match_rms_adamw":
                scale = 0.2 * math.sqrt(max(rows, columns))
            matrix.sub_(lr * scale * newton_schulz(part))


def newton_schulz(matrix: Tensor) -> Tensor:
    """Apply the quintic five times to the singular values, which are computed: they are what the iteration maps."""
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    values = singular / (singular.norm() + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


if __name__ == "__main__":
    main(*sys.argv[1:])
