"""The independent reference of a head for multi-token prediction: transformers' layers, torch's AdamW. Imports no megascend.

    python mtp_reference.py JOB.json RESULT.safetensors

The head follows DeepSeek-V3's report (arXiv:2412.19437, section 2.2, equations 21 to 25), of depth 1, sample by sample, without
padding or packing. Its inputs, the embedding and the hidden state, are joined in the order of the checkpoints' inference code.
JOB names a checkpoint with a head, samples and optimizer settings; RESULT holds both losses and the gradient
norms of every step, and the trained weights by the names of the checkpoint. All is computed in ``dtype``, default ``float32``.

``aux_loss`` is the coefficient of the routers' loss over all tokens of a layer: Switch Transformer's (Fedus et al. 2021, equation
4, divided by the experts per token), of probabilities that are sigmoids divided by their sum (DeepSeek-V3, section 2.1.2);
``bias_update_rate`` moves the correction biases by that section's rule.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

SEPARATE_LAYER = "mtp.layers.0."
LIKE_A_LAYER = {"enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm", "eh_proj": "eh_proj"}
SEPARATE = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm", "eh_proj": "fc"}
"""Names in checkpoints, of heads that are named like one more layer and of those named ``mtp.*`` (Qwen3-Next)."""


class Head(nn.Module):
    """Norms and projection before the layer, and the norm after it; embedding, layer and output layer are the model's."""

    def __init__(self, norm: type[nn.Module], width: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (norm(width, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)


class InDouble(TorchFunctionMode):
    """Mode in which models compute in fp64 what they ask to be fp32 whatever their parameters are (norms, routers)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def main(job_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    dtype = getattr(torch, job.get("dtype", "float32"))
    folder = Path(job["checkpoint"])
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    layers = config.num_hidden_layers
    # The head's layer is loaded as one more layer of the model, whose forward pass then leaves it out.
    config.num_hidden_layers = layers + 1
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = [*config.mlp_layer_types[:layers], config.mlp_layer_types[layers - 1]]
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types[:layers], config.layer_types[layers - 1]]
    eager = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{layers}."
    stored_layer = SEPARATE_LAYER if any(name.startswith(SEPARATE_LAYER) for name in tensors) else last
    weights = {name.replace(stored_layer, last): tensor for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as renamed:
        save_file(weights, Path(renamed) / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(folder / "config.json", renamed)  # generation's settings are read from it
        model: Any = AutoModelForCausalLM.from_pretrained(
            renamed, config=config, dtype=dtype, attn_implementation="eager", local_files_only=True, **eager
        )
    model.config.num_hidden_layers = layers
    head = Head(type(model.model.norm), config.hidden_size, config.rms_norm_eps).to(dtype)
    names, prefix = (LIKE_A_LAYER, last) if stored_layer == last else (SEPARATE, "mtp.")
    stored = {f"{name}.weight": f"{prefix}{full}.weight" for name, full in names.items()}
    head.load_state_dict({name: tensors[full].to(dtype) for name, full in stored.items()})
    model.train()
    with InDouble() if dtype == torch.float64 else contextlib.nullcontext():
        result = train(model, head, job)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            result[f"biases.{name}"] = buffer.clone()
    if job.get("weights"):
        from transformers.core_model_loading import revert_weight_conversion

        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, tensor in revert_weight_conversion(model, parameters).items():
            result[f"weights.{name.replace(last, stored_layer)}"] = tensor.clone().contiguous()
        for name, parameter in head.named_parameters():
            result[f"weights.{stored[name]}"] = parameter.detach().clone()
    save_file(result, result_path)


class Routers:
    """Logits and choices of all layers with experts in the forward passes of a step."""

    def __init__(self, model: Any) -> None:
        self._moes = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self._top_k = getattr(model.config, "num_experts_per_tok", 0)
        for moe in self._moes:
            moe.gate.register_forward_hook(lambda module, inputs, output, moe=moe: moe.seen.append(output))
        self.clear()

    def clear(self) -> None:
        for moe in self._moes:
            moe.seen = []  # of each pass: logits, weights and indices of the chosen experts

    def loss(self) -> Tensor:
        """Return the sum of the layers' losses."""
        total = torch.zeros(())
        for moe in self._moes:
            scores = torch.cat([logits for logits, _, _ in moe.seen]).sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
            count, experts = probabilities.shape
            best = probabilities.topk(self._top_k).indices.flatten()
            routed = torch.bincount(best, minlength=experts)
            total = total + experts * (routed * probabilities.sum(0)).sum() / (self._top_k * count**2)
        return total

    def update_biases(self, rate: float) -> None:
        for moe in self._moes:
            bias = moe.gate.e_score_correction_bias
            load = torch.bincount(
                torch.cat([chosen for _, _, chosen in moe.seen]).flatten(), minlength=len(bias)
            ).float()
            bias += rate * torch.sign(load.mean() - load)


def train(model: Any, head: Head, job: dict[str, Any]) -> dict[str, Tensor]:
    """Train on all samples, ``job["steps"]`` times; returns the model's loss, the head's, and the norm before clipping."""
    parameters = [*model.parameters(), *head.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": job["weight_decay"]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job["lr"], betas=(0.9, 0.999), eps=1e-8)
    routers = Routers(model)
    rows = []
    for _ in range(job["steps"]):
        optimizer.zero_grad()
        routers.clear()
        loss, prediction_loss = losses(model, head, job)
        balance = job.get("aux_loss", 0.0) * routers.loss() if job.get("aux_loss") else 0.0
        (loss + job["mtp_loss_weight"] * prediction_loss + balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, job["max_grad_norm"])
        rows.append((float(loss.detach()), float(prediction_loss.detach()), float(norm)))
        optimizer.step()
        if job.get("bias_update_rate"):
            routers.update_biases(job["bias_update_rate"])
    table = torch.tensor(rows, dtype=torch.float64)
    return {name: table[:, index].contiguous() for index, name in enumerate(("losses", "mtp_losses", "grad_norms"))}


def losses(model: Any, head: Head, job: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the model's and the head's mean cross entropy over all targets."""
    totals, counts = [0.0, 0.0], [0.0, 0.0]
    for sample in job["samples"]:
        tokens = torch.tensor(sample["token_ids"])
        weights = torch.tensor(sample["weights"])  # of tokens 1, 2...
        hidden = model.model(tokens[None, :-1]).last_hidden_state
        predicted = [(model.lm_head(hidden)[0], tokens[1:], weights)]
        if len(tokens) > 2:
            predicted.append((predictions(model, head, hidden[:, :-1], tokens[1:-1]), tokens[2:], weights[1:]))
        for index, (logits, targets, target_weights) in enumerate(predicted):
            values = -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
            if job["reduction"] == "sum":
                # The model's own weights may be negative; the head predicts the tokens that have one.
                totals[index] = totals[index] + ((target_weights if index == 0 else target_weights != 0) * values).sum()
                counts[index] += float((target_weights != 0).sum())
            else:
                totals[index] = totals[index] + (target_weights * values).sum()
                counts[index] += float(target_weights.sum())
    if job["reduction"] == "sum":
        return totals[0], totals[1]  # type: ignore[return-value]
    return totals[0] / counts[0], totals[1] / counts[1]  # type: ignore[return-value]


def predictions(model: Any, head: Head, hidden: Tensor, following: Tensor) -> Tensor:
    """Return logits [n, vocabulary] of token i + 2, from the states [1, n, h] of tokens i and the tokens [n] i + 1."""
    layer = model.model.layers[model.config.num_hidden_layers]
    embedded = model.model.embed_tokens(following[None])
    joined = head.eh_proj(torch.cat([head.enorm(embedded), head.hnorm(hidden)], dim=-1))
    length = len(following)
    positions = torch.arange(1, length + 1)[None]
    mask = torch.full((length, length), float("-inf"), dtype=joined.dtype).triu(1)[None, None]
    output = layer(
        joined,
        position_embeddings=model.model.rotary_emb(joined, positions),
        attention_mask=mask,
        position_ids=positions,
    )
    return model.lm_head(head.norm(output))[0]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
