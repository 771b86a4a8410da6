"""Loss of a micro batch: the scalar to differentiate, and the metrics to report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.config.registry import LossUnit
from megascend.engines.base import Engine, Output, ScalarOutput
from megascend.engines.step.policy import policy_output
from megascend.errors import DataError
from megascend.runtime.distributed.objects import gather_objects
from megascend.training.batch.agreement import Agreement
from megascend.training.batch.loss import Loss, LossInputs
from megascend.training.batch.loss_call import LossNormalizer, weighted
from megascend.training.batch.losses import cross_entropy
from megascend.training.batch.micro_batch import MicroBatch, MtpTargets, last_tokens
from megascend.training.batch.results import MTP_LOSS
from megascend.training.kernels.host_copy import to_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def normalizer_of(loss: Loss, agreed: Agreement, engine: Engine) -> LossNormalizer:
    """Return the normalizer of each adapter's loss (or the model's); DataError for a mean over nothing."""
    unit, loss_grad = engine.scales(agreed.micro_batches)
    factors = engine.trainable.loss_scales(list(agreed.counts))
    scales = []
    for (name, counts), factor in zip(agreed.counts.items(), factors, strict=True):
        total = counts.weight if loss.per == "token" else float(counts.units)
        if loss.reduction == "sum":
            total = 1.0
        elif loss.divisor is not None:
            total = loss.divisor
        if total <= 0:
            empty = {"token": "all targets have weight 0", "sample": "no sample", "pair": "no preference pair"}[
                loss.per
            ]
            adapter = f" of adapter {name!r}" if name else ""
            raise DataError(f"{empty} in the global batch{adapter}: the loss {loss.name!r} is undefined")
        scales.append(unit / total * factor)

    def gather_context(obj: Any) -> list[Any]:
        return gather_objects(obj, "cp", engine.groups, "the loss function")

    mtp_factor = 0.0
    if engine.mtp_loss_weight:  # only with a model that is trained itself, whose name is ""
        divisor = sum(counts.mtp_weight for counts in agreed.counts.values()) if loss.reduction == "mean" else 1.0
        # Samples of one token have no target for the head.
        mtp_factor = engine.mtp_loss_weight * unit / divisor * factors[0] if divisor > 0 else 0.0
    gather = gather_context if engine.topology.context > 1 else None
    count = sum(counts.weight if loss.per == "token" else counts.units for counts in agreed.counts.values())
    return LossNormalizer(
        loss,
        names=list(agreed.counts),
        scales=scales,
        loss_grad=loss_grad,
        device=engine.device,
        gather_context=gather,
        count=count,
        mtp_factor=mtp_factor,
    )


class MicroBatchLoss:
    """Computes the loss of micro batches on this rank.

    Args:
        context_group: group of ranks that hold parts of every sample, or None.
    """

    def __init__(self, normalizer: LossNormalizer, context_group: ProcessGroup | None) -> None:
        self._normalizer, self._loss, self._context_group = normalizer, normalizer.loss, context_group

    def __call__(self, batch: MicroBatch, output: Output | ScalarOutput) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the scalar to differentiate, the sum of every metric by adapter [names], and log-probabilities or values [n]."""
        total, figures, values = self._model_loss(batch, output)
        if batch.mtp is None:
            return total, figures, values
        assert not isinstance(output, ScalarOutput)
        assert output.prediction is not None
        prediction_total, figure = self._prediction_loss(batch, batch.mtp, output.prediction)
        return total + prediction_total, {**figures, MTP_LOSS: figure}, values

    def _prediction_loss(self, batch: MicroBatch, targets: MtpTargets, output: Output) -> tuple[Tensor, Tensor]:
        """Return the scalar to differentiate of a head for multi-token prediction, and the sum of its cross entropy [names].

        The head learns to predict the tokens that have a weight, whatever the model's own loss is.
        """
        normalizer = self._normalizer
        # Weights of a loss that is summed may be negative: advantages, for example.
        weights = (
            targets.weights if self._loss.reduction == "mean" else (targets.weights != 0).to(targets.weights.dtype)
        )
        coefficients = weights * normalizer.mtp_factor
        if output.fuses_loss:
            total, logprobs = output.cross_entropy(coefficients, normalizer.loss_grad)
        else:
            logprobs, *_ = output.logprobs(entropy=False)
            total = weighted(-logprobs, coefficients).sum()
        figure = weighted(-logprobs.detach(), weights * normalizer.metric_scale)
        return total, normalizer.sums(figure, batch)

    def _model_loss(self, batch: MicroBatch, output: Output | ScalarOutput) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        loss, normalizer = self._loss, self._normalizer
        if isinstance(output, ScalarOutput):
            return self._evaluate(batch, output.values)
        output = policy_output(batch, output)
        # The fused head computes log-probabilities and gradients in one pass, without keeping logits.
        if (loss.is_cross_entropy or loss.function is cross_entropy) and output.fuses_loss:
            coefficients = batch.weights * normalizer.token_factors(batch)
            total, logprobs = output.cross_entropy(coefficients, normalizer.loss_grad)
            return total, self._cross_entropy_metrics(batch, logprobs.detach()), logprobs
        if loss.divergence is not None and batch.teacher_states is not None:  # dummy batches have none
            states = to_device(batch.teacher_states, batch.targets.device)
            logprobs, divergences = output.divergence(loss.divergence, states)
            return self._evaluate(batch, logprobs, divergence=divergences)
        return self._evaluate(batch, *output.logprobs(loss.entropy, batch.candidate_ids))

    def _evaluate(
        self,
        batch: MicroBatch,
        tokens: Tensor,
        entropy: Tensor | None = None,
        candidates: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Call the loss function on ``tokens`` [n], log-probabilities or values, and on what else it needs.

        Args:
            entropy: [n]; ``candidates``: log-probabilities of the micro batch's candidates [n, K].
            divergence: [n], from the teacher of the loss.
        """
        loss, normalizer, result = self._loss, self._normalizer, None
        if not batch.dummy:
            factors = normalizer.token_factors(batch) if loss.per == "token" else normalizer.unit_factors(batch)
            result = normalizer.function.evaluate(
                tokens, entropy, self._inputs(batch), factors, batch.padding, candidates, divergence
            )
        if result is None:  # the backward pass must still run, with zeros: other ranks communicate in it
            zero = torch.zeros_like(tokens).mul(tokens).sum()
            return zero, {"loss": tokens.new_zeros(len(normalizer.names))}, tokens
        # Linear in the outputs, so its gradients are exactly those that LossCall has computed.
        total = (result.scores * tokens).sum()
        if entropy is not None and result.entropy is not None:
            total = total + (result.entropy * entropy).sum()
        if candidates is not None and result.candidates is not None:
            total = total + (result.candidates * candidates).sum()
        if divergence is not None and result.divergence is not None:
            total = total + (result.divergence * divergence).sum()
        if loss.per == "token":
            return total, self._token_metrics(batch, result.metrics), tokens
        # Every context parallel rank has every sample or pair, so each reports 1 / ranks of the sum, but takes the full gradient.
        ranks = 1 if self._context_group is None else self._context_group.size()
        share = normalizer.metric_scale / ranks
        return (
            total,
            {name: normalizer.unit_sums(metric * share, batch) for name, metric in result.metrics.items()},
            tokens,
        )

    def _cross_entropy_metrics(self, batch: MicroBatch, logprobs: Tensor) -> dict[str, Tensor]:
        """Return the metrics of a loss that was computed by the fused head instead of its function."""
        metrics: dict[str, Tensor] | None = None
        if self._loss.function is not cross_entropy and not batch.dummy:
            metrics = self._normalizer.function.observe(logprobs, self._inputs(batch), batch.padding)
        return self._token_metrics(batch, metrics or {"loss": -logprobs})

    def _token_metrics(self, batch: MicroBatch, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum values [n] for each adapter, weighted: the loss by the token weights, other metrics as they are averaged."""
        scale = self._normalizer.metric_scale
        loss_weights = batch.weights * scale
        metric_weights = (batch.weights != 0) * scale if self._loss.reduction == "sum" else loss_weights
        return {
            name: self._normalizer.sums(weighted(metric, loss_weights if name == "loss" else metric_weights), batch)
            for name, metric in metrics.items()
        }

    def _inputs(self, batch: MicroBatch) -> LossInputs:
        return LossInputs(
            targets=batch.targets,
            weights=batch.weights,
            sample=batch.sample,
            sample_count=len(batch.members),
            pairs=batch.pairs,
            labels=batch.labels,
            reduce_context=context_sum(self._context_group, self._loss.per),
            advantages=batch.fields.get("advantages"),
            old_logprobs=batch.fields.get("old_logprobs"),
            ref_logprobs=batch.fields.get("ref_logprobs"),
            returns=batch.fields.get("returns"),
            old_values=batch.fields.get("old_values"),
            last=to_device(last_tokens(batch)[0], batch.sample.device) if self._loss.of == "values" else None,
            extra=batch.fields,
            members=batch.members,
            candidate_ids=batch.candidate_ids,
            teacher_logprobs=batch.teacher_logprobs,
        )


class ContextSum(torch.autograd.Function):
    """Sum over context parallel ranks, with the gradient of all values that depend on it counted once.

    A loss per sample or pair is computed on every rank from the same sums, so each rank's gradient of a sum is complete. A loss
    per token is computed for the rank's tokens only, so gradients of a sum are summed over ranks.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup, per: LossUnit) -> Tensor:
        ctx.group, ctx.per = group, per
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grads[0], ctx.group) if ctx.per == "token" else grads[0], None, None


def _summed(values: Tensor, group: ProcessGroup) -> Tensor:
    # all_reduce works in place.
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def context_sum(group: ProcessGroup | None, per: LossUnit) -> Callable[[Tensor], Tensor]:
    """Return a differentiable sum over ``group``; the identity if there is none.

    Args:
        per: unit that the loss has a value for.
    """
    if group is None:
        return lambda values: values
    return lambda values: ContextSum.apply(values, group, per)
