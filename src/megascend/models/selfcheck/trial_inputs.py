"""Weights and samples of a self-check, chosen so that a mistake shows, and the difference of two sides' outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megascend.models import architecture_of

MIN_MARGIN = 3e-5
"""Required margin between the last expert chosen and the first one not chosen, over the spread of the scores.

Thirty times the effect of fp32 rounding on a score, so that both sides choose the same experts."""
ATTEMPTS = 40
"""Draws of a sample before the search for one with this margin is given up."""
ATTEMPTS_AT_LIMITS = 8
"""Times that weights are scaled: a norm hides the scale of those before it."""
CLAMPS = ("clamp", "clamp_", "clip", "clip_", "clamp_max", "clamp_max_")
"""Functions that limit values. Lower bounds above 0 are not limits: they keep divisors from 0."""
BEYOND = 2.0
"""Largest value in front of a limit, over the limit, at which a wrong limit shows."""
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
            elif tensor.ndim > 3:  # a convolution over patches of images
                value = noise / tensor[0].numel() ** 0.5
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


class Limits(TorchFunctionMode):
    """Torch function mode that records, for each module with parameters, how near its values come to its limits.

    Limits are those of ``clamp`` and of soft caps, ``cap * tanh(x / cap)``.

    Attributes:
        reached: by module, the least (largest value in front of a limit) / limit.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.reached: dict[nn.Module, float] = {}
        self._stack: list[nn.Module] = []
        # A module that embeds tokens is the model, whose own limits (of logits) need no large weights to show.
        self._inner = [m for m in model.modules() if not any(isinstance(part, nn.Embedding) for part in m.modules())]
        self._hooks: list[Any] = []

    def __enter__(self) -> Limits:
        for module in self._inner:
            self._hooks.append(module.register_forward_pre_hook(lambda module, inputs: self._stack.append(module)))
            self._hooks.append(module.register_forward_hook(lambda module, inputs, output: self._leave()))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _leave(self) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._stack and args and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel():
            if name in CLAMPS:
                self._record_clamp(name, *args, **kwargs)
            elif name == "tanh":
                self._record(float(args[0].abs().max()))
        return func(*args, **kwargs)

    def _record_clamp(self, name: str, values: Tensor, *bounds: Any, **named: Any) -> None:
        low, high = (None, *bounds) if name.startswith("clamp_max") else (*bounds, None, None)[:2]
        low, high = named.get("min", low), named.get("max", high)
        ends = [(values.max(), high)] if isinstance(high, int | float) and 0 < high < math.inf else []
        ends += [(-values.min(), -low)] if isinstance(low, int | float) and -math.inf < low < 0 else []
        for end, bound in ends:
            if bound < torch.finfo(torch.float16).max:  # which guards fp16 from infinities
                self._record(float(end) / bound)

    def _record(self, ratio: float) -> None:
        module = next((module for module in reversed(self._stack) if any(True for _ in module.parameters())), None)
        if module is not None:
            self.reached[module] = min(self.reached.get(module, math.inf), ratio)


def reach_limits(model: nn.Module, chosen: Mapping[str, Any], images: ImageTokens | None = None) -> str | None:
    """Scale the weights of modules that limit their values until these are beyond the limits.

    ``chosen``: result of :func:`choose_samples` for the model.

    Returns:
        None if nothing was scaled, as all limits are passed anyway or there are none; else a description of the modules whose
        limits no scale has reached, or empty.
    """
    ids = chosen["samples"][-1][:-1]
    for attempt in range(ATTEMPTS_AT_LIMITS):
        with torch.no_grad(), Limits(model) as limits:
            _logits(model, ids, images)
            below = {module: ratio for module, ratio in limits.reached.items() if ratio < BEYOND}
            if not below:
                return "" if attempt else None
            for module, ratio in below.items():
                for parameter in module.parameters():
                    parameter.mul_(min(1.25 * BEYOND / max(ratio, 1e-3), 1e3))
    return f"values reach no limit of {', '.join(sorted({type(module).__name__ for module in below}))}"


class ImageTokens:
    """An image for the samples of a model that takes images, and the tokens that stand for it.

    Args:
        config: the slice's ``config.json``.
    """

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        layout = architecture_of(config).image_layout(config)
        assert layout is not None, "the slice has a vision tower"
        self.layout = layout
        self._grid = (1, 2 * layout.merge, 3 * layout.merge)
        names = ("vision_start_token_id", "vision_end_token_id")
        begin, end = (config[name] if isinstance(config.get(name), int) else None for name in names)
        tokens = [begin, *[layout.token] * layout.features(*self._grid), end]
        self._tokens = torch.tensor([token for token in tokens if token is not None])
        self._patches = torch.randn(
            math.prod(self._grid), layout.patch_width, generator=torch.Generator().manual_seed(seed)
        )

    @classmethod
    def of(cls, config: Mapping[str, Any], seed: int) -> ImageTokens | None:
        """Return the image of a slice; None for a model of text."""
        return cls(config, seed) if "vision_config" in config else None

    def insert(self, ids: Tensor) -> Tensor:
        """Put the image after the second token, if it leaves tokens behind it."""
        end = 2 + len(self._tokens)
        return torch.cat([ids[:2], self._tokens, ids[end:]]) if len(ids) > end + 2 else ids

    def images(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the patches and grids of the images of a sample; None: it has none."""
        return (self._patches, torch.tensor([self._grid])) if (ids == self.layout.token).any() else None

    def arguments(self, ids: Tensor) -> dict[str, Tensor]:
        """Return transformers' arguments for the images of a sample, [n]."""
        kinds = {"mm_token_type_ids": (ids == self.layout.token).int()[None]}
        if (images := self.images(ids)) is None:
            return kinds
        return kinds | dict(zip(("pixel_values", "image_grid_thw"), images, strict=True))


def text_vocabulary(config: Mapping[str, Any]) -> int:
    """Return the number of tokens of a slice's vocabulary without those for images, which are its last ones."""
    special = [value for name, value in config.items() if name.endswith("_token_id") and isinstance(value, int)]
    return min(special) if "vision_config" in config else config["vocab_size"]


def _logits(model: nn.Module, ids: Tensor, images: ImageTokens | None) -> Tensor:
    """Return transformers' logits [n, vocabulary] of one sample."""
    inputs = {} if images is None else images.arguments(ids)
    return model(input_ids=ids[None], use_cache=False, **inputs).logits[0].float()


def choose_samples(
    model: torch.nn.Module, vocabulary: int, lengths: list[int], seed: int, images: ImageTokens | None = None
) -> dict[str, Any]:
    """Draw token ids (one more than a sample's length) for which every choice of experts has a clear margin.

    Long samples have an image, if the model takes ``images``; ``vocabulary``: tokens of text.

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
            ids = ids if images is None else images.insert(ids)
            with torch.no_grad(), Choices() as choices:
                output = _logits(model, ids[:-1], images)
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
        "rounding": rounding(model, [ids[:-1] for ids in samples], logits, seed, images),
    }


def rounding(
    model: torch.nn.Module, samples: list[Tensor], logits: list[Tensor], seed: int, images: ImageTokens | None = None
) -> float:
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
                delta = _logits(model, ids, images) - expected
                change = max(change, float(delta.abs().max()) / largest)
        for parameter, value in zip(parameters, exact, strict=True):
            parameter.copy_(value)
    return change


def plain_options() -> dict[str, Any]:
    """Return transformers' options for a model in plain torch and fp32, which no kernel computes or limits."""
    from transformers import PreTrainedModel

    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    # transformers 4.57 has no choice of experts. A grouped product would need widths that are multiples of 16 bytes.
    choosable = hasattr(PreTrainedModel, "set_experts_implementation")
    return options | ({"experts_implementation": "eager"} if choosable else {})


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
