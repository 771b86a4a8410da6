"""The same steps by transformers and torch's AdamW, without megascend and twinkle: reference_steps.py MODEL OUT.json"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM
from twinkle_sft import RATE, batches


def main(path: str, out: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    steps = []
    for sequences in batches():
        total, count = torch.zeros(()), 0
        for ids in map(torch.tensor, sequences):
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            total, count = total - logprobs[:-1].gather(1, ids[1:, None]).sum(), count + len(ids) - 1
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append([float(total / count), float(norm)])
    with open(out, "w") as file:
        json.dump(steps, file)


main(*sys.argv[1:])
