"""The independent reference of LoRA: Hugging Face's model, peft, torch's AdamW. Run as a script; imports no megascend.

    python peft_reference.py JOB.json RESULT.safetensors

JOB names a checkpoint, a PEFT adapter directory, samples (token ids and prompt lengths) and optimizer settings; with
``steps`` 0 nothing is trained; all parameters are of ``dtype``, by default float32. RESULT holds the first logits of every
sample, the losses and gradient norms of every step, and as ``adapter.KEY`` the adapter's tensors after the last step, under the
names that peft saves them by; as ``gradient.KEY`` the gradients of the first step after clipping, and with ``gradients`` as
``gradients.KEY`` those before.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import peft
import torch
from packaging.version import Version
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import transformers_weight_conversion
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


def main(job_path: str, result_path: str) -> None:
    torch.set_num_threads(1)
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    model = load(job["checkpoint"], job["adapter"], getattr(torch, job.get("dtype", "float32")))
    samples = job["samples"]
    result: dict[str, Tensor] = {}
    model.eval()
    with torch.no_grad():
        for index, sample in enumerate(samples):
            result[f"logits.{index}"] = logits_of(model, sample).contiguous()
    if job.get("gradients"):
        model.train()
        batch_loss(model, samples).backward()
        result |= {f"gradients.{key}": tensor for key, tensor in gradients(model).items()}
        model.zero_grad()
    if job["steps"]:
        losses, norms, clipped = train(model, samples, job)
        result["losses"], result["grad_norms"] = torch.tensor(losses), torch.tensor(norms)
        for key, tensor in get_peft_model_state_dict(model, state_dict=clipped).items():
            result[f"gradient.{key}"] = tensor.contiguous()
    for key, tensor in get_peft_model_state_dict(model).items():
        result[f"adapter.{key}"] = tensor.detach().contiguous()
    save_file(result, result_path)


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the factors' gradients under the names that peft saves the factors by."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values = [parameter.detach().clone() for parameter in trained]
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(parameter.grad)
        saved = {key: tensor.detach().clone().contiguous() for key, tensor in get_peft_model_state_dict(model).items()}
        for parameter, value in zip(trained, values, strict=True):
            parameter.copy_(value)
    return saved


def load(checkpoint: str, adapter: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load the model with the adapter's factors, the only trainable parameters."""
    if Version(peft.__version__) < Version("0.20"):
        keep_keys()
    takes_images = hasattr(AutoConfig.from_pretrained(checkpoint), "vision_config")
    loader = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    # torch's grouped product of experts has no float64.
    eager = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    base = loader.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager", local_files_only=True, **eager)
    return PeftModel.from_pretrained(base, adapter, is_trainable=True).to(dtype)


def keep_keys() -> None:
    """Stop peft 0.19 from looking for experts under their names of transformers 4; these adapters have the new ones.

    It passes ``distributed_operation`` to transformers' ``WeightConverter``, which took it no longer in 5.10, and so cannot
    load any adapter of a mixture of experts there: a TypeError. peft 0.20 does not pass it.
    """
    transformers_weight_conversion.build_peft_weight_mapping = lambda *arguments, **options: []


def train(
    model: Any, samples: list[dict[str, Any]], job: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train ``job["steps"]`` steps on the same samples.

    Returns:
        Losses, gradient norms before clipping, and the first step's gradients after clipping by parameter.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=job["lr"], betas=(0.9, 0.999), eps=1e-8, weight_decay=job["weight_decay"]
    )
    model.train()
    losses, norms, gradients = [], [], {}
    for step in range(job["steps"]):
        if job.get("learning_rates"):
            optimizer.param_groups[0]["lr"] = job["learning_rates"][step]
        optimizer.zero_grad()
        loss = batch_loss(model, samples)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, job["max_grad_norm"] or float("inf"))))
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad and parameter.grad is not None
            }
        optimizer.step()
    return losses, norms, gradients


def logits_of(model: Any, sample: dict[str, Any]) -> Tensor:
    """Return the logits of a sample, with its images if it has ``image_token``."""
    tokens, images = torch.tensor(sample["token_ids"])[None, :-1], {}
    if "image_token" in sample:
        images = {"mm_token_type_ids": (tokens == sample["image_token"]).int()}
    if "pixel_values" in sample:
        images |= {
            "pixel_values": torch.tensor(sample["pixel_values"]),
            "image_grid_thw": torch.tensor(sample["grids"]),
        }
    return model(input_ids=tokens, **images).logits[0]


def batch_loss(model: Any, samples: list[dict[str, Any]]) -> Tensor:
    """Mean cross entropy of all trained tokens; each sample is alone in its forward pass."""
    total, count = torch.zeros(()), 0.0
    for sample in samples:
        tokens = torch.tensor(sample["token_ids"])
        logits = logits_of(model, sample).float()
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        weights = (torch.arange(1, len(tokens)) >= sample["prompt_length"]).float()
        if "weights" in sample:
            weights = torch.tensor(sample["weights"])
        total = total - (weights * logprobs).sum()
        count += float(weights.sum())
    return total / count


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
