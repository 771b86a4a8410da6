"""A tenant's steps by transformers, peft and torch's AdamW: reference_tenant.py MODEL ADAPTER NAME"""

from __future__ import annotations

import json
import sys

import torch
from peft import PeftModel
from skyrl_tenants import RATES, STEPS, sequences
from transformers import AutoModelForCausalLM


def main(path: str, adapter: str, name: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATES[name], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for ids in map(torch.tensor, sequences(name, step)):
            logprobs = model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
            total = total - logprobs.gather(1, ids[1:, None]).sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    print(json.dumps(losses))


main(*sys.argv[1:])
