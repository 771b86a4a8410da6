"""Loss and gradients of a divergence from a teacher over the whole vocabulary, in float64 by transformers. A script:

    python taught_gradients.py CHECKPOINT TEACHER JOB.safetensors BETA RESULT.safetensors

JOB holds for each sample ``tokens.N`` [n + 1] and ``weights.N`` [n]. RESULT has ``LOSS`` and ``LOSS/parameter`` for forward_kl,
reverse_kl and jsd. Imports no megascend.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) [n] of log-probabilities [n, vocabulary]."""
    return kl_div(second, first, reduction="none", log_target=True).sum(1)


def divergence(name: str, log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    if name == "forward_kl":
        return kl(log_q, log_p)
    if name == "reverse_kl":
        return kl(log_p, log_q)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def main(checkpoint: str, teacher: str, job: str, beta: float, result: str) -> None:
    torch.set_num_threads(1)
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
        for path in (checkpoint, teacher)
    ]
    tensors, results = load_file(job), {}
    for name in ("forward_kl", "reverse_kl", "jsd"):
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for index in range(len(tensors) // 2):
            tokens, weights = tensors[f"tokens.{index}"], tensors[f"weights.{index}"]
            log_p = models[0](tokens[None, :-1]).logits[0].log_softmax(-1)
            with torch.no_grad():
                log_q = models[1](tokens[None, :-1]).logits[0].log_softmax(-1)
            total = total + (weights * divergence(name, log_q, log_p, beta)).sum()
            weight += float(weights.sum())
        models[0].zero_grad()
        loss = total / weight
        loss.backward()
        results[name] = loss.detach()
        results |= {f"{name}/{key}": value.grad for key, value in models[0].named_parameters()}
    save_file(results, result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])
