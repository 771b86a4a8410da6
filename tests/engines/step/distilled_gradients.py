"""Loss and gradients of distillation from candidates, in float64 by transformers and plain formulas. A script:

    python distilled_gradients.py CHECKPOINT JOB.safetensors BETA TEMPERATURE RESULT.safetensors

JOB holds for each sample ``tokens.N`` [n + 1], ``weights.N`` [n], ``ids.N`` and ``teacher.N`` [n, K], ``allowed.N`` [n, A]; an
unused id is -1. RESULT has ``LOSS`` and ``LOSS/parameter`` for forward_kl, reverse_kl and jsd, and for policy: -log p - 0.1
entropy of the distribution at TEMPERATURE over the allowed tokens, or over all where none is listed.

Imports no megascend. All other tokens than the candidates are one outcome, whose probability is summed over the vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM


def divergence(name: str, q: Tensor, p: Tensor, beta: float) -> Tensor:
    """Return the divergence of teacher ``q`` and student ``p`` [n, outcomes]; outcomes of probability 0 in both add nothing."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        possible = a > 0
        safe_a, safe_b = torch.where(possible, a, 1.0), torch.where(possible, b, 1.0)
        return (safe_a * (safe_a / safe_b).log()).sum(1)

    m = beta * q + (1 - beta) * p
    return {"forward_kl": kl(q, p), "reverse_kl": kl(p, q), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}[name]


def policy(logits: Tensor, targets: Tensor, allowed: Tensor) -> Tensor:
    """Return -log p - 0.1 entropy of each row of ``logits``, token by token."""
    values = []
    for row, target, ids in zip(logits, targets, allowed, strict=True):
        used = ids[ids >= 0]
        used = used if len(used) else torch.arange(len(row))
        logprobs = row[used].log_softmax(-1)
        values.append(-logprobs[used == target].sum() + 0.1 * (logprobs.exp() * logprobs).sum())
    return torch.stack(values)


def main(checkpoint: str, job: str, beta: float, temperature: float, result: str) -> None:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").double()
    tensors, results = load_file(job), {}
    for name in ("forward_kl", "reverse_kl", "jsd", "policy"):
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for index in range(len(tensors) // 5):
            tokens, weights, ids, teacher = (
                tensors[f"{part}.{index}"] for part in ("tokens", "weights", "ids", "teacher")
            )
            logits = model(tokens[None, :-1]).logits[0]
            rows = weights > 0
            weight += float(weights.sum())
            if name == "policy":
                values = policy(logits[rows] / temperature, tokens[1:][rows], tensors[f"allowed.{index}"][rows])
                total = total + (weights[rows] * values).sum()
                continue
            probabilities = logits.softmax(-1)
            used = ids >= 0
            q = torch.where(used, teacher.double().exp(), 0.0)
            p = torch.where(used, probabilities.gather(1, ids.clamp_min(0)), 0.0)
            rest = probabilities.new_ones(probabilities.shape).scatter(1, ids.clamp_min(0), (~used).to(p.dtype))
            # An unused slot points to token 0, which may be a candidate of the row, too.
            rest[(ids == 0).any(1), 0] = 0.0
            q = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
            p = torch.cat([p, (probabilities * rest).sum(1, keepdim=True)], 1)
            total = total + (weights[rows] * divergence(name, q[rows], p[rows], beta)).sum()
        model.zero_grad()
        loss = total / weight
        loss.backward()
        results[name] = loss.detach()
        results |= {f"{name}/{key}": value.grad for key, value in model.named_parameters()}
    save_file(results, result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
