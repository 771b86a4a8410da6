"""The engine's methods that verl's SFT trainer does not call, in one process: what they answer, as JSON.

    python engine_calls.py MODEL OUT.json

LoRA, entropy, a policy loss, the adapter switched off, weights streamed, checkpoint and learning rate.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from verl.utils import tensordict_utils
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.config.checkpoint import McoreCheckpointConfig
from verl.workers.engine import EngineRegistry

LENGTHS = (7, 12, 5, 9)


def batch(**more: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 250, (length,), generator=generator) for length in LENGTHS]
    nested = lambda tensors: torch.nested.as_nested_tensor(tensors, layout=torch.jagged)  # noqa: E731
    masks = [torch.tensor([0, 0] + [1] * (length - 2)) for length in LENGTHS]
    positions = [torch.arange(length) for length in LENGTHS]
    tensors = {"input_ids": nested(ids), "loss_mask": nested(masks), "position_ids": nested(positions)}
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 20, "temperature": 1.0, "pad_mode": "no_padding"}
    return tensordict_utils.get_tensordict(tensors, {**settings, **more}), ids, masks


def policy_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """-(log-probability - 0.1 * entropy), summed over trained tokens, by the global batch's tokens."""
    mask = torch.roll(data["loss_mask"].values(), -1)
    values = model_output["log_probs"].values() - 0.1 * model_output["entropy"].values()
    return -(values * mask).sum() / data["batch_num_tokens"] * data["dp_size"], {"seen": len(data)}


def main(path: str, out: str) -> None:
    initialize_global_process_group_ray()
    model = HFModelConfig(
        path=path, lora={"rank": 4, "alpha": 8, "target_modules": ["linear_qkv", "linear_fc2"], "merge": False}
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=model,
        engine_config=McoreEngineConfig(override_transformer_config={"params_dtype": "float32"}),
        optimizer_config=McoreOptimizerConfig(lr=1e-2, lr_warmup_steps=4, total_training_steps=10, weight_decay=0.0),
        checkpoint_config=McoreCheckpointConfig(),
    )
    engine.initialize()
    found: dict[str, Any] = {}
    _, ids, masks = batch(calculate_entropy=True)
    found["ids"], found["masks"] = [each.tolist() for each in ids], [each.tolist() for each in masks]

    def infer(**more: Any) -> dict[str, Any]:
        with engine.eval_mode():
            return engine.infer_batch(batch(calculate_entropy=True, **more)[0])["model_output"]

    def rows(nested: Any) -> list[list[float]]:
        return [each.tolist() for each in nested.unbind()]

    before = infer()
    found["before"] = {name: rows(value) for name, value in before.items()}
    found["rates"], found["losses"], found["norms"] = [], [], []
    for _ in range(3):
        with engine.train_mode():
            output = engine.train_batch(batch(calculate_entropy=True)[0], policy_loss)
        found["losses"].append(sum(output["loss"]))
        found["norms"].append(float(output["metrics"]["grad_norm"]))
        found["micro batches"] = len(output["loss"])
        found["seen"] = sum(output["metrics"]["seen"])
        found["rates"].append(engine.lr_scheduler_step())
    after = infer()
    found["moved"] = float((after["log_probs"].values() - before["log_probs"].values()).abs().max())
    with engine.disable_adapter():
        base = infer()
    found["base"] = float((base["log_probs"].values() - before["log_probs"].values()).abs().max())
    weights, config = engine.get_per_tensor_param(base_sync_done=False)
    found["weights"] = {name: float(tensor.double().sum()) for name, tensor in weights}
    adapter, config = engine.get_per_tensor_param(base_sync_done=True)
    found["adapter"] = {name: list(tensor.shape) for name, tensor in adapter}
    found["config"] = {name: str(value) for name, value in config.items()}
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(f"{folder}/global_step_3", global_step=3, max_ckpt_to_keep=1)
        engine.initialize()
        fresh = infer()
        found["fresh"] = float((fresh["log_probs"].values() - before["log_probs"].values()).abs().max())
        engine.load_checkpoint(f"{folder}/global_step_3")
        loaded = infer()
        found["loaded"] = float((loaded["log_probs"].values() - after["log_probs"].values()).abs().max())
        found["next rate"] = engine.lr_scheduler_step()
    found["errors"] = {}
    for name, value in {"temperature": 0.7, "calculate_sum_pi_squared": True, "enable_routing_replay": True}.items():
        try:
            infer(**{name: value})
        except ValueError as error:
            found["errors"][name] = str(error)
    engine.to("cpu")
    with open(out, "w") as file:
        json.dump(found, file)


main(*sys.argv[1:])
