"""Loss functions: plain callables on (log-probs or values, inputs), the built-in ones, and a registry of those known by name.

A loss returns one value per token, or one per preference pair, *unreduced*; the step weights, normalises and sums over
micro batches, data and context parallel ranks, so a loss never depends on the layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascend.errors import ConfigError, DataError


@dataclass
class LossInputs:
    """What a loss function sees of this rank's part of one micro batch; n tokens, padding included.

    Padding has weight 0, and its log-probability (or value), entropy and fields are 0; so is what is not finite of any other
    token of weight 0. No token of weight 0 has a gradient, whatever the function returns there; for everything else it is as
    if padding were not there, as long as the function works token by token (or on :meth:`sum_per_sample`).

    Attributes:
        targets: int64 [n].
        weights: float32 [n].
        entropy: float32 [n] with gradient, or None unless the loss asks for it.
        advantages, old_logprobs, ref_logprobs, returns, old_values: float32 [n] or None.
        extra: further float32 [n] fields.
        sample: int64 [n], which sample of the micro batch a token belongs to.
        sample_count: samples in the micro batch.
        pairs: int64 [pairs, 2], positions of the chosen and the rejected sample of each pair.
        last: int64, which of the n are last tokens of samples; None but for losses of values.
        reduce_context: sums a tensor over context parallel ranks, differentiably.
        members: on the host, the place of each of the micro batch's samples in this rank's list.
    """

    targets: Tensor
    weights: Tensor
    sample: Tensor
    sample_count: int
    pairs: Tensor
    reduce_context: Callable[[Tensor], Tensor]
    entropy: Tensor | None = None
    advantages: Any = None  # a Tensor where the samples carry it; a loss that needs it says so in Loss.requires
    old_logprobs: Any = None
    ref_logprobs: Any = None
    returns: Any = None
    old_values: Any = None
    last: Tensor | None = None
    extra: dict[str, Tensor] | None = None
    members: Sequence[int] = ()

    def sum_per_sample(self, values: Tensor) -> Tensor:
        """Weighted sum of per-token ``values`` [n] over each whole sample, context parallel parts included: [samples]."""
        counted = torch.where(self.weights != 0, values * self.weights, 0.0)
        totals = values.new_zeros(self.sample_count).index_add(0, self.sample, counted)
        return self.reduce_context(totals)

    def at_last(self, values: Tensor) -> Tensor:
        """``values`` [n] at the last token of each sample, on whichever context parallel rank it is: [samples]."""
        assert self.last is not None, "only losses of values are told where samples end"
        found = values.new_zeros(self.sample_count).index_add(0, self.sample[self.last], values[self.last])
        return self.reduce_context(found)


LossFunction = Callable[[Tensor, LossInputs], Any]


@dataclass(frozen=True)
class Loss:
    """A loss function and what it needs.

    Attributes:
        name: for messages and metrics.
        function: ``(logprobs [n], LossInputs) -> losses`` or ``-> (losses, {metric: numbers})``; losses and metrics have
            shape [n] for ``per="token"`` and [pairs] for ``per="pair"``.
        of: what the function gets first: ``logprobs`` of the targets, or ``values``, what a scalar head makes of each token.
        per: what is averaged: tokens by their weights, or preference pairs, each counting once.
        requires: per-token fields of :class:`megascend.Sample` that must be set.
        entropy: True if ``inputs.entropy`` is needed.
        reduction: ``mean``: the sum of weighted values is divided by the weights of the global batch (or its pairs). ``sum``: it
            is not; only then weights may be negative, or 0 everywhere, and metrics are averaged over the targets with a weight.
        settings: keyword arguments of ``function``; see :meth:`with_settings`.
        is_cross_entropy: the values are the negative log-probabilities, and the function is there for its metrics. Their gradient
            is formed with the logits at hand where the head can, as for ``cross_entropy``; the function is called without one.
    """

    name: str
    function: LossFunction
    per: Literal["token", "pair"] = "token"
    requires: tuple[str, ...] = ()
    entropy: bool = False
    reduction: Literal["mean", "sum"] = "mean"
    settings: tuple[tuple[str, float], ...] = ()
    of: Literal["logprobs", "values"] = "logprobs"
    is_cross_entropy: bool = False

    def __post_init__(self) -> None:
        if self.is_cross_entropy and (self.per != "token" or self.of != "logprobs" or self.entropy):
            raise ConfigError(
                f"loss {self.name!r}: is_cross_entropy=True is for losses of tokens by their log-probabilities; it came with "
                f"per={self.per!r}, of={self.of!r}, entropy={self.entropy}"
            )

    def with_settings(self, /, **settings: float) -> Loss:
        """This loss with keyword arguments of its function, such as ``ppo``'s ``clip_low``. Equal settings make equal losses.

        Raises:
            ConfigError: the function has no such argument; the message lists those that it has.
        """
        parameters = list(inspect.signature(self.function).parameters.values())[2:]
        known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(f"loss {self.name!r} has no setting {unknown[0]!r}; it has: {', '.join(known) or 'none'}")
        return replace(self, settings=tuple(sorted({**dict(self.settings), **settings}.items())))

    def describe(self) -> str:
        """What must be equal on all ranks."""
        settings = "".join(f", {name}={value!r}" for name, value in self.settings)
        return f"loss={self.name!r}{settings}" + (", reduction='sum'" if self.reduction == "sum" else "")

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> Any:
        return self.function(logprobs, inputs, **dict(self.settings))


def cross_entropy(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """Negative log-likelihood of the targets."""
    return -logprobs


def importance_sampling(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with importance weights: -(pi / pi_old) * advantage, as in Tinker's ``importance_sampling``."""
    log_ratio = logprobs - inputs.old_logprobs
    return -_ratio_times(log_ratio, inputs.advantages), {"ratio": _ratio_figure(log_ratio)}


def ppo(logprobs: Tensor, inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2):
    """Clipped surrogate objective (Schulman et al. 2017, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A)."""
    log_ratio = logprobs - inputs.old_logprobs
    surrogate, was_clipped = _clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high)
    return -surrogate, {
        "ratio": _ratio_figure(log_ratio),
        "clip_fraction": was_clipped.float(),
        "kl": _kl_figure(log_ratio),
    }


def cispo(logprobs: Tensor, inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2):
    """Policy gradient whose importance weight is clipped and has no gradient (MiniMax-M1, 2025, eq. 4): no token is dropped."""
    log_ratio = logprobs.detach() - inputs.old_logprobs
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    weight = torch.where(inputs.advantages != 0, clipped, 0.0)  # not infinity * 0
    return -(weight * logprobs) * inputs.advantages, {
        "ratio": _ratio_figure(log_ratio),
        "clip_fraction": (clipped != ratio).float(),
    }


def gspo(logprobs: Tensor, inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4):
    """Clipped surrogate objective of whole sequences (Zheng et al. 2025, eq. 5 to 7).

    The ratio of a sequence is the geometric mean of its tokens', those with a weight; it stands at each of them.
    """
    counted = (inputs.weights != 0).to(logprobs.dtype)

    def per_sample(values: Tensor) -> Tensor:
        totals = values.new_zeros(inputs.sample_count).index_add(
            0, inputs.sample, torch.where(counted > 0, values, 0.0)
        )
        return inputs.reduce_context(totals)

    mean = per_sample(logprobs - inputs.old_logprobs) / per_sample(counted).clamp_min(1.0)
    log_ratio = mean[inputs.sample]
    surrogate, was_clipped = _clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high)
    return -surrogate, {"ratio": _ratio_figure(log_ratio), "clip_fraction": was_clipped.float()}


def dro(logprobs: Tensor, inputs: LossInputs, beta: float = 0.05):
    """Policy gradient with a quadratic penalty on leaving the old policy (Richemond et al. 2024), as in Tinker's ``dro``."""
    log_ratio = logprobs - inputs.old_logprobs
    return 0.5 * beta * log_ratio.square() - logprobs * inputs.advantages, {"ratio": _ratio_figure(log_ratio)}


def stable_reinforce(logprobs: Tensor, inputs: LossInputs, kl_coeff: float = 0.01, max_ratio: float = 2.0):
    """Policy gradient of the expected advantage minus ``kl_coeff`` KL(pi || sampler), from what the sampler drew.

    With r = pi / pi_old: -min(r, max_ratio) (A - kl_coeff log r) log pi, where only the last factor has a gradient. Truncated
    importance weights (Ionides 2008): up to ``max_ratio`` the gradient is exact in expectation, however old the sampler is;
    above, it is bounded.
    """
    log_ratio = (logprobs - inputs.old_logprobs).detach()
    ratio = torch.exp(log_ratio)
    earned = inputs.advantages - (kl_coeff * log_ratio if kl_coeff else 0.0)
    was_clipped = ratio > max_ratio
    weighted = torch.where(was_clipped, max_ratio * earned, _ratio_times(log_ratio, earned))
    return -weighted * logprobs, {
        "ratio": _ratio_figure(log_ratio),
        "clip_fraction": was_clipped.float(),
        "kl": _kl_figure(log_ratio),
    }


# --- ratios, which float32 holds up to exp(88.7) ---

LARGEST = torch.finfo(torch.float32).max


class _RatioTimes(torch.autograd.Function):
    """exp(log_ratio) * factor, differentiable by log_ratio.

    The exponential is split, so that the product and its gradient leave float32 only where the exact ones do.
    """

    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor, factor: Tensor) -> Tensor:
        root = torch.exp(0.5 * log_ratio)
        ctx.save_for_backward(root, factor)
        return root * factor * root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        root, factor = ctx.saved_tensors
        return torch.where(grads[0] != 0, grads[0] * root * factor * root, 0.0), None


def _ratio_times(log_ratio: Tensor, factor: Tensor) -> Tensor:
    """Return exp(log_ratio) * factor; 0, with a gradient of 0, where the factor is 0."""
    return _RatioTimes.apply(torch.where(factor != 0, log_ratio, 0.0), factor)


def _clipped_surrogate(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) for r = exp(log_ratio), and where the clipped term is the smaller one.

    There it is a constant, and a ratio that overflows must not be part of its graph: 0 times its gradient would be NaN.
    """
    ratio = torch.exp(log_ratio.detach())
    bound = torch.clamp(ratio, 1 - low, 1 + high)
    above, below = (advantages > 0) & (ratio > bound), (advantages < 0) & (ratio < bound)
    was_clipped = above | below
    moving = _ratio_times(log_ratio, torch.where(was_clipped, 0.0, advantages))
    return torch.where(was_clipped, bound * advantages, moving), was_clipped


def _ratio_figure(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) as a metric, at most the largest float32."""
    return torch.exp(log_ratio.detach()).clamp_max(LARGEST)


def _kl_figure(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - log r as a metric, at most the largest float32: the k3 estimator of KL(old || new), Schulman 2020.

    It is unbiased, and never negative.
    """
    log_ratio = log_ratio.detach()
    return torch.expm1(log_ratio).clamp_max(LARGEST) - log_ratio.clamp(-LARGEST, 88.0)  # not infinity - infinity


def dpo(logprobs: Tensor, inputs: LossInputs, beta: float = 0.1):
    """Direct preference optimisation (Rafailov et al. 2023, eq. 7); needs ``ref_logprobs`` and complete pairs."""
    margins = inputs.sum_per_sample(logprobs - inputs.ref_logprobs)
    chosen, rejected = margins[inputs.pairs[:, 0]], margins[inputs.pairs[:, 1]]
    logits = beta * (chosen - rejected)
    return -F.logsigmoid(logits), {
        "accuracy": (logits > 0).float(),
        "reward_chosen": (beta * chosen.detach()).clamp(-LARGEST, LARGEST),
        "reward_rejected": (beta * rejected.detach()).clamp(-LARGEST, LARGEST),
    }


def value(values: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared distance of a critic's values to ``returns``."""
    distance = values - inputs.returns
    return 0.5 * distance * distance, {"value": values.detach()}


def clipped_value(values: Tensor, inputs: LossInputs, clip: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's value loss as in its authors' code: of the value, or of one within ``clip`` of ``old_values``, whichever is worse."""
    near = inputs.old_values + (values - inputs.old_values).clamp(-clip, clip)
    # Distances are compared, not their squares: two squares that overflow are equal.
    plain, clipped = (values - inputs.returns).abs(), (near - inputs.returns).abs()
    worse = torch.maximum(plain, clipped)
    return 0.5 * worse * worse, {
        "value": values.detach(),
        "clip_fraction": (clipped > plain).detach().float(),
    }


def bradley_terry(values: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A reward model's -log sigmoid(chosen - rejected) (Bradley and Terry 1952), scores at last tokens; needs complete pairs."""
    scores = inputs.at_last(values)
    chosen, rejected = scores[inputs.pairs[:, 0]], scores[inputs.pairs[:, 1]]
    return -F.logsigmoid(chosen - rejected), {
        "accuracy": (chosen > rejected).float(),
        "reward_chosen": chosen.detach(),
        "reward_rejected": rejected.detach(),
    }


def _built_in(policy_losses: Iterable[LossFunction]) -> dict[str, Loss]:
    losses = [
        Loss("cross_entropy", cross_entropy),
        *(Loss(of.__name__, of, requires=("old_logprobs", "advantages")) for of in policy_losses),
        Loss("dpo", dpo, per="pair", requires=("ref_logprobs",)),
        Loss("value", value, requires=("returns",), of="values"),
        Loss("clipped_value", clipped_value, requires=("returns", "old_values"), of="values"),
        Loss("bradley_terry", bradley_terry, per="pair", of="values"),
    ]
    return {loss.name: loss for loss in losses}


BUILT_IN = _built_in((importance_sampling, ppo, cispo, gspo, dro, stable_reinforce))


_by_name: dict[str, Loss] = dict(BUILT_IN)


def register_loss(loss: Loss) -> Loss:
    """Make a loss known by its name, wherever a loss can be named: ``forward_backward(samples, loss.name)``.

    Every rank registers the same losses, most simply where the module that defines them is imported. Registering one again
    changes nothing.

    Returns:
        The loss.

    Raises:
        ConfigError: another loss has that name.
    """
    if not isinstance(loss, Loss):
        raise ConfigError(f"register_loss takes a megascend.Loss, got {type(loss).__name__}")
    if not loss.name:
        raise ConfigError("register_loss: the loss has no name")
    if _by_name.setdefault(loss.name, loss) != loss:
        raise ConfigError(f"register_loss: another loss is called {loss.name!r}; names in use: {', '.join(_by_name)}")
    return loss


def resolve(loss: str | Loss | LossFunction) -> Loss:
    """The :class:`Loss` for a name, a Loss, or a plain per-token callable.

    Raises:
        ConfigError: the name is unknown; the message lists those that are known.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in _by_name:
            raise ConfigError(
                f"unknown loss {loss!r}; known by name: {', '.join(_by_name)}. Pass a callable, or register yours on every rank "
                "(megascend.register_loss)"
            )
        return _by_name[loss]
    if callable(loss):
        return Loss(getattr(loss, "__name__", type(loss).__name__), loss)
    raise ConfigError(f"a loss is a name, a megascend.Loss or a callable, got {type(loss).__name__}")


def split_output(loss: Loss, output: Any, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Take a loss function's return value apart and check its shapes."""
    values, metrics = output if isinstance(output, tuple) else (output, {})
    for name, tensor in {"loss": values, **metrics}.items():
        if tuple(tensor.shape) != (count,):
            raise DataError(
                f"loss {loss.name!r} returned {name} of shape {tuple(tensor.shape)}; per={loss.per!r} needs ({count},)"
            )
    return values, metrics
