"""Calling a loss function on a micro batch: its values, and its gradient where the model's graph begins.

The gradient is taken right here, with respect to the log-probabilities and entropies, and handed to the model's backward pass
as plain coefficients. That settles two things:

- A token of weight 0, and padding is one, contributes no gradient, whatever the function makes of it. Masking its value would
  not do: where the value is infinite, the masked gradient is 0 * inf.
- A function that raises, forward or backward, does so between two collectives of the model. This rank goes on with gradients
  of zero, so that it meets the others wherever they expect it, and :func:`raise_together` ends the step on all ranks.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megascend.batch.losses import BUILT_IN, Loss, LossInputs, split_output
from megascend.batch.micro_batch import MicroBatch
from megascend.batch.sample import TOKEN_FIELDS
from megascend.errors import CollectiveTimeoutError, DataError, LossFunctionError, ProcessGroupError
from megascend.kernels.host_copy import to_device

T = TypeVar("T")

Gather = Callable[[Any], Sequence[Any]]
"""Every context parallel rank's object, in their order, on each of them."""


@dataclass(frozen=True)
class LossProblem:
    """Why a loss function cannot be used.

    Attributes:
        text: for the error message; with the traceback, where there is one.
        own: this rank's function has raised, rather than one beside it.
    """

    text: str
    own: bool


@dataclass(frozen=True)
class Evaluation:
    """What a loss function made of one micro batch; n tokens, or pairs, without a graph.

    Attributes:
        figures: its values, under "loss", and its metrics: [n] or [pairs] each.
        scores, entropy: the gradient of the weighted values with respect to each [n]; None for what was not given.
    """

    figures: dict[str, Tensor]
    scores: Tensor
    entropy: Tensor | None


class LossCall:
    """The loss function of one ``forward_backward`` on this rank, called once for every micro batch.

    Args:
        loss: what to call.
        gather: exchanges an object between the context parallel ranks; None where there is only one of them.

    Attributes:
        problem: why the function cannot be used, or None. Once set, it is not called again.
        cause: the exception itself, on the rank that had it.
    """

    def __init__(self, loss: Loss, gather: Gather | None = None) -> None:
        self.loss = loss
        self.problem: LossProblem | None = None
        self.cause: Exception | None = None
        self._gather = None if loss.function in {known.function for known in BUILT_IN.values()} else gather
        self._calls = 0

    def evaluate(
        self,
        scores: Tensor,
        entropy: Tensor | None,
        inputs: LossInputs,
        factors: Tensor | float,
        padding: Tensor,
    ) -> Evaluation | None:
        """Call the function; None if it cannot be used on this rank or on a context parallel rank beside it.

        Args:
            scores, entropy: fp32 [n] as the model gives them; scores are log-probabilities, or a scalar head's values.
            inputs: everything else; its ``reduce_context`` is the plain sum over context parallel ranks.
            factors: what each token's value, times its weight, or each pair's value counts in the sum that is differentiated.
            padding: bool [n], tokens that no sample has.
        """
        return self._guarded(lambda: self._differentiate(scores, entropy, inputs, factors, padding))

    def observe(self, logprobs: Tensor, inputs: LossInputs, padding: Tensor) -> dict[str, Tensor] | None:
        """Call the function of a loss that is a cross entropy for its figures: [n] each; None as in :meth:`evaluate`."""

        def call() -> dict[str, Tensor]:
            finite = _finite_at_weight_0(inputs.weights)
            seen = replace(_finite_fields(inputs), reduce_context=self._reduce_context(inputs.reduce_context))
            _, metrics = split_output(
                self.loss, self.loss(finite(logprobs.masked_fill(padding, 0.0)), seen), len(logprobs)
            )
            return {"loss": -logprobs, **{name: metric.detach().float() for name, metric in metrics.items()}}

        return self._guarded(call)

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns; None once it has raised, here or on a context parallel rank beside this one."""
        if self.problem is not None:
            return None
        self._calls += 1
        try:
            found = call()
            self._tell(_RETURNED)
        except (ProcessGroupError, CollectiveTimeoutError):
            raise
        except _GivenUpError:
            return None
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; raise_together raises it again
            if self.problem is None:  # else it is what the function made of _GivenUpError
                self.cause, self.problem = error, LossProblem(_describe(self.loss, self._calls, error), own=True)
                self._tell(_RAISED)
            return None
        return found

    def _differentiate(
        self, scores: Tensor, entropy: Tensor | None, inputs: LossInputs, factors: Tensor | float, padding: Tensor
    ) -> Evaluation:
        loss, weights = self.loss, inputs.weights
        given = [of.detach().requires_grad_() for of in (scores, entropy) if of is not None]
        count = len(weights) if loss.per == "token" else len(inputs.pairs)
        with torch.enable_grad():
            # Padding has no truth of its own: what a layout pads with shall not be seen.
            finite = _finite_at_weight_0(weights)
            seen = [finite(of.masked_fill(padding, 0.0)) for of in given]
            inputs = replace(
                _finite_fields(inputs),
                entropy=None if entropy is None else seen[1],
                reduce_context=self._reduce_context(inputs.reduce_context),
            )
            values, metrics = split_output(loss, loss(seen[0], inputs), count)
            counted = weighted(values, weights * factors) if loss.per == "token" else values * factors
            total = counted.sum()
        _check_graph(loss, total, given)
        found = torch.autograd.grad(total, given, allow_unused=True)
        trained = weights != 0
        gradients = [None if of is None else torch.where(trained, of, 0.0) for of in found]
        return Evaluation(
            figures={"loss": values.detach(), **{name: metric.detach().float() for name, metric in metrics.items()}},
            scores=torch.zeros_like(given[0]) if gradients[0] is None else gradients[0],
            entropy=gradients[1] if entropy is not None else None,
        )

    # --- between context parallel ranks, which may meet inside the function ---

    def _reduce_context(self, reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if self._gather is None:
            return reduce

        def guarded(values: Tensor) -> Tensor:
            self._tell(("reduces values of shape", tuple(values.shape)))
            total = reduce(values)
            if total.requires_grad and self.loss.per == "token":  # whose backward pass meets the other ranks, too
                total.register_hook(lambda grad: self._tell(("reduces a gradient of shape", tuple(grad.shape))))
            return total

        return guarded

    def _tell(self, state: tuple[Any, ...]) -> None:
        """Say what this rank does next in the function, and hear it from the context parallel ranks beside it."""
        if self._gather is None:
            return
        if self.problem is not None and state != _RAISED:  # the function has caught the error and carries on
            raise _GivenUpError
        states = self._gather(state)
        if state != _RAISED and any(other != state for other in states):
            self.problem = LossProblem(_disagreement(self.loss, states), own=False)
            raise _GivenUpError


_RETURNED, _RAISED = ("returned",), ("raised",)


class _GivenUpError(Exception):
    """Another context parallel rank has failed, or is elsewhere in the function."""


def _disagreement(loss: Loss, states: Sequence[tuple[Any, ...]]) -> str:
    if _RAISED in states:
        return f"loss {loss.name!r} raised on context parallel rank {states.index(_RAISED)}"
    each = "; ".join(f"rank {rank} {' '.join(map(str, state))}" for rank, state in enumerate(states))
    return (
        f"loss {loss.name!r} must call reduce_context (or sum_per_sample) equally often, on values of one shape, on all context "
        f"parallel ranks: {each}"
    )


def _finite_at_weight_0(weights: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what replaces by 0 the values [n] of tokens of weight 0 that are not finite.

    Masking gradients is not enough where a function brings tokens together: 0 times such a value is NaN for all of them.
    """
    untrained = weights == 0
    return lambda values: torch.where(untrained & ~values.isfinite(), 0.0, values)


def _finite_fields(inputs: LossInputs) -> LossInputs:
    """Return ``inputs`` with fields whose values at tokens of weight 0 are finite."""
    finite = _finite_at_weight_0(inputs.weights)
    named = {name: getattr(inputs, name) for name in TOKEN_FIELDS if getattr(inputs, name) is not None}
    extra = None if inputs.extra is None else {name: finite(values) for name, values in inputs.extra.items()}
    return replace(inputs, extra=extra, **{name: finite(values) for name, values in named.items()})


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """``values * weights``, but 0 where the weight is: a value that is not finite at a padding token must not spread."""
    return torch.where(weights != 0, values * weights, 0.0)


def raise_together(problems: Sequence[LossProblem | None], mine: LossCall) -> None:
    """Raise on every rank what the loss function raised on any; ``problems``: of every rank, in their order."""
    found = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
    if not found:
        return
    rank, problem = next((entry for entry in found if entry[1].own), found[0])
    more = f" ({len(found)} ranks had to stop)" if len(found) > 1 else ""
    raise LossFunctionError(
        f"rank {rank}: {problem.text}{more}\nThe step has ended on all ranks; no gradient of it is kept"
    ) from mine.cause


def _describe(loss: Loss, call: int, error: Exception) -> str:
    """What went wrong; of what the function itself has raised, with the traceback from there on."""
    if isinstance(error, DataError):  # found here, in what it returned
        return f"{error} (micro batch {call})"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return f"loss {loss.name!r} failed in micro batch {call} with {type(error).__name__}: {error}\n{text}"


def _check_graph(loss: Loss, total: Tensor, given: Sequence[Tensor]) -> None:
    """Raise LossFunctionError for a sum that no gradient would reach the model from, or that trains something else."""
    if not total.requires_grad:
        raise LossFunctionError(
            f"loss {loss.name!r} returned values that do not depend on {loss.of} or inputs.entropy, or only through detach(): "
            "nothing would be trained. For a loss that is to be 0, multiply by 0"
        )
    seen, waiting = set(), [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not of for of in given):
            raise LossFunctionError(
                f"loss {loss.name!r} uses a tensor of shape {tuple(leaf.shape)} that requires a gradient, beside {loss.of} and "
                "inputs.entropy. This backend trains the model only: detach it"
            )
        waiting += [parent for parent, _ in node.next_functions]


class LossNormalizer:
    """Scales and sums the losses of one ``forward_backward``: each adapter's (or the model's own, "") by its own samples.

    Attributes:
        names: the adapters of all ranks' samples.
        loss_grad: the gradient that the engine's backward pass starts from at a micro batch's loss.
        function: calls the loss, micro batch by micro batch.
        figure_scale: what weights are multiplied by in the sums of figures: a power of two, so that nothing is rounded, with
            which sums in float32 stay finite where the averages are.

    Args:
        scales: [names], what each adapter's loss is multiplied by.
        count: what averages are divided by, of all adapters together.
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
    ) -> None:
        self.loss, self.names, self.loss_grad = loss, names, loss_grad
        self.function = LossCall(loss, gather_context)
        self.figure_scale = 2.0 ** -math.ceil(math.log2(max(count, 1.0)))
        self._scales = scales
        self._on_device = to_device(torch.tensor(scales), device)

    def of_tokens(self, batch: MicroBatch) -> Tensor | float:
        """The factor of each token's loss: [n], or one number for all."""
        return self._scales[0] if len(self.names) == 1 else self._on_device[batch.token_adapter_index]

    def of_pairs(self, batch: MicroBatch) -> Tensor | float:
        """The factor of each pair's loss: [pairs], or one number for all."""
        return self._scales[0] if len(self.names) == 1 else self._on_device[self._pair_adapter_index(batch)]

    def sums(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """``values`` [n] summed for each adapter: [names]."""
        return self._sum_per_adapter(values, batch.token_adapter_index)

    def pair_sums(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """``values`` [pairs] summed for each adapter: [names]."""
        return self._sum_per_adapter(values, self._pair_adapter_index(batch))

    def _pair_adapter_index(self, batch: MicroBatch) -> Tensor:
        return to_device(torch.tensor(batch.adapter_index), batch.pairs.device)[batch.pairs[:, 0]]

    def _sum_per_adapter(self, values: Tensor, adapter_index: Tensor) -> Tensor:
        if len(self.names) == 1:
            return values.sum()[None]
        return values.new_zeros(len(self.names)).index_add(0, adapter_index, values)
