"""transformers' mixture of experts by grouped products on the simulated device, against the same model on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megascend.testing.distributed import run_distributed
from simnpu import device
from simnpu import npu as torch_npu_module

pytestmark = pytest.mark.skipif(os.environ.get("SIMNPU") != "1", reason="registers a device: set SIMNPU=1")


def test_grouped_experts_give_the_cpus_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMNPU_DEVICES", "2")
    device.register(torch_npu_module)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip

    def body() -> Any:
        model = Qwen3MoeForCausalLM(config)
        model.set_experts_implementation("grouped_mm")
        tokens = torch.arange(24).view(2, 12)
        results = {}
        for target_device in ("cpu", "npu:1"):
            model.to(target_device).zero_grad()
            loss = model(input_ids=tokens.to(target_device), labels=tokens.to(target_device)).loss
            loss.backward()
            gradients = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
            results[target_device] = (loss.item(), gradients)
        return results

    results = run_distributed(body, 1, init=False, timeout_s=120)[0]
    (loss, gradients), (expected_loss, expected) = results["npu:1"], results["cpu"]
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
