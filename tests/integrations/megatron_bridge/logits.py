"""Logits of a checkpoint by megatron-bridge on one rank, for ``megascend run``: logits.py MODEL TOKENS OUT (of torch.save)."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge


def main(path: str, tokens_file: str, out: str) -> None:
    bridge = AutoBridge.from_hf_pretrained(path)
    provider = bridge.to_megatron_provider()
    provider.bf16 = False
    provider.params_dtype = torch.float32
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    tokens = torch.load(tokens_file)
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        torch.save(model.eval()(tokens, places, None), out)
    dist.destroy_process_group()


main(*sys.argv[1:])
