"""Weights and samples of a self-check, chosen so that a mistake shows, and the difference of two sides' outputs."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MIN_MARGIN = 3e-5
"""Required margin between the last expert chosen and the first one not chosen, over the spread of the scores.

Thirty times the effect of fp32 rounding on a score, so that both sides choose the same experts."""
ATTEMPTS = 40
"""Draws of a sample before the search for one with this margin is given up."""
ROUNDINGS = 3
"""Draws of :func:`rounding`: results of single draws differ by up to a factor of four."""


def settings(config: Any) -> dict[str, Any]:
    """Return a transformers configuration with all its defaults, as JSON values."""
    return json.loads(config.to_json_string(use_diff=False))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter, and biases that are buffers, at a scale at which a mistake shows.

    Other buffers keep their values: random decays or masks would make a model that is not causal.
    Norm weights are drawn around 1, biases around 0, matrices so that activations keep their scale, and routers at twice that
    scale, so that the choice of experts is clear.
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
            elif name.endswith("A_log"):
                value = 0.5 * noise - 2.0  # a token's decay is 0.9 then, so that states reach over many tokens
            elif tensor.ndim < 2:
                # Norms whose weight is an offset from 1 start at 0.
                value = 0.2 * noise + (1.0 if tensor.any() else 0.0)
            elif "embed" in name or "lm_head" in name:
                value = 0.2 * noise
            else:
                gain = 2.0 if name.endswith(("gate.weight", "router.weight")) else 1.0
                value = gain * noise / tensor.shape[-1] ** 0.5
            tensor.copy_(value)


class Choices(TorchFunctionMode):
    """Torch function mode that records the narrowest margin of every ``topk``."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            self._record_margin(*args, **kwargs)
        return func(*args, **kwargs)

    def _record_margin(self, scores: Tensor, k: int, dim: int = -1, **_: Any) -> None:
        if not 0 < k < scores.shape[dim]:
            return
        scores = scores.float()
        # Keys that a mask of the smallest number has masked are as far away as those of an infinite one.
        scores = scores.masked_fill(scores <= torch.finfo(torch.float32).min / 2, -torch.inf)
        best = scores.sort(dim, descending=True).values
        gaps = best.select(dim, k - 1) - best.select(dim, k)
        # Over the spread of this sample's scores, so that the margin is relative: scores have no common scale.
        # Experts that a router has masked have infinite scores, which are neither chosen nor near ties.
        finite = best[best.isfinite()]
        gaps = gaps[gaps.isfinite()] / finite.std()
        if len(gaps):
            self.margin = min(self.margin, float(gaps.min()))


def choose_samples(model: torch.nn.Module, vocabulary: int, lengths: list[int], seed: int) -> dict[str, Any]:
    """Draw token ids (one more than a sample's length) for which every choice of experts has a clear margin.

    Returns:
        ``samples``; ``logits`` from ``model``, [n, vocabulary] each; ``margin``, the narrowest expert choice, or None;
        ``rounding``, the result of :func:`rounding`.
    """
    generator = torch.Generator().manual_seed(seed)
    samples, logits, margins = [], [], []
    for length in lengths:
        attempts = []
        for _ in range(ATTEMPTS):
            ids = torch.randint(vocabulary, (length + 1,), generator=generator)
            with torch.no_grad(), Choices() as choices:
                output = model(ids[None, :-1], use_cache=False).logits[0].float()
            attempts.append(choices.margin)
            # Near a tie rounding decides the expert, and then two right models differ.
            if choices.margin >= MIN_MARGIN:
                break
        else:
            raise RuntimeError(
                f"no inputs without near ties in routing in {ATTEMPTS} attempts (widest margin {max(attempts):.1e}, "
                f"required {MIN_MARGIN:.1e})"
            )
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
    """Return the change of the logits when every parameter is rounded differently, over the largest logit.

    Two correct programs may differ by this much: 1e-6 in a transformer, up to 1e-4 in random layers of linear attention, whose
    states amplify differences of their inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    largest = max(float(values.abs().max()) for values in logits)
    change = 0.0
    with torch.no_grad():
        # Every rounding starts from the same values, which are restored at the end.
        exact = [parameter.clone() for parameter in parameters]
        for _ in range(ROUNDINGS):
            for parameter, value in zip(parameters, exact, strict=True):
                half_a_digit = torch.finfo(torch.float32).eps * (torch.rand(value.shape, generator=generator) - 0.5)
                parameter.copy_(value * (1 + half_a_digit))
            for ids, expected in zip(samples, logits, strict=True):
                delta = model(ids[None], use_cache=False).logits[0].float() - expected
                change = max(change, float(delta.abs().max()) / largest)
        for parameter, value in zip(parameters, exact, strict=True):
            parameter.copy_(value)
    return change


def difference(outputs: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> float:
    """Return the largest absolute difference of logits and of the targets' log-probabilities; inf for NaN.

    Args:
        outputs: logits [n, vocabulary] and log-probabilities of the targets [n].
        reference: logits [n, vocabulary] and targets, int64 [n].
    """
    logits, targets = reference
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    largest = max(float((outputs[0] - logits).abs().max()), float((outputs[1] - logprobs).abs().max()))
    return largest if largest == largest else float("inf")


def description(error: BaseException) -> str:
    """Describe an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
