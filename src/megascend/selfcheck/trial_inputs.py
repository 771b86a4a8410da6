"""Weights and samples of a self-check, chosen so that a mistake shows, and how far two sides are apart on them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LEAST_MARGIN = 3e-5
"""Of a choice of experts: distance of the last one chosen to the first one left out, over the spread of the scores.

Thirty times what fp32 rounding moves a score by, so that both sides choose the same experts."""
ATTEMPTS = 40
ROUNDINGS = 3
"""Draws of :func:`rounding`: one alone may be four times smaller than the next."""


def settings(config: Any) -> dict[str, Any]:
    """A configuration of transformers with all its defaults, as JSON has it."""
    return json.loads(config.to_json_string(use_diff=False))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter of the checkpoint at a scale that lets a mistake show, and the biases that are buffers.

    Other buffers stay: decays and masks that are drawn would make a model that is not causal.
    Norm weights around 1, biases around 0, matrices so that activations keep their scale, routers twice that, so that the
    choice of experts is no coin toss.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or (name not in parameters and not name.endswith("bias")):
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("bias"):
                value = 0.1 * noise
            elif tensor.ndim < 2:
                value = 1.0 + 0.2 * noise
            elif "embed" in name or "lm_head" in name:
                value = 0.2 * noise
            else:
                gain = 2.0 if name.endswith(("gate.weight", "router.weight")) else 1.0
                value = gain * noise / tensor.shape[-1] ** 0.5
            tensor.copy_(value)


class Choices(TorchFunctionMode):
    """Watches every ``topk`` and remembers the narrowest margin of its choices."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            self._look(*args, **kwargs)
        return func(*args, **kwargs)

    def _look(self, scores: Tensor, k: int, dim: int = -1, **_: Any) -> None:
        if not 0 < k < scores.shape[dim]:
            return
        best = scores.float().sort(dim, descending=True).values
        gaps = best.select(dim, k - 1) - best.select(dim, k)
        finite = best[best.isfinite()]
        gaps = gaps[gaps.isfinite()] / finite.std()
        if len(gaps):
            self.margin = min(self.margin, float(gaps.min()))


def choose_samples(model: torch.nn.Module, vocabulary: int, lengths: list[int], seed: int) -> dict[str, Any]:
    """Draw token ids (one more than a sample's length) on which no choice of experts is close.

    Returns:
        ``samples``; ``logits``, [n, vocabulary] each, from ``model``; ``margin``, the narrowest choice of experts, or None;
        ``rounding``, of :func:`rounding`.
    """
    generator = torch.Generator().manual_seed(seed)
    samples, logits, margins = [], [], []
    for length in lengths:
        tried = []
        for _ in range(ATTEMPTS):
            ids = torch.randint(vocabulary, (length + 1,), generator=generator)
            with torch.no_grad(), Choices() as choices:
                output = model(ids[None, :-1], use_cache=False).logits[0].float()
            tried.append(choices.margin)
            if choices.margin >= LEAST_MARGIN:
                break
        else:
            raise RuntimeError(f"no inputs without near ties in routing were found (widest margin {max(tried):.1e})")
        samples.append(ids)
        logits.append(output)
        margins.append(choices.margin)
    margin = min(margins)
    return {
        "samples": samples,
        "logits": logits,
        "margin": margin if margin < float("inf") else None,
        "rounding": rounding(model, [ids[:-1] for ids in samples], logits, seed),
    }


def rounding(model: torch.nn.Module, samples: list[Tensor], logits: list[Tensor], seed: int) -> float:
    """Return how far rounding every parameter otherwise moves the logits, over the largest logit.

    Two right programs may be that far apart: 1e-6 in a transformer, up to 1e-4 in random layers of linear attention, whose
    states amplify what went into them.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    largest = max(float(each.abs().max()) for each in logits)
    apart = 0.0
    with torch.no_grad():
        exact = [parameter.clone() for parameter in parameters]
        for _ in range(ROUNDINGS):
            for parameter, value in zip(parameters, exact, strict=True):
                half_a_digit = torch.finfo(torch.float32).eps * (torch.rand(value.shape, generator=generator) - 0.5)
                parameter.copy_(value * (1 + half_a_digit))
            for ids, expected in zip(samples, logits, strict=True):
                moved = model(ids[None], use_cache=False).logits[0].float() - expected
                apart = max(apart, float(moved.abs().max()) / largest)
        for parameter, value in zip(parameters, exact, strict=True):
            parameter.copy_(value)
    return apart


def difference(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> float:
    """Largest absolute difference of the logits and of the targets' log-probabilities; inf where one is not finite."""
    logits, targets = theirs
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    worst = max(float((mine[0] - logits).abs().max()), float((mine[1] - logprobs).abs().max()))
    return worst if worst == worst else float("inf")


def described(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
