"""Reference losses and gradient norms of verl's SFT batches with plain transformers and torch's AdamW.

    python reference_sft.py MODEL TRAIN.parquet VALIDATION.parquet EPOCHS BATCH LR OUT.json

Nothing of megascend is imported. The batches are verl's: its dataset, and torch's sampler as verl's trainer makes it.
"""

from __future__ import annotations

import json
import sys

import torch
from omegaconf import OmegaConf
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset


def loss_of(model, rows) -> torch.Tensor:
    """Average over all trained tokens of the batch; the first token of a sequence is never predicted."""
    total, count = torch.zeros(()), 0
    for row in rows:
        ids, mask = row["input_ids"], row["loss_mask"].float()
        logprobs = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        token_logprobs = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        total, count = total - (token_logprobs * mask[1:]).sum(), count + int(mask.sum())
    return total / count


def main(path: str, train: str, validation: str, epochs: str, batch: str, lr: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 1024, "truncation": "error"})
    data = MultiTurnSFTDataset(train, tokenizer, config)
    held_out = MultiTurnSFTDataset(validation, tokenizer, config)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(lr), weight_decay=0.0)
    sampler = DistributedSampler(data, shuffle=True, num_replicas=1, rank=0, drop_last=True)
    steps = []
    for epoch in range(int(epochs)):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, len(order), int(batch)):
            loss = loss_of(model, [data[index] for index in order[start : start + int(batch)]])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps.append([loss.item(), norm.item()])
    with torch.no_grad():
        last = loss_of(model, [held_out[index] for index in range(len(held_out))]).item()
    with open(out, "w") as file:
        json.dump({"steps": steps, "validation": last}, file)


main(*sys.argv[1:])
