"""verl's engine with a critic in one process: values, steps of verl's value loss, a checkpoint, and weights, as tensors.

python critic_calls.py CRITIC CAUSAL_MODEL OUT_DIRECTORY
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from verl.utils import tensordict_utils
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.config.checkpoint import McoreCheckpointConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import value_loss

LENGTHS = ((3, 4), (5, 7), (2, 3), (4, 5))
"""Of prompts and responses."""
STEPS = 3


def sequences() -> list[dict[str, Any]]:
    """Build the data of verl and of the reference; the value at a position precedes the next token."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for prompt, response in LENGTHS:
        returns, old = torch.randn(2, response, generator=generator).tolist()
        ids = torch.randint(3, 250, (prompt + response,), generator=generator).tolist()
        rows.append({"ids": ids, "prompt": prompt, "returns": returns, "old": old})
    return rows


def batch(part: slice = slice(None)) -> Any:
    """Build a data parallel rank's batch from its sequences."""

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    every = sequences()
    rows = every[part]
    ids = [torch.tensor(row["ids"]) for row in rows]
    masks = [torch.tensor([0] * row["prompt"] + [1] * len(row["returns"])) for row in rows]
    tensors = {
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(len(tokens)) for tokens in ids]),
        "loss_mask": nested(masks),
        "prompts": nested([tokens[: row["prompt"]] for tokens, row in zip(ids, rows, strict=True)]),
        "responses": nested([tokens[row["prompt"] :] for tokens, row in zip(ids, rows, strict=True)]),
        "response_mask": nested([torch.ones(len(row["returns"]), dtype=torch.long) for row in rows]),
        "values": nested([torch.tensor(row["old"]) for row in rows]),
        "returns": nested([torch.tensor(row["returns"]) for row in rows]),
    }
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 20, "temperature": 1.0, "pad_mode": "no_padding"}
    return tensordict_utils.get_tensordict(tensors, {**settings, "global_batch_size": len(every)})


def configs(path: str, **engine: Any) -> dict[str, Any]:
    """Build verl's configurations of a critic; ``engine``'s are those of its layout."""
    return {
        "model_config": HFModelConfig(path=path, model_type="value_model"),
        "engine_config": McoreEngineConfig(override_transformer_config={"params_dtype": "float32"}, **engine),
        "optimizer_config": McoreOptimizerConfig(
            lr=5e-4, lr_decay_style="constant", total_training_steps=10, weight_decay=0.0, clip_grad=1.0
        ),
        "checkpoint_config": McoreCheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    }


def engine_of(path: str) -> Any:
    engine = EngineRegistry.new(model_type="value_model", backend="megatron", **configs(path))
    engine.initialize()
    return engine


def loss_of_verl() -> Any:
    """Compute verl's own value loss."""
    settings = SimpleNamespace(cliprange_value=0.2, loss_agg_mode="token-mean", loss_scale_factor=None)
    return partial(value_loss, settings)


def values_of(engine: Any) -> torch.Tensor:
    with engine.eval_mode():
        return engine.infer_batch(batch())["model_output"]["values"].values().clone()


def main(critic: str, causal: str, out: str) -> None:
    initialize_global_process_group_ray()
    folder = Path(out)
    engine = engine_of(critic)
    loss = loss_of_verl()
    report = {"values": values_of(engine)}
    losses, norms, micro_batches = [], [], []
    for _ in range(STEPS):
        with engine.train_mode():
            output = engine.train_batch(batch(), loss)
        losses.append(sum(output["loss"]))
        norms.append(float(output["metrics"]["grad_norm"]))
        micro_batches.append(len(output["loss"]))
        engine.lr_scheduler_step()
    report["trained"] = values_of(engine)
    weights, _ = engine.get_per_tensor_param()
    report |= {f"weights.{name}": tensor.clone() for name, tensor in weights}
    engine.save_checkpoint(str(folder / "global_step_3"), global_step=3)
    engine.initialize()
    report["fresh"] = values_of(engine)
    engine.load_checkpoint(str(folder / "global_step_3"))
    report["loaded"] = values_of(engine)
    try:
        engine_of(causal)
    except ValueError as error:
        second = str(error)
    engine.backend.close()
    new = engine_of(causal)
    report["new head"] = dict(new.get_per_tensor_param()[0])["score.weight"].clone()
    new.backend.close()
    save_file({name: tensor.contiguous() for name, tensor in report.items()}, folder / "found.safetensors")
    figures = {"losses": losses, "norms": norms, "micro batches": micro_batches, "second": second}
    (folder / "found.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
