"""The independent reference of models with a scalar head: transformers' classifiers, torch's AdamW. Imports no megascend.

    python scalar_reference.py JOB.json RESULT.safetensors

JOB names a checkpoint of a sequence or token classifier with one label, samples (token ids, and what the loss needs) and
optimizer settings. RESULT holds losses and gradient norms of every step, the first values of every sample, and trained weights.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification


def main(job_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    with open(f"{job['checkpoint']}/config.json", encoding="utf-8") as file:
        token_level = json.load(file)["architectures"][0].endswith("ForTokenClassification")
    loader: Any = AutoModelForTokenClassification if token_level else AutoModelForSequenceClassification
    model = loader.from_pretrained(
        job["checkpoint"], dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.train()
    result: dict[str, Tensor] = {}
    with torch.no_grad():
        for index, sample in enumerate(job["samples"]):
            result[f"values.{index}"] = model(torch.tensor([sample["token_ids"]])).logits.flatten().contiguous()
    losses, norms = train(model, job)
    result |= {"losses": torch.tensor(losses), "grad_norms": torch.tensor(norms)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            result[f"weights.{name}"] = parameter.detach().contiguous()
    save_file(result, result_path)


def train(model: Any, job: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms (before clipping) of ``job["steps"]`` steps on the same samples."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": job["weight_decay"]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job["lr"], betas=(0.9, 0.999), eps=1e-8)
    losses, norms = [], []
    for _ in range(job["steps"]):
        optimizer.zero_grad()
        loss = pairs_loss(model, job) if job["loss"] == "bradley_terry" else values_loss(model, job)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, job["max_grad_norm"] or float("inf"))))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms


def pairs_loss(model: Any, job: dict[str, Any]) -> Tensor:
    """Compute the mean of -log sigmoid(chosen - rejected) of the model's score of each sequence."""
    scores: dict[Any, dict[bool, Tensor]] = {}
    for sample in job["samples"]:
        score = model(torch.tensor([sample["token_ids"]])).logits[0, -1]
        scores.setdefault(sample["pair"], {})[sample["chosen"]] = score if score.dim() == 0 else score[0]
    return torch.stack([-torch.log(torch.sigmoid(pair[True] - pair[False])) for pair in scores.values()]).mean()


def values_loss(model: Any, job: dict[str, Any]) -> Tensor:
    """Compute the weighted mean of (clipped) squared errors, halved, as in PPO's own code (baselines/ppo2/model.py)."""
    total, count = torch.zeros(()), 0.0
    for sample in job["samples"]:
        values = model(torch.tensor([sample["token_ids"]])).logits[0, :, 0]
        weights, returns = torch.tensor(sample["weights"]), torch.tensor(sample["returns"])
        errors = (values - returns) ** 2
        if job["loss"] == "clipped_value":
            old = torch.tensor(sample["old_values"])
            errors = torch.maximum(errors, (old + torch.clamp(values - old, -0.2, 0.2) - returns) ** 2)
        total = total + (weights * 0.5 * errors).sum()
        count += float(weights.sum())
    return total / count


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
