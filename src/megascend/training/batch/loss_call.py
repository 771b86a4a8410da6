"""Calling a loss function on a micro batch: its values, and their gradient with respect to the model's outputs.

The gradient is computed here, with respect to log-probabilities and entropies, and passed to the model's backward pass as
coefficients, for two reasons:

- A token of weight 0, such as padding, contributes no gradient, whatever the function returns for it. Masking its value would
  not suffice: where the value is infinite, the masked gradient is 0 * inf.
- A function that raises, forward or backward, does so between two collectives of the model. This rank continues with gradients
  of zero, so that it joins the collectives of the others, and :func:`raise_together` ends the step on all ranks.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megascend.errors import CollectiveTimeoutError, DataError, LossFunctionError, ProcessGroupError
from megascend.training.batch.loss import Loss, LossInputs, split_output
from megascend.training.batch.losses import BUILT_IN
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.batch.sample import TOKEN_FIELDS
from megascend.training.kernels.host_copy import to_device

T = TypeVar("T")

Gather = Callable[[Any], Sequence[Any]]
"""Gathers the objects of all context parallel ranks, in rank order, on every rank."""


@dataclass(frozen=True)
class LossProblem:
    """Reason that a loss function cannot be used.

    Attributes:
        text: error message, with the traceback if there is one.
        local: the function raised on this rank, not on another one.
    """

    text: str
    local: bool


@dataclass(frozen=True)
class LossEvaluation:
    """Detached values and gradients of a loss function on one micro batch of n tokens.

    Attributes:
        metrics: the loss values under "loss", and the function's further metrics: [n], [samples] or [pairs] each.
        scores, entropy: the gradient of the weighted values with respect to each, [n]; None if the loss has no entropy.
        candidates: with respect to the candidates' log-probabilities, [n, K]; None without candidates.
        divergence: with respect to the divergence from a teacher, [n]; None without one.
    """

    metrics: dict[str, Tensor]
    scores: Tensor
    entropy: Tensor | None
    candidates: Tensor | None
    divergence: Tensor | None = None


class LossCall:
    """The loss function of one ``forward_backward`` on this rank, called once for every micro batch.

    Args:
        loss: its function is called.
        gather: exchanges an object between the context parallel ranks; None if there is only one.

    Attributes:
        problem: reason why the function cannot be used, or None. Once it is set, the function is not called again.
        cause: the exception, on the rank that raised it.
    """

    def __init__(self, loss: Loss, gather: Gather | None = None) -> None:
        self.loss = loss
        self.problem: LossProblem | None = None
        self.cause: Exception | None = None
        # Built-in losses make the same calls on all ranks, so theirs need no comparison.
        self._gather = None if loss.function in {built_in.function for built_in in BUILT_IN.values()} else gather
        self._calls = 0

    def evaluate(
        self,
        scores: Tensor,
        entropy: Tensor | None,
        inputs: LossInputs,
        factors: Tensor | float,
        padding: Tensor,
        candidates: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> LossEvaluation | None:
        """Call the function; None if it cannot be used on this or another context parallel rank.

        Args:
            scores, entropy: fp32 [n] from the model; scores are log-probabilities, or a scalar head's values.
            inputs: arguments of the loss function; ``reduce_context`` is the unguarded sum over context parallel ranks.
            factors: coefficient of each token's weighted value, or of each sample's or pair's value, in the sum that is
                differentiated.
            padding: bool [n], tokens of no sample.
            candidates: fp32 [n, K] from the model, log-probabilities of the candidates of ``inputs``.
            divergence: fp32 [n] from the model, its divergence from a teacher.
        """
        outputs = {"scores": scores, "entropy": entropy, "candidates": candidates, "divergence": divergence}
        return self._guarded(lambda: self._differentiate(outputs, inputs, factors, padding))

    def observe(self, logprobs: Tensor, inputs: LossInputs, padding: Tensor) -> dict[str, Tensor] | None:
        """Call the function of a loss with ``is_cross_entropy`` for its metrics: [n] each; None as in :meth:`evaluate`."""

        def call() -> dict[str, Tensor]:
            finite = _finite_at_weight_0(inputs.weights)
            finite_inputs = replace(_finite_fields(inputs), reduce_context=self._reduce_context(inputs.reduce_context))
            _, metrics = split_output(
                self.loss, self.loss(finite(logprobs.masked_fill(padding, 0.0)), finite_inputs), len(logprobs)
            )
            return {"loss": -logprobs, **{name: metric.detach().float() for name, metric in metrics.items()}}

        return self._guarded(call)

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """Return ``call()``; None once it has raised on this or another context parallel rank."""
        if self.problem is not None:
            return None
        self._calls += 1
        try:
            result = call()
            self._compare_states(_RETURNED)
        # Failures of communication, which are not the function's.
        except (ProcessGroupError, CollectiveTimeoutError):
            raise
        except _AbandonedError:
            return None
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; raise_together raises it again
            if self.problem is None:  # else the function turned _AbandonedError into another error
                self.cause, self.problem = error, LossProblem(_describe(self.loss, self._calls, error), local=True)
                # Other context parallel ranks may wait inside the function: tell them.
                self._compare_states(_RAISED)
            return None
        return result

    def _differentiate(
        self, outputs: dict[str, Tensor | None], inputs: LossInputs, factors: Tensor | float, padding: Tensor
    ) -> LossEvaluation:
        loss, weights = self.loss, inputs.weights
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in outputs.items() if tensor is not None}
        count = {"token": len(weights), "sample": inputs.sample_count, "pair": len(inputs.pairs)}[loss.per]
        with torch.enable_grad():
            # A function must not see padding, whose values depend on the layout.
            finite = _finite_at_weight_0(weights)
            visible = {
                name: finite(tensor.masked_fill(padding.view(-1, *[1] * (tensor.dim() - 1)), 0.0))
                for name, tensor in leaves.items()
            }
            inputs = replace(
                _finite_fields(inputs),
                entropy=visible.get("entropy"),
                candidate_logprobs=visible.get("candidates"),
                divergence=visible.get("divergence"),
                reduce_context=self._reduce_context(inputs.reduce_context),
            )
            values, metrics = split_output(loss, loss(visible["scores"], inputs), count)
            weighted_values = weighted(values, weights * factors) if loss.per == "token" else values * factors
            total = weighted_values.sum()
        _check_graph(loss, total, list(leaves.values()))
        # A function may use only some of them.
        raw_gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        trained = weights != 0
        gradients = {
            name: torch.where(trained.view(-1, *[1] * (gradient.dim() - 1)), gradient, 0.0)
            for name, gradient in zip(leaves, raw_gradients, strict=True)
            if gradient is not None
        }
        return LossEvaluation(
            metrics={"loss": values.detach(), **{name: metric.detach().float() for name, metric in metrics.items()}},
            scores=gradients.get("scores", torch.zeros_like(leaves["scores"])),
            entropy=gradients.get("entropy"),
            candidates=gradients.get("candidates"),
            divergence=gradients.get("divergence"),
        )

    # --- agreement of context parallel ranks, which may communicate inside the function ---

    def _reduce_context(self, reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if self._gather is None:
            return reduce

        def guarded(values: Tensor) -> Tensor:
            self._compare_states(("reduces values of shape", tuple(values.shape)))
            total = reduce(values)
            if total.requires_grad and self.loss.per == "token":  # its backward pass communicates, too
                total.register_hook(
                    lambda grad: self._compare_states(("reduces a gradient of shape", tuple(grad.shape)))
                )
            return total

        return guarded

    def _compare_states(self, state: tuple[Any, ...]) -> None:
        """Compare this rank's next action with the other context parallel ranks', so that none hangs in a collective."""
        if self._gather is None:
            return
        if self.problem is not None and state != _RAISED:  # the function caught the error and continued
            raise _AbandonedError
        states = self._gather(state)
        if state != _RAISED and any(other != state for other in states):
            self.problem = LossProblem(_disagreement(self.loss, states), local=False)
            raise _AbandonedError


_RETURNED, _RAISED = ("returned",), ("raised",)


class _AbandonedError(Exception):
    """Raised if another context parallel rank failed or is elsewhere in the function."""


def _disagreement(loss: Loss, states: Sequence[tuple[Any, ...]]) -> str:
    if _RAISED in states:
        return f"loss {loss.name!r} raised on context parallel rank {states.index(_RAISED)}"
    actions = "; ".join(f"rank {rank} {' '.join(map(str, state))}" for rank, state in enumerate(states))
    return (
        f"loss {loss.name!r} must call reduce_context (or sum_per_sample) equally often, on values of one shape, on all context "
        f"parallel ranks: {actions}"
    )


def _finite_at_weight_0(weights: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces values [n] or [n, K] that are not finite by 0 at tokens of weight 0.

    Masking gradients is not enough if a function combines tokens: 0 times such a value is NaN for all of them.
    """
    untrained = weights == 0

    def finite(values: Tensor) -> Tensor:
        return torch.where(untrained.view(-1, *[1] * (values.dim() - 1)) & ~values.isfinite(), 0.0, values)

    return finite


def _finite_fields(inputs: LossInputs) -> LossInputs:
    """Return ``inputs`` with fields whose values at tokens of weight 0 are finite."""
    finite = _finite_at_weight_0(inputs.weights)
    fields = {name: getattr(inputs, name) for name in TOKEN_FIELDS if getattr(inputs, name) is not None}
    extra = None if inputs.extra is None else {name: finite(values) for name, values in inputs.extra.items()}
    return replace(inputs, extra=extra, **{name: finite(values) for name, values in fields.items()})


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Return ``values * weights``, and 0 where the weight is 0, so that NaN or infinity at padding does not spread."""
    return torch.where(weights != 0, values * weights, 0.0)


def raise_together(problems: Sequence[LossProblem | None], local_call: LossCall) -> None:
    """Raise LossFunctionError on every rank if the loss function raised on any; ``problems``: by rank."""
    present = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
    if not present:
        return
    # The rank on which it was raised has the traceback.
    rank, problem = next((entry for entry in present if entry[1].local), present[0])
    suffix = f" ({len(present)} ranks stopped)" if len(present) > 1 else ""
    raise LossFunctionError(
        f"rank {rank}: {problem.text}{suffix}\nThe step has ended on all ranks; no gradient of it is kept"
    ) from local_call.cause


def _describe(loss: Loss, call: int, error: Exception) -> str:
    """Describe an error; one that the function raised with its traceback, without the frames of this file."""
    if isinstance(error, DataError):  # from split_output: an invalid return value
        return f"{error} (micro batch {call})"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return f"loss {loss.name!r} failed in micro batch {call} with {type(error).__name__}: {error}\n{text}"


def _check_graph(loss: Loss, total: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise LossFunctionError for a sum without a gradient to the model, or with one to another tensor."""
    if not total.requires_grad:
        raise LossFunctionError(
            f"loss {loss.name!r} returned values that do not depend on {loss.of}, or only through detach(): nothing would be "
            "trained; for a loss of 0, multiply by 0"
        )
    # autograd.grad would silently leave out other tensors: find them in the graph.
    visited, pending = set(), [total.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and all(variable is not leaf for leaf in leaves):
            raise LossFunctionError(
                f"loss {loss.name!r} uses a tensor of shape {tuple(variable.shape)} that requires a gradient, beside {loss.of} "
                "and inputs.entropy. This backend trains the model only: detach it"
            )
        pending += [parent for parent, _ in node.next_functions]


class LossNormalizer:
    """Scaling and summation of a ``forward_backward``'s losses, separately for each adapter ("" is the model itself).

    Attributes:
        names: the adapters of all ranks' samples.
        loss_grad: the gradient that the engine's backward pass starts from at a micro batch's loss.
        function: calls the loss, micro batch by micro batch.
        mtp_factor: factor of each target's weighted loss of a head for multi-token prediction; 0 without one.
        metric_scale: factor of weights in the sums of metrics, with which float32 sums are finite if the averages are; a power of
            two, so that it causes no rounding.

    Args:
        scales: [names], factor of each adapter's loss.
        count: divisor of averages, over all adapters.
    """

    def __init__(
        self,
        loss: Loss,
        names: list[str],
        scales: list[float],
        loss_grad: float,
        device: torch.device,
        gather_context: Gather | None,
        count: float,
        mtp_factor: float = 0.0,
    ) -> None:
        self.loss, self.names, self.loss_grad, self.mtp_factor = loss, names, loss_grad, mtp_factor
        self.function = LossCall(loss, gather_context)
        self.metric_scale = 2.0 ** -math.ceil(math.log2(max(count, 1.0)))
        self._scales = scales
        self._on_device = to_device(torch.tensor(scales), device)

    def token_factors(self, batch: MicroBatch) -> Tensor | float:
        """Return the factor of each token's loss: [n], or one number for all."""
        return self._scales[0] if len(self.names) == 1 else self._on_device[batch.token_adapter_index]

    def unit_factors(self, batch: MicroBatch) -> Tensor | float:
        """Return the factor of each sample's or pair's loss: [samples] or [pairs], or one number for all."""
        return self._scales[0] if len(self.names) == 1 else self._on_device[self._unit_adapter_index(batch)]

    def sums(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """Sum ``values`` [n] for each adapter: [names]."""
        return self._sum_per_adapter(values, batch.token_adapter_index)

    def unit_sums(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """Sum ``values`` [samples] or [pairs] for each adapter: [names]."""
        return self._sum_per_adapter(values, self._unit_adapter_index(batch))

    def _unit_adapter_index(self, batch: MicroBatch) -> Tensor:
        index = to_device(torch.tensor(batch.adapter_index), batch.pairs.device)
        return index[batch.pairs[:, 0]] if self.loss.per == "pair" else index

    def _sum_per_adapter(self, values: Tensor, adapter_index: Tensor) -> Tensor:
        if len(self.names) == 1:
            return values.sum()[None]
        return values.new_zeros(len(self.names)).index_add(0, adapter_index, values)
