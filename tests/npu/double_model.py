"""``python double_model.py JOB.json``: a tiny model on the simulated device, with MindSpeed's layers only.

A helper of ``test_double_model.py``. Without the bootstrap: the adaptor is imported with seeded arguments and nothing is
patched afterwards, so that MindSpeed's linears are in the model too. Prints JSON on the last line of stdout.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    context = int(os.environ["WORLD_SIZE"])
    seed(context, job["algorithm"])
    import_module("mindspeed.megatron_adaptor")

    import torch
    import torch_npu  # noqa: F401

    from megascend.runtime.bootstrap.stub_modules import install_missing_leaves

    install_missing_leaves()  # mcore-bridge's, unrelated to MindSpeed
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("hccl")
    model = build(job["checkpoint"], context)
    report = {
        "layers": sorted({f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()}),
        "device": next(model.parameters()).device.type,
        **train(model, job["tokens"], context),
    }
    if torch.distributed.get_rank() == 0:
        print(json.dumps(report))
    torch.distributed.destroy_process_group()


def seed(context: int, algorithm: str) -> None:
    from mindspeed import args_utils

    seeded = args_utils.get_mindspeed_args(get_defaults=True)
    seeded.use_flash_attn = True
    seeded.context_parallel_size = context
    seeded.context_parallel_algo = algorithm
    seeded.optimization_level = 2
    args_utils._MINDSPEED_ARGS = seeded


def build(checkpoint: str, context: int) -> Any:
    """Build the model of a Hugging Face checkpoint on the device and load its weights."""
    import mcore_bridge
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from transformers import AutoConfig

    parallel_state.initialize_model_parallel(context_parallel_size=context)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    arguments = mcore_bridge.hf_to_mcore_config(AutoConfig.from_pretrained(checkpoint))
    config = mcore_bridge.ModelConfig(
        **arguments, context_parallel_size=context, params_dtype=torch.float32, bias_activation_fusion=False
    )
    config.use_flash_attn = True
    (model,) = mcore_bridge.get_mcore_model(config)
    model = model.to("npu")
    config.bridge.load_weights([model], checkpoint)
    return model


def train(model: Any, tokens: list[int], context: int) -> dict[str, Any]:
    """Run a forward and backward pass; return logits of this rank's positions, loss and gradient norm over all ranks."""
    import torch
    from megatron.core import parallel_state

    rank, chunk = parallel_state.get_context_parallel_rank(), (len(tokens) - 1) // (2 * context)
    local_positions = [*range(rank * chunk, (rank + 1) * chunk)]
    if context > 1:
        last = 2 * context - 1 - rank
        local_positions += range(last * chunk, (last + 1) * chunk)
    else:
        local_positions = [*range(len(tokens) - 1)]
    positions = torch.tensor([local_positions], device="npu")
    ids = torch.tensor([tokens], device="npu")
    logits = model(ids[:, local_positions], positions, None)
    targets = ids[:, 1:][:, local_positions]
    losses = torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="sum")
    loss = losses / (len(tokens) - 1)
    loss.backward()
    group = parallel_state.get_context_parallel_group()
    squares = torch.zeros((), device="npu")
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad, group=group)
        squares += parameter.grad.float().pow(2).sum()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=group)
    return {
        "positions": local_positions,
        "logits": logits[0].detach().cpu().tolist(),
        "loss": total.item(),
        "grad_norm": squares.sqrt().item(),
    }


if __name__ == "__main__":
    main()
