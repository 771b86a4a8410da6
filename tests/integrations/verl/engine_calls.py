"""Calls, in one process, of the engine methods that verl's SFT trainer does not use; writes their results as JSON.

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
    """Compute -(log-probability - 0.1 * entropy), summed over trained tokens, by the global batch's tokens."""
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
    report: dict[str, Any] = {}
    _, ids, masks = batch(calculate_entropy=True)
    report["ids"], report["masks"] = [row.tolist() for row in ids], [row.tolist() for row in masks]

    def infer(**extra: Any) -> dict[str, Any]:
        with engine.eval_mode():
            return engine.infer_batch(batch(calculate_entropy=True, **extra)[0])["model_output"]

    def rows(nested: Any) -> list[list[float]]:
        return [row.tolist() for row in nested.unbind()]

    before = infer()
    report["before"] = {name: rows(value) for name, value in before.items()}
    report["rates"], report["losses"], report["norms"] = [], [], []
    for _ in range(3):
        with engine.train_mode():
            output = engine.train_batch(batch(calculate_entropy=True)[0], policy_loss)
        report["losses"].append(sum(output["loss"]))
        report["norms"].append(float(output["metrics"]["grad_norm"]))
        report["micro batches"] = len(output["loss"])
        report["seen"] = sum(output["metrics"]["seen"])
        report["rates"].append(engine.lr_scheduler_step())
    after = infer()
    report["moved"] = float((after["log_probs"].values() - before["log_probs"].values()).abs().max())
    with engine.disable_adapter():
        base = infer()
    report["base"] = float((base["log_probs"].values() - before["log_probs"].values()).abs().max())
    weights, config = engine.get_per_tensor_param(base_sync_done=False)
    report["weights"] = {name: float(tensor.double().sum()) for name, tensor in weights}
    adapter, config = engine.get_per_tensor_param(base_sync_done=True)
    report["adapter"] = {name: list(tensor.shape) for name, tensor in adapter}
    report["config"] = {name: str(value) for name, value in config.items()}
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(f"{folder}/global_step_3", global_step=3, max_ckpt_to_keep=1)
        engine.initialize()
        fresh = infer()
        report["fresh"] = float((fresh["log_probs"].values() - before["log_probs"].values()).abs().max())
        engine.load_checkpoint(f"{folder}/global_step_3")
        loaded = infer()
        report["loaded"] = float((loaded["log_probs"].values() - after["log_probs"].values()).abs().max())
        report["next rate"] = engine.lr_scheduler_step()
    report["errors"] = {}
    for name, value in {"temperature": 0.7, "calculate_sum_pi_squared": True}.items():
        try:
            infer(**{name: value})
        except ValueError as error:
            report["errors"][name] = str(error)
    engine.to("cpu")
    with open(out, "w") as file:
        json.dump(report, file)


main(*sys.argv[1:])
