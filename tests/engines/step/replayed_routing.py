"""Loss and gradient norm of a transformers model whose experts are given, by formulas of its papers. A script:

    python replayed_routing.py CHECKPOINT JOB.safetensors RESULT.json

JOB holds for each sample ``tokens.N`` and ``experts.N``.

Imports no megascend. Every mixture-of-experts block is replaced by one that computes scores and weights itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

PROMPT = 3


class Block(nn.Module):
    """A mixture-of-experts block that routes by ``chosen`` [tokens, k], or by itself where that is -1."""

    def __init__(self, block: Any, config: Any) -> None:
        super().__init__()
        self.block, self.config, self.kind = block, config, config.model_type
        self.chosen: Tensor | None = None
        self.changed: list[tuple[int, int]] = []

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        states = hidden.reshape(-1, hidden.shape[-1])
        logits = states.float() @ self.block.gate.weight.float().T
        k = self.config.num_experts_per_tok
        if self.kind in ("deepseek_v3", "glm4_moe"):
            scores = logits.sigmoid()
            biased = scores + self.block.gate.e_score_correction_bias
            groups = biased.view(len(biased), self.config.n_group, -1).topk(2).values.sum(-1)
            best = groups.topk(self.config.topk_group).indices
            allowed = (
                torch.zeros_like(groups)
                .scatter(1, best, 1.0)
                .repeat_interleave(scores.shape[1] // self.config.n_group, dim=1)
            )
            indices = biased.masked_fill(allowed == 0, 0.0).topk(k).indices
        elif self.kind == "ernie4_5_moe":
            scores = logits.softmax(-1)
            indices = (scores + self.block.gate.moe_statics.e_score_correction_bias).topk(k).indices
        else:
            scores = logits.softmax(-1)
            indices = scores.topk(k).indices
        chosen = indices
        if self.chosen is not None:
            recorded = self.chosen[:, :1] >= 0
            differs = (indices.sort(-1).values != self.chosen.sort(-1).values).any(-1, keepdim=True)
            self.changed.append((int((differs & recorded).sum()), int(recorded.sum())))
            chosen = torch.where(recorded, self.chosen, indices)
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * getattr(self.config, "routed_scaling_factor", 1.0)
        output = self.block.experts(states, chosen, weights)
        shared = getattr(self.block, "shared_experts", None)
        if shared is not None:
            output = output + shared(states)
        return output.view_as(hidden)


def main(checkpoint: str, job: str, result: str) -> None:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).train()
    blocks = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp = blocks[number] = Block(layer.mlp, model.config)
    tensors = load_file(job)

    def loss(replay: bool) -> Tensor:
        total, count = torch.zeros(()), 0
        for index in range(len(tensors) // 2):
            row = tensors[f"tokens.{index}"]
            for number, block in blocks.items():
                block.chosen = tensors[f"experts.{index}"][:, number] if replay else None
            logprobs = model(row[None, :-1]).logits[0].float().log_softmax(-1).gather(1, row[1:, None])[:, 0]
            weights = (torch.arange(1, len(row)) >= PROMPT).float()
            total, count = total - (weights * logprobs).sum(), count + int(weights.sum())
        return total / count

    with torch.no_grad():
        plain = float(loss(replay=False))
    value = loss(replay=True)
    value.backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    changed = [pair for block in blocks.values() for pair in block.changed]
    share = sum(a for a, _ in changed) / sum(b for _, b in changed)
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"loss": float(value.detach()), "grad_norm": norm, "plain_loss": plain, "changed": share}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
