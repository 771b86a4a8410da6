"""Logits and gradients of the real megatron-core model on the reference layers, against Hugging Face's own model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megascend.testing import write_tiny_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda is real here"),
]

VOCABULARY, SAMPLES, LENGTH = 320, 2, 24
TOKENS = f"torch.arange({SAMPLES * LENGTH}).reshape({SAMPLES}, {LENGTH}) * 7 % 311 + 1"  # never the padding token 0

# In a process of its own: mcore-bridge changes transformers' rotary embeddings for all models built later.
HUGGING_FACE = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float().eval()
logits = model({TOKENS}).logits
logits.logsumexp(-1).sum().backward()
gradients = (model.model.embed_tokens.weight.grad, model.model.layers[0].self_attn.o_proj.weight.grad)
torch.save((logits.detach(), *gradients), sys.argv[2])
"""

MEGATRON = f"""
import sys, torch
import torch.distributed as dist
from megascend.reference import te as reference_te
from megascend.runtime.bootstrap.stub_modules import install_missing_leaves
from megascend.runtime.bootstrap.reference import cuda_redirect
reference_te.install()
cuda_redirect.install()
install_missing_leaves()
from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoConfig
cuda_redirect.patch_moe_device_checks()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
fusions = ("gradient_accumulation", "masked_softmax", "bias_dropout", "apply_rope", "moe_permute")
config = ModelConfig(
    **hf_to_mcore_config(AutoConfig.from_pretrained(sys.argv[1])),
    params_dtype=torch.float32,
    bf16=False,
    moe_token_dispatcher_type="alltoall",
    **{{f"{{name}}_fusion": False for name in fusions}},
)
models = get_mcore_model(config)
config.bridge.load_weights(models, sys.argv[1])
model = models[0].eval()
tokens = {TOKENS}
positions = torch.arange({LENGTH}).expand({SAMPLES}, {LENGTH})
padded = model(input_ids=tokens, position_ids=positions, attention_mask=None)
ends = torch.arange(0, {SAMPLES * LENGTH + 1}, {LENGTH}, dtype=torch.int32)
packing = PackedSeqParams("thd", ends, ends, max_seqlen_q={LENGTH}, max_seqlen_kv={LENGTH})
packed = model(
    input_ids=tokens.reshape(1, -1),
    position_ids=positions.reshape(1, -1),
    attention_mask=None,
    packed_seq_params=packing,
)
padded, packed = (x.reshape({SAMPLES}, {LENGTH}, -1)[..., :{VOCABULARY}] for x in (padded, packed))
packed.logsumexp(-1).sum().backward()
embedding = model.embedding.word_embeddings.weight.grad[:{VOCABULARY}]
projection = model.decoder.layers[0].self_attention.linear_proj.weight.grad
torch.save((padded.detach(), packed.detach(), embedding, projection), sys.argv[2])
"""


def run(code: str, checkpoint: Path, result: Path) -> tuple[torch.Tensor, ...]:
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, str(checkpoint), str(result)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert completed.returncode == 0, completed.stderr
    return torch.load(result)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "qwen3_moe"])
def test_logits_and_gradients(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "model", arch)
    logits, embedding, projection = run(HUGGING_FACE, checkpoint, tmp_path / "hf.pt")
    padded, packed, *gradients = run(MEGATRON, checkpoint, tmp_path / "megatron.pt")
    torch.testing.assert_close(padded, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients[0], embedding, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(gradients[1], projection, rtol=1e-5, atol=2e-5)
