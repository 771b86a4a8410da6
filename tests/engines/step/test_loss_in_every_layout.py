"""Custom losses on real ranks: no layout's padding reaches them, and an error in one ends the step on all."""

import math
from dataclasses import replace

import pytest
import torch

from megascend import Adam, Batching, Loss, Parallel, Sample
from megascend.errors import ConfigError, DataError, LossFunctionError
from megascend.testing import run_distributed
from megascend.testing.parity import PROMPT, case_checkpoint, causal_samples, hf_reference, token_lists
from megascend.training.batch.losses import BUILT_IN
from megascend.training.batch.policy_losses import gspo

pytestmark = pytest.mark.usefixtures("megatron_imported")
LAYOUTS = {
    "single": (1, Parallel(), True),
    "single, padded": (1, Parallel(), False),
    "CP2": (2, Parallel(context=2), True),
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True), True),
    "PP2": (2, Parallel(pipeline=2), True),
    "DP2, padded": (2, Parallel(), False),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
TOKENS = token_lists()


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    return case_checkpoint(parity_folder, "qwen3")


def make_backend(checkpoint, parallel, packing=True, **options):
    from megascend.backends import MegatronBackend

    batching = Batching(micro_batch_tokens=100, packing=packing)
    options.setdefault("timeout_s", 60)
    return MegatronBackend(model=checkpoint, parallel=parallel, precision="fp32", batching=batching, **options)


def with_fields(fields):
    """Build samples of TOKENS with per-token ``fields``; those that Sample does not have become ``extra``."""
    sample_fields = ("old_logprobs", "advantages", "ref_logprobs")
    samples = []
    for base, values in zip(causal_samples(TOKENS), fields, strict=True):
        sample_values = {name: values[name] for name in values if name in sample_fields}
        extra = {name: values[name] for name in values if name not in sample_fields}
        samples.append(Sample(base.input_ids, base.target_ids, base.weights, extra=extra, **sample_values))
    return samples


def in_the_prompt(value, values):
    """Return ``values`` with ``value`` wherever a sample has weight 0."""
    return [value] * (PROMPT - 1) + values[PROMPT - 1 :]


def figures(checkpoint, layout, samples, loss):
    world_size, parallel, packing = LAYOUTS[layout]

    def on_rank():
        backend = make_backend(checkpoint, parallel, packing)
        result = backend.forward_backward(backend.shard(samples), loss)
        step = backend.optimizer_step()
        return result.loss, step.grad_norm, step.skipped, result.metrics

    return run_distributed(on_rank, world_size, init=False)


def equals_hugging_face(results, reference):
    for loss, norm, skipped, metrics in results:
        assert loss == pytest.approx(reference.losses[0], rel=2e-5)
        assert norm == pytest.approx(reference.grad_norms[0], rel=5e-5)
        assert not skipped
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.nightly_cases("DP2, padded")  # covered: CP2, TP2 + SP, single
@every_layout
def test_a_loss_that_is_infinite_at_tokens_of_weight_0_trains(checkpoint, parity_folder, layout):
    """Use 1 / p, where p is 0 in the prompt and in padding."""
    fields = [
        {"p": in_the_prompt(0.0, [0.25 + 0.5 * (position % 3) for position in range(len(ids) - 1)])} for ids in TOKENS
    ]
    reference = hf_reference(parity_folder, checkpoint, TOKENS, steps=1, loss="divided", fields=fields)
    results = figures(checkpoint, layout, with_fields(fields), lambda logprobs, inputs: -logprobs / inputs.extra["p"])
    equals_hugging_face(results, reference)


def reverse_kl(logprobs, inputs):
    """Compute the loss of the example in docs/losses.md."""
    log_ratio = logprobs - inputs.extra["teacher"]
    return log_ratio, {"gap": log_ratio.detach().abs()}


def test_a_rank_without_samples_need_not_have_the_fields_of_a_callable(checkpoint, parity_folder):
    fields = [{"teacher": [-5.0 + 0.01 * position for position in range(len(ids) - 1)]} for ids in TOKENS]
    reference = hf_reference(parity_folder, checkpoint, TOKENS, steps=1, loss="reverse_kl", fields=fields)

    def on_rank():
        backend = make_backend(checkpoint, Parallel())
        result = backend.forward_backward(with_fields(fields) if backend.rank == 1 else [], reverse_kl)
        step = backend.optimizer_step()
        return result.loss, step.grad_norm, step.skipped, result.metrics

    results = run_distributed(on_rank, 2, init=False)
    equals_hugging_face(results, reference)
    assert results[0][3] == results[1][3]
    assert results[0][3]["gap"] > 0


# --- sums, and outputs of the pass ---


def signed(ids):
    """Build weights of both signs and 0, whose sum is negative in some samples."""
    return [(-1.5, 0.0, 0.5, 1.0, -0.25)[position % 5] for position in range(len(ids) - 1)]


def policy_fields(ids):
    return {
        "old_logprobs": [-5.6 - 0.1 * (position % 7) for position in range(len(ids) - 1)],
        "advantages": [0.5 - (len(ids) % 2)] * (len(ids) - 1),
    }


@pytest.mark.nightly_cases(
    "single*",  # covered: DP2, padded; TP2 + SP
    "CP2",  # covered: parity: CP2; TP2 + SP
    "PP2",  # covered: DP2, padded; TP2 + SP
)
@every_layout
def test_sums_policy_losses_and_log_probabilities_equal_hugging_faces(checkpoint, parity_folder, layout):
    """Compare without a step in between: at a learning rate of 0 nothing changes."""
    world_size, parallel, packing = LAYOUTS[layout]
    summed = [{"weights": signed(ids)} for ids in TOKENS]
    policy = [policy_fields(ids) for ids in TOKENS]
    cases = [("cross_entropy", "sum", summed)]
    cases += [
        (name, "sum", [a | b for a, b in zip(policy, summed, strict=True)])
        for name in ("cispo", "importance_sampling", "gspo")
    ]
    cases += [(name, "mean", policy) for name in ("cispo", "gspo", "dro")]

    def on_rank():
        backend = make_backend(checkpoint, parallel, packing, optimizer=Adam(lr=0.0))
        results = []
        for name, reduction, fields in cases:
            samples = with_fields([{key: entry[key] for key in entry if key != "weights"} for entry in fields])
            for sample, entry in zip(samples, fields, strict=True):
                if "weights" in entry:
                    sample.weights = torch.tensor(entry["weights"])
            share = backend.shard(samples)
            loss = replace(BUILT_IN[name], reduction=reduction)
            if (name, reduction) == ("gspo", "mean"):  # as a custom function, whose context parallel ranks must agree
                loss = replace(loss, function=lambda logprobs, inputs: gspo(logprobs, inputs))
            result = backend.forward_backward(share, loss, logprobs=True)
            step = backend.optimizer_step()
            positions = [next(i for i, candidate in enumerate(samples) if candidate is sample) for sample in share]
            results.append((result.loss, step.grad_norm, dict(zip(positions, result.logprobs, strict=True))))
        unweighted = causal_samples(TOKENS)
        for sample in unweighted:
            sample.weights = torch.zeros_like(sample.weights)
        result = backend.forward_backward(
            backend.shard(unweighted), Loss("none", lambda logprobs, _: -logprobs, reduction="sum")
        )
        return results, (result.loss, backend.optimizer_step().grad_norm)

    for results, unweighted in run_distributed(on_rank, world_size, init=False):
        assert unweighted == (0.0, 0.0)
        for (name, reduction, fields), (loss, norm, logprobs) in zip(cases, results, strict=True):
            reference = hf_reference(
                parity_folder, checkpoint, TOKENS, steps=1, loss=name, fields=fields, reduction=reduction
            )
            expected = [
                logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
                for logits, ids in zip(reference.logits, TOKENS, strict=True)
            ]
            # Terms of both signs cancel: a sum is only as exact as fp32 is for the largest partial sum.
            summed_up = sum(float(values.abs().sum()) for values in expected) if reduction == "sum" else 0.0
            bound = max(2e-5, torch.finfo(torch.float32).eps * summed_up)
            assert loss == pytest.approx(reference.losses[0], rel=2e-5, abs=bound), (name, reduction)
            assert norm == pytest.approx(reference.grad_norms[0], rel=5e-5), (name, reduction)
            for position, values in logprobs.items():
                assert torch.allclose(values, expected[position], atol=1e-5)


# --- a function whose gradient is known ---


@every_layout
def test_cross_entropy_with_custom_metrics_trains_like_hugging_face(checkpoint, parity_folder, layout):
    """Form the gradient without calling the loss's autograd; the loss gets the indices of its samples."""
    world_size, parallel, packing = LAYOUTS[layout]
    fields = [{"number": [float(number)] * (len(ids) - 1)} for number, ids in enumerate(TOKENS)]

    def on_rank():
        backend = make_backend(checkpoint, parallel, packing)
        share = backend.shard(with_fields(fields))
        numbers = torch.tensor([sample.extra["number"][0] for sample in share])

        def counted(logprobs, inputs):
            assert not logprobs.requires_grad
            matches = numbers[torch.tensor(inputs.members)][inputs.sample] == inputs.extra["number"]
            return -logprobs, {"twice": -2 * logprobs, "known": matches.float()}

        result = backend.forward_backward(share, Loss("counted", counted, is_cross_entropy=True))
        step = backend.optimizer_step()
        return result.loss, step.grad_norm, step.skipped, result.metrics

    results = run_distributed(on_rank, world_size, init=False)
    equals_hugging_face(results, hf_reference(parity_folder, checkpoint, TOKENS, steps=1))
    for loss, _, _, metrics in results:
        assert metrics == pytest.approx({"twice": 2 * loss, "known": 1.0}, rel=1e-6)


@pytest.mark.parametrize("layout", ["single", "CP2", "PP2"])
def test_and_where_it_raises_nothing_is_kept(checkpoint, layout):
    world_size, parallel, packing = LAYOUTS[layout]

    def on_rank():
        backend = make_backend(checkpoint, parallel, packing, timeout_s=600)

        def loss(logprobs, inputs):
            if backend.rank == world_size - 1:
                raise KeyError("teacher")
            return -logprobs

        with pytest.raises(LossFunctionError, match=f"rank {world_size - 1}: .*KeyError: 'teacher'"):
            backend.forward_backward(causal_samples(TOKENS), Loss("own", loss, is_cross_entropy=True))
        return [float(buffer.grad_data.abs().max()) for chunk in backend.engine.chunks for buffer in chunk.buffers]

    for leftover in run_distributed(on_rank, world_size, init=False, timeout_s=180):
        assert leftover == [0.0] * len(leftover)


def test_a_cross_entropy_is_of_tokens_by_their_log_probabilities():
    with pytest.raises(ConfigError, match=r"loss 'own': is_cross_entropy=True .*entropy=True"):
        Loss("own", lambda logprobs, inputs: -logprobs, entropy=True, is_cross_entropy=True)


def test_weights_below_0_are_for_sums(checkpoint):
    def on_rank():
        backend = make_backend(checkpoint, Parallel())
        samples = causal_samples(TOKENS)
        if backend.rank == 1:
            samples[3].weights[-1] = -1.0
        with pytest.raises(DataError, match=r"rank 1: sample 3 has a weight of -1\.0.*reduction='sum'"):
            backend.forward_backward(samples)

    run_distributed(on_rank, 2, init=False)


# --- a function that raises ---


def raises_forward(logprobs, inputs):
    raise KeyError("teacher")


class _RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise ArithmeticError("in the backward pass")


def raises_backward(logprobs, inputs):
    return _RaisesBackward.apply(-logprobs)


def raises_between_reductions(logprobs, inputs):
    inputs.sum_per_sample(logprobs)
    raise RuntimeError("after a sum over context parallel ranks")


FAILURES = {
    "KeyError: 'teacher'": raises_forward,
    "ArithmeticError: in the backward pass": raises_backward,
    "RuntimeError: after a sum": raises_between_reductions,
    "returned loss of shape": lambda logprobs, inputs: logprobs.sum(),
    "do not depend on logprobs": lambda logprobs, inputs: -logprobs.detach(),
}
RAISING_LAYOUTS = {
    "single": (1, Parallel()),
    "DP2": (2, Parallel()),
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True)),
    "PP2": (2, Parallel(pipeline=2)),
    "CP2": (2, Parallel(context=2)),
}


@pytest.mark.nightly_cases(
    "DP2",  # covered: TP2 + SP, CP2
    "PP2",  # covered: TP2 + SP, CP2
    "CP2",  # covered: TP2 + SP
)
@pytest.mark.parametrize("layout", RAISING_LAYOUTS)
def test_a_function_that_raises_on_one_rank_ends_the_step_on_all(checkpoint, layout):
    """Raise with its traceback, at once (the timeout is longer than the test's deadline), and keep nothing of the step."""
    world_size, parallel = RAISING_LAYOUTS[layout]

    def on_rank():
        backend = make_backend(checkpoint, parallel, timeout_s=600)
        samples = backend.shard(causal_samples(TOKENS))

        def on_the_last_rank(function):
            def loss(logprobs, inputs):
                if backend.rank == world_size - 1:
                    return function(logprobs, inputs)
                return -inputs.sum_per_sample(logprobs)[inputs.sample] if parallel.context > 1 else -logprobs

            return loss

        backend.forward_backward(samples)
        before = backend.optimizer_step()
        messages = []
        for function in FAILURES.values():
            backend.forward_backward(samples)  # what it has accumulated is dropped, too
            with pytest.raises(LossFunctionError) as caught:
                backend.forward_backward(samples, on_the_last_rank(function))
            messages.append(str(caught.value))
        backend.forward_backward(samples)
        after = backend.optimizer_step()
        return before, messages, after

    for _, messages, after in run_distributed(on_rank, world_size, init=False, timeout_s=120):
        for text, message in zip(FAILURES, messages, strict=True):
            assert message.startswith(f"rank {world_size - 1}: loss 'loss' "), message
            assert "micro batch 1" in message
            assert text in message
            if text[0].isupper():  # an exception of the function's own
                assert f"raise {text.split(':')[0]}" in message.partition("Traceback")[2]
        assert not after.skipped
        assert after == run_distributed(lambda: undisturbed(checkpoint, parallel), world_size, init=False)[0]


def undisturbed(checkpoint, parallel):
    """Return the second step of a run in which nothing raises."""
    backend = make_backend(checkpoint, parallel)
    for _ in range(2):
        backend.forward_backward(backend.shard(causal_samples(TOKENS)))
        step = backend.optimizer_step()
    return step


def test_unequal_reductions_of_context_parallel_ranks_raise(checkpoint):
    def on_rank():
        backend = make_backend(checkpoint, Parallel(context=2), timeout_s=600)

        def uneven(logprobs, inputs):
            for _ in range(1 + backend.rank):
                inputs.sum_per_sample(logprobs)
            return -logprobs

        with pytest.raises(LossFunctionError, match=r"equally often.*rank 0 returned; rank 1 reduces values of shape"):
            backend.forward_backward(causal_samples(TOKENS), uneven)

    run_distributed(on_rank, 2, init=False, timeout_s=180)


def test_a_function_that_hides_another_ranks_failure_does_not_hang(checkpoint):
    def on_rank():
        backend = make_backend(checkpoint, Parallel(context=2), timeout_s=600)

        def careless(logprobs, inputs):
            if backend.rank == 1:
                raise OSError("no such file")
            try:
                inputs.sum_per_sample(logprobs)
            except Exception:  # noqa: BLE001 - what this test is about
                return -logprobs
            return -logprobs

        with pytest.raises(LossFunctionError, match=r"rank 1: .*OSError: no such file"):
            backend.forward_backward(causal_samples(TOKENS), careless)

    run_distributed(on_rank, 2, init=False, timeout_s=180)


def test_loss_with_a_trainable_parameter_raises(checkpoint):
    """Refuse it, because its gradient would not be scaled, reduced or stepped."""

    def on_rank():
        backend = make_backend(checkpoint, Parallel())
        temperature = torch.ones(3, requires_grad=True)
        with pytest.raises(LossFunctionError, match=r"shape \(3,\) that requires a gradient"):
            backend.forward_backward(causal_samples(TOKENS), lambda logprobs, inputs: -logprobs * temperature.sum())

    run_distributed(on_rank, 1, init=False)


def test_a_function_may_work_in_place(checkpoint):
    def on_rank():
        backend = make_backend(checkpoint, Parallel())
        plain = backend.forward_backward(causal_samples(TOKENS), lambda logprobs, inputs: -logprobs)
        first = backend.optimizer_step().grad_norm, plain.loss
        backend.close()
        backend = make_backend(checkpoint, Parallel())
        in_place = backend.forward_backward(causal_samples(TOKENS), lambda logprobs, inputs: logprobs.neg_())
        return first, (backend.optimizer_step().grad_norm, in_place.loss)

    first, second = run_distributed(on_rank, 1, init=False)[0]
    assert second == first
