"""The steps of docs/integrations/megatron.md by transformers and torch's AdamW: reference_loop.py MODEL OUT."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main(path: str, out: str, batch: int = 4, length: int = 16, steps: int = 5, rate: float = 1e-3) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    history = []
    for step in range(steps):
        tokens = torch.randint(0, 200, (batch, length + 1), generator=torch.Generator().manual_seed(step))
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append([loss.item(), norm.item()])
    model.save_pretrained(out)
    print(json.dumps(history))


main(*sys.argv[1:])
