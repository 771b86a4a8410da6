"""The independent reference of a client's training: transformers, peft and torch's AdamW. A script; imports no megascend.

    python tinker_reference.py JOB.json ADAPTER RESULT.json

JOB as for client_program.py, with ``checkpoint``; ADAPTER is the directory of the adapter that the client began with.
"""

import json
import sys
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM


def logprobs_of(model: Any, tokens: list[int], targets: Any) -> Tensor:
    """Return log-probabilities [n] or [n, k] for targets of that shape."""
    logits = model(input_ids=torch.tensor(tokens)[None]).logits[0].float().log_softmax(-1)
    target_ids = torch.tensor(targets)
    return logits.gather(1, target_ids[:, None])[:, 0] if target_ids.dim() == 1 else logits.gather(1, target_ids)


def loss_of(name: str, config: dict[str, float], logprobs: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Sum over the tokens of one sample, as the API's documentation has it."""
    if name == "cross_entropy":
        return -(logprobs * torch.tensor(inputs["weights"])).sum()
    ratio, advantages = torch.exp(logprobs - torch.tensor(inputs["logprobs"])), torch.tensor(inputs["advantages"])
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    clipped = ratio.clamp(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    if name == "ppo":
        return -torch.minimum(ratio * advantages, clipped * advantages).sum()
    if name == "cispo":
        return -(clipped.detach() * advantages * logprobs).sum()
    raise ValueError(name)


def main(job_path: str, adapter: str, result_path: str) -> None:
    torch.set_num_threads(1)
    with open(job_path) as file:
        job = json.load(file)
    base = AutoModelForCausalLM.from_pretrained(
        job["checkpoint"], dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    answers = []
    for settings in job["steps"]:
        name = settings["loss"]
        data = job["data"][settings.get("data", "cross_entropy" if name == "custom" else name)]
        logprobs = [logprobs_of(model, tokens, inputs["target_tokens"]) for tokens, inputs in data]
        if name == "custom":
            loss = sum((v.square() * 0.01 + v * (0.2 if i % 2 else -0.3)).sum() for i, v in enumerate(logprobs))
        else:
            loss = sum(
                loss_of(name, settings.get("config") or {}, v, inputs)
                for v, (_, inputs) in zip(logprobs, data, strict=True)
            )
        optimizer.zero_grad()
        loss.backward()
        adam = settings["adam"]
        if adam.get("grad_clip_norm"):
            torch.nn.utils.clip_grad_norm_(parameters, adam["grad_clip_norm"])
        optimizer.param_groups[0].update(
            lr=adam["learning_rate"],
            betas=(adam.get("beta1", 0.9), adam.get("beta2", 0.95)),
            eps=adam.get("eps", 1e-12),
            weight_decay=adam.get("weight_decay", 0.0),
        )
        optimizer.step()
        answers.append({"loss": float(loss), "logprobs": [value.detach().flatten().tolist() for value in logprobs]})
    with torch.no_grad():
        data = job["data"]["cross_entropy"]
        values = [logprobs_of(model, tokens, inputs["target_tokens"]) for tokens, inputs in data]
        forward = sum(float(loss_of("cross_entropy", {}, v, i)) for v, (_, i) in zip(values, data, strict=True))
    with open(result_path, "w") as file:
        json.dump({"steps": answers, "forward": forward}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
