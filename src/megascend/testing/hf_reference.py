"""The independent reference: one process, Hugging Face's model, torch's AdamW. Run as a script; imports no megascend.

    python hf_reference.py JOB.json RESULT.safetensors

JOB names a checkpoint, samples (token ids, prompt lengths, and what the loss needs) and optimizer settings. RESULT holds
the losses and gradient norms of every step and the first logits of every sample; with ``gradients`` those of the first step
before clipping, and with ``weights`` the trained weights, both by the names of a checkpoint. All of it is computed in ``dtype``,
default ``float32``; in ``bfloat16`` the model and its gradients of a sample, with weights, gradients' sums and AdamW in fp32.
Samples may have images: ``pixel_values`` and ``grids``, where their ``token_ids`` have the token ``image_token``; parameters
whose names begin with one of ``frozen`` are not trained. Policy and preference losses are written out here from their papers.
With ``aux_loss`` a router loss is added: of ``aux_formula`` ``megatron`` it is written out by its definition (Fedus et al. 2021,
eq. 4, divided by k as Megatron-Core does), of ``transformers`` it is that package's own function.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode


def main(job_path: str, result_path: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # One thread: the order of summation, and so the last bits, must not depend on the machine's load.
    torch.set_num_threads(1)
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    dtype = getattr(torch, job.get("dtype", "float32"))
    # torch has no grouped matrix products in float64.
    eager = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    stored = torch.float32 if dtype == torch.bfloat16 else dtype
    loader = AutoModelForImageTextToText if "image_token" in job else AutoModelForCausalLM
    model: Any = loader.from_pretrained(
        job["checkpoint"], dtype=stored, attn_implementation="eager", local_files_only=True, **eager
    )
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(job.get("frozen", ()))))
    if stored != dtype:
        model = RoundedWeights(model, dtype)
    samples = job["samples"]
    if "image_token" in job:
        samples = [{**sample, "image_token": job["image_token"]} for sample in samples]
    result: dict[str, Tensor] = {}
    precise = InDouble if dtype == torch.float64 else contextlib.nullcontext
    with torch.no_grad(), precise():
        for index, sample in enumerate(samples):
            result[f"logits.{index}"] = logits_of(model, sample).contiguous()
    if job.get("gradients"):
        with precise():
            batch_loss(model, samples, job["loss"], job.get("reduction", "mean")).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        result |= {f"gradients.{name}": tensor for name, tensor in by_checkpoint_names(model, gradients).items()}
        model.zero_grad()
    if job["steps"]:
        with precise():
            losses, norms = train(model, samples, job)
        result["losses"], result["grad_norms"] = torch.tensor(losses, dtype=stored), torch.tensor(norms, dtype=stored)
    if job.get("weights"):
        weights = by_checkpoint_names(model, dict(model.named_parameters()))
        result |= {f"weights.{name}": tensor for name, tensor in weights.items()}
    save_file(result, result_path)


class RoundedWeights:
    """A model whose weights are rounded to ``dtype`` at each call, so that all results follow from the rounded ones."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model, self.rounded_to = model, dtype

    def __call__(self, *args: Any, **options: Any) -> Any:
        weights = {name: parameter.to(self.rounded_to) for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, args, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class InDouble(TorchFunctionMode):
    """Mode in which models compute in fp64 what they ask to be fp32 whatever their parameters are (norms, routers)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def by_checkpoint_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the model's parameters, weights or gradients, by their names in a checkpoint, with experts split."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return {name: tensor.clone().contiguous() for name, tensor in revert_weight_conversion(model, copies).items()}


def train(
    model: Any,
    samples: list[dict[str, Any]],
    job: dict[str, Any],
    before: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms (before clipping) of ``job["steps"]`` steps on the same samples.

    Args:
        before: called before each step with its number and the optimizer.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = list(trainable.values())
    # As Megatron-Core: no weight decay on biases and norms. Biases of experts are vectors, fused into one parameter of two
    # dimensions.
    matrices = [p for name, p in trainable.items() if p.dim() > 1 and not name.endswith("bias")]
    vectors = [p for name, p in trainable.items() if p.dim() <= 1 or name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": job["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        lr=job["lr"],
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    losses, norms = [], []
    for step in range(job["steps"]):
        before(step, optimizer)
        optimizer.zero_grad()
        loss = batch_loss(model, samples, job["loss"], job.get("reduction", "mean"))
        total = loss
        if job["aux_loss"]:
            total = loss + job["aux_loss"] * router_losses(model, samples, job)
        total.backward()
        # An infinite limit only measures the norm.
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, job["max_grad_norm"] or float("inf"))))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms


def logits_of(model: Any, sample: dict[str, Any]) -> Tensor:
    """Return the logits [length, vocabulary] of a sample's tokens, without the last token."""
    tokens = torch.tensor(sample["token_ids"])[None, :-1]
    images: dict[str, Tensor] = {}
    if "image_token" in sample:  # transformers takes positions by rows and columns from the kinds of tokens
        images = {"mm_token_type_ids": (tokens == sample["image_token"]).int()}
    if "pixel_values" in sample:
        pixels = torch.tensor(sample["pixel_values"], dtype=torch.float32).to(model.dtype)
        images |= {"pixel_values": pixels, "image_grid_thw": torch.tensor(sample["grids"])}
    return model(tokens, **images).logits[0]


def batch_loss(model: Any, samples: list[dict[str, Any]], kind: str, reduction: str) -> Tensor:
    """Return the loss over all samples, with one forward pass each."""
    total, count = torch.zeros((), dtype=model.dtype), 0.0
    sequences: list[tuple[dict[str, Any], Tensor, Tensor]] = []
    for sample in samples:
        tokens = torch.tensor(sample["token_ids"])
        logprobs = logits_of(model, sample).float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        weights = (torch.arange(1, len(tokens)) >= sample["prompt_length"]).float()
        if "weights" in sample:
            weights = torch.tensor(sample["weights"], dtype=torch.float32)
        if kind in ("dpo", "orpo", "simpo", "kto"):
            sequences.append((sample, weights, logprobs))
            continue
        trained = weights != 0  # the others are ignored by the loss, regardless of their fields

        def field(name: str) -> Tensor:
            return torch.tensor(sample[name])[trained]  # noqa: B023 - used in this turn of the loop only

        logprobs = logprobs[trained]
        if kind == "cross_entropy":
            values = -logprobs
        elif kind == "divided":
            values = -logprobs / field("p")
        elif kind == "reverse_kl":
            values = logprobs - field("teacher")
        else:
            values = policy_loss(kind, logprobs, field("old_logprobs"), field("advantages"))
        total = total + (weights[trained] * values).sum()
        count += float(weights.sum())
    if sequences:
        return preference_loss(kind, sequences)
    return total if reduction == "sum" else total / count


def preference_loss(kind: str, sequences: list[tuple[dict[str, Any], Tensor, Tensor]]) -> Tensor:
    """Return the mean over pairs, or over labelled samples for kto, of a preference loss with its default settings.

    Args:
        sequences: sample, weights [n] and log-probabilities [n] of each.
    """
    pairs: dict[Any, dict[bool, Tensor]] = {}
    losses = []
    for sample, weights, logprobs in sequences:
        if kind in ("orpo", "simpo"):
            score = (weights * logprobs).sum() / weights.sum()
        else:
            score = (weights * (logprobs - torch.tensor(sample["ref_logprobs"]))).sum()
        if kind == "kto":
            losses.append(1 - torch.sigmoid(0.1 * (score if sample["label"] else -score)))
        else:
            pairs.setdefault(sample["pair"], {})[sample["chosen"]] = score
    for sides in pairs.values():
        chosen, rejected = sides[True], sides[False]
        if kind == "dpo":
            losses.append(-torch.log(torch.sigmoid(0.1 * (chosen - rejected))))
        elif kind == "simpo":
            losses.append(-torch.log(torch.sigmoid(2.0 * (chosen - rejected) - 1.0)))
        else:
            odds = [score.exp() / (1 - score.exp()) for score in (chosen, rejected)]
            losses.append(-chosen - 0.1 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
    return torch.stack(losses).mean()


def policy_loss(
    kind: str,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    bounds: tuple[float, float] | None = None,
    dual: float = float("inf"),
) -> Tensor:
    """Return the policy loss of each token of one sequence: [n].

    Args:
        bounds: of the ratio, where the loss clips it; default: the loss's own.
        dual: upper bound of the ratio of tokens with a negative advantage.
    """
    ratio = (logprobs - old).exp()
    low, high = bounds or {"gspo": (1 - 3e-4, 1 + 4e-4), "stable_reinforce": (0.0, 2.0)}.get(kind, (0.8, 1.2))
    if kind == "cispo":  # MiniMax-M1: the clipped ratio is a number, the gradient is that of the log-probability
        return -ratio.detach().clamp(low, high) * advantages * logprobs
    if kind == "dro":  # Tinker's: log p A - beta / 2 (log p - log q)^2, to be maximised
        return -(logprobs * advantages - 0.025 * (logprobs - old) ** 2)
    if kind == "stable_reinforce":
        return -ratio.detach().clamp(max=high) * (advantages - 0.01 * (logprobs - old)).detach() * logprobs
    if kind == "gspo":  # one ratio a sequence, the geometric mean
        ratio = ((logprobs - old).sum() / len(logprobs)).exp().expand(len(logprobs))
    values = -ratio * advantages
    if kind == "importance_sampling":
        return values
    assert kind in ("ppo", "gspo"), f"no formula of {kind}"
    values = torch.maximum(values, -ratio.clamp(low, high) * advantages)
    return values if dual == float("inf") else torch.where(advantages < 0, values.minimum(-dual * advantages), values)


def router_losses(model: Any, samples: list[dict[str, Any]], job: dict[str, Any]) -> Tensor:
    """Return the mean over micro batches of the router loss, each over the real tokens of its samples."""
    formula = {"megatron": megatron_router_loss, "transformers": transformers_router_loss}[job["aux_formula"]]
    losses = [formula(model, [samples[index] for index in members]) for members in job["micro_batches"]]
    return torch.stack(losses).mean()


def router_logits(model: Any, samples: list[dict[str, Any]]) -> list[Tensor]:
    """Return the logits of every layer with experts: [tokens of all samples, experts]."""
    outputs = []
    for sample in samples:
        tokens = torch.tensor(sample["token_ids"])
        outputs.append(model(tokens[None, :-1], output_router_logits=True).router_logits)
    return [torch.cat([part.flatten(0, -2) for part in parts]) for parts in zip(*outputs, strict=True)]


def megatron_router_loss(model: Any, samples: list[dict[str, Any]]) -> Tensor:
    """Compute experts / (k * N^2) * sum_e(routed_e * sum of probabilities_e), over all tokens of a layer, summed over layers."""
    top_k = model.config.num_experts_per_tok
    loss = torch.zeros(())
    for logits in router_logits(model, samples):
        probabilities = logits.float().softmax(-1)
        experts = probabilities.shape[1]
        chosen = probabilities.topk(top_k, dim=-1).indices
        routed = torch.zeros(experts).index_add(0, chosen.flatten(), torch.ones(chosen.numel()))
        loss = loss + experts * (routed * probabilities.sum(0)).sum() / (top_k * len(logits) ** 2)
    return loss


def transformers_router_loss(model: Any, samples: list[dict[str, Any]]) -> Tensor:
    """Call ``load_balancing_loss_func`` of the model's module."""
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    logits = tuple(router_logits(model, samples))
    return function(logits, logits[0].shape[1], model.config.num_experts_per_tok)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
