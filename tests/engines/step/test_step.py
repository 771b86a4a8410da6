"""The step on real ranks: normalisation, accumulation, skipping, every built-in loss, and the forward pass."""

import logging
import math

import pytest
import torch
import torch.distributed as dist

from megascend import Adam, Batching, Parallel, Sample
from megascend.errors import ConfigError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, hf_reference, token_lists

pytestmark = pytest.mark.usefixtures("megatron_imported")
LAYOUTS = {
    "single": (1, Parallel()),
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True)),
    "PP2": (2, Parallel(pipeline=2)),
    "CP2": (2, Parallel(context=2)),
    "DP2": (2, Parallel()),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    return case_checkpoint(parity_folder, "qwen3")


def make_backend(checkpoint, parallel=None, *, lr=1e-3, optimizer=None, **options):
    from megascend.backends import MegatronBackend

    options.setdefault("batching", Batching(micro_batch_tokens=64))
    options.setdefault("precision", "fp32")
    adam = Adam(lr=lr, **(optimizer or {}))
    return MegatronBackend(model=checkpoint, parallel=parallel or Parallel(), optimizer=adam, timeout_s=60, **options)


@pytest.mark.parametrize("virtual", [1, 2], ids=["PP2", "PP2 x VPP2"])
def test_pipeline_send_buffers_are_not_freed_early(checkpoint, virtual):
    """Keep a sent tensor until Gloo's send has completed; Megatron may free it once the send is posted."""

    def on_rank():
        from megatron.core.pipeline_parallel import schedules

        backend = make_backend(checkpoint, Parallel(pipeline=2, virtual_pipeline=virtual))
        free, is_intact = schedules.deallocate_output_tensor, []

        def watched(output, *settings):
            tensors = output if isinstance(output, list) else [output]  # lists from megatron-core 0.18 on
            tensors = [tensor for tensor in tensors if tensor is not None]
            before = [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
            free(output, *settings)
            is_intact.extend(
                (tensor.data_ptr(), tensor.shape) == state for tensor, state in zip(tensors, before, strict=True)
            )

        schedules.deallocate_output_tensor = watched
        backend.forward_backward(causal_samples(token_lists()))
        return is_intact

    for rank, is_intact in enumerate(run_distributed(on_rank, 2, init=False)):
        assert all(is_intact)
        assert len(is_intact) >= 2 or rank  # the last stage has nothing to send


def test_several_calls_add_up(checkpoint):
    """Sum the gradients of two calls on halves with equally many trained tokens: twice the mean's norm."""
    samples = causal_samples(token_lists(lengths=(20, 20, 30, 30)))

    def on_rank():
        backend = make_backend(checkpoint, lr=0.0)
        backend.forward_backward(samples)
        single_norm = backend.optimizer_step().grad_norm
        backend.forward_backward(samples[0:3:2])
        backend.forward_backward(samples[1:4:2])
        return single_norm, backend.optimizer_step().grad_norm

    single_norm, summed_norm = run_distributed(on_rank, 1, init=False)[0]
    assert summed_norm == pytest.approx(2 * single_norm, rel=1e-5)


def test_overlapped_reduction_refuses_a_second_call(checkpoint):
    def on_rank():
        backend = make_backend(checkpoint, optimizer={"overlap_grad_reduce": True})
        backend.forward_backward(causal_samples(token_lists()))
        with pytest.raises(ConfigError, match="overlap_grad_reduce"):
            backend.forward_backward(causal_samples(token_lists()))

    run_distributed(on_rank, 2, init=False)


def test_gradients_of_every_chunk_start_from_zero(checkpoint):
    """Repeat steps at a learning rate of 0: norms are equal without leftover gradients, and every rank reports its starts."""

    def on_rank():
        backend = make_backend(checkpoint, Parallel(pipeline=2, virtual_pipeline=2), lr=0.0)
        norms, progress = [], []
        backend.on_micro_batch = lambda started, count: progress.append((started, count))
        for _ in range(3):
            result = backend.forward_backward(causal_samples(token_lists()))
            norms.append(backend.optimizer_step().grad_norm)
        return norms, progress, result.micro_batches

    for norms, progress, count in run_distributed(on_rank, 2, init=False):
        assert progress == [(number // 2, count) for number in range(2 * count)] * 3
        assert count > 1
        assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-6)


@pytest.mark.core_cases("PP2")
@pytest.mark.parametrize("layout", ["DP2", "TP2 + SP", "PP2"])
def test_a_step_with_nan_on_one_rank_is_skipped_by_all(checkpoint, layout):
    world_size, parallel = LAYOUTS[layout]

    def on_rank():
        backend = make_backend(checkpoint, parallel, lr=1e-2)
        samples = backend.shard(causal_samples(token_lists()))

        def poisoned(logprobs, inputs):
            values = -logprobs
            return values * math.nan if dist.get_rank() == world_size - 1 else values

        before = [p.clone() for chunk in backend.engine.bare_chunks for p in chunk.parameters()]
        backend.forward_backward(samples)
        good = backend.optimizer_step()
        middle = [p.clone() for chunk in backend.engine.bare_chunks for p in chunk.parameters()]
        skips = []
        for _ in range(2):
            backend.forward_backward(samples, poisoned)
            skips.append(backend.optimizer_step())
        after = [p.clone() for chunk in backend.engine.bare_chunks for p in chunk.parameters()]
        backend.forward_backward(samples)
        last = backend.optimizer_step()
        moved = any(not torch.equal(a, b) for a, b in zip(before, middle, strict=True))
        unchanged = all(torch.equal(a, b) for a, b in zip(middle, after, strict=True))
        return good.skipped, moved, [s.skipped for s in skips], skips[1].skipped_in_a_row, unchanged, last

    for good, moved, skips, in_a_row, unchanged, last in run_distributed(on_rank, world_size, init=False):
        assert (good, moved, skips, in_a_row, unchanged) == (False, True, [True, True], 2, True)
        assert not last.skipped
        assert last.skipped_in_a_row == 0
        assert math.isfinite(last.grad_norm)


def test_a_norm_that_is_not_finite_on_one_rank_only_skips_the_step_on_all(checkpoint):
    """Fake the norm of one rank: a NaN in its gradients would reach the other by their reduction."""

    def on_rank():
        # The distributed optimizer would gather parameters in a step, in which ranks that differ would wait for each other.
        backend = make_backend(checkpoint, lr=1e-2, optimizer={"distributed": False})
        backend.forward_backward(backend.shard(causal_samples(token_lists())))
        optimizer = backend.engine.optimizer.megatron
        norm = optimizer.get_grad_norm
        if backend.rank == 1:
            optimizer.get_grad_norm = lambda: math.nan * norm()
        before = [p.clone() for p in backend.engine.bare_chunks[0].parameters()]
        step = backend.optimizer_step()
        unchanged = all(map(torch.equal, before, backend.engine.bare_chunks[0].parameters()))
        return step.skipped, step.skipped_in_a_row, math.isfinite(step.grad_norm), unchanged

    assert run_distributed(on_rank, 2, init=False) == [(True, 1, False, True)] * 2


def policy_fields(tokens):
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "old_logprobs": (-5 + torch.randn(len(ids) - 1, generator=generator)).tolist(),
            "advantages": torch.randn(len(ids) - 1, generator=generator).tolist(),
            "ref_logprobs": (-6 + torch.randn(len(ids) - 1, generator=generator)).tolist(),
            "pair": index // 2,
            "chosen": index % 2 == 0,
            "label": index % 3 % 2,
        }
        for index, ids in enumerate(tokens)
    ]


def policy_samples(tokens, fields):
    samples = []
    for base, extra in zip(causal_samples(tokens), fields, strict=True):
        samples.append(Sample(input_ids=base.input_ids, target_ids=base.target_ids, weights=base.weights, **extra))
    return samples


LOSS_METRICS = {
    "importance_sampling": {"ratio"},
    "ppo": {"ratio", "clip_fraction", "kl"},
    "dpo": {"accuracy", "reward_chosen", "reward_rejected"},
    "orpo": {"accuracy", "nll_chosen", "log_odds_ratio"},
    "simpo": {"accuracy", "reward_chosen", "reward_rejected"},
    "kto": {"accuracy", "reference_point"},
}


@every_layout
@pytest.mark.nightly_cases("single", "DP2")  # covered: TP2 + SP; PP2; CP2; DP2 in test_loss_in_every_layout.py
def test_policy_and_preference_losses_equal_the_papers_formulas(checkpoint, parity_folder, layout):
    """Take a step of each loss at a learning rate of 0."""
    world_size, parallel = LAYOUTS[layout]
    tokens = token_lists()
    fields = policy_fields(tokens)

    def on_rank():
        backend = make_backend(checkpoint, parallel, lr=0.0, batching=Batching(micro_batch_tokens=100))
        samples, figures = backend.shard(policy_samples(tokens, fields)), {}
        for loss in LOSS_METRICS:
            result = backend.forward_backward(samples, loss)
            figures[loss] = result.loss, backend.optimizer_step().grad_norm, result.metrics
        return figures

    for figures in run_distributed(on_rank, world_size, init=False):
        for loss, (value, norm, metrics) in figures.items():
            expected = hf_reference(parity_folder, checkpoint, tokens, steps=1, loss=loss, fields=fields)
            assert value == pytest.approx(expected.losses[0], rel=2e-5, abs=1e-5), loss
            assert norm == pytest.approx(expected.grad_norms[0], rel=2e-5), loss
            assert set(metrics) == LOSS_METRICS[loss]
            assert all(math.isfinite(figure) for figure in metrics.values())


def test_gradient_beyond_float32_of_one_token_is_skipped_by_all_and_reported_once(checkpoint):
    def on_rank():
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("megascend.training.batch.results").addHandler(handler)
        backend = make_backend(checkpoint, lr=1e-2)
        tokens = token_lists()
        fields = policy_fields(tokens)
        samples = backend.shard(policy_samples(tokens, fields))
        before = [p.clone() for chunk in backend.engine.bare_chunks for p in chunk.parameters()]
        if dist.get_rank() == 1:
            samples[0].old_logprobs[-1], samples[0].advantages[-1] = -110.0, 0.5
        result = backend.forward_backward(samples, "importance_sampling")
        step = backend.optimizer_step()
        after = [p.clone() for chunk in backend.engine.bare_chunks for p in chunk.parameters()]
        unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return step.skipped, unchanged, result.loss, result.metrics, list(result.metrics), records

    ranks = run_distributed(on_rank, 2, init=False)
    for skipped, unchanged, loss, metrics, *_ in ranks:
        assert (skipped, unchanged, loss) == (True, True, -math.inf)
        assert math.isfinite(metrics["ratio"])
    (*_, [message]), (*_, no_messages) = ranks
    assert message.startswith("loss 'importance_sampling' is -inf: a token with a weight has a value beyond float32")
    assert no_messages == []


@every_layout
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.nightly_cases("False-CP2", "False-DP2", "False-PP2")  # covered: packed; padded under TP2 + SP
def test_forward_returns_each_samples_logprobs_in_the_callers_order(checkpoint, parity_folder, layout, packing):
    world_size, parallel = LAYOUTS[layout]
    tokens = token_lists()
    logits = hf_reference(parity_folder, checkpoint, tokens, steps=0).logits
    log_p = [entry.log_softmax(-1) for entry in logits]
    expected = [p.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] for p, ids in zip(log_p, tokens, strict=True)]
    entropies = [-(p.exp() * p).sum(-1) for p in log_p]

    def on_rank():
        backend = make_backend(checkpoint, parallel, batching=Batching(micro_batch_tokens=128, packing=packing))
        indices = range(backend.topology.coordinates(backend.rank).data, len(tokens), backend.topology.data)
        samples = causal_samples(tokens)
        result = backend.forward([samples[index] for index in indices], entropy=True, logits=True)
        cut = [Sample(ids[:cut], ids[:cut], [0.0] * cut) for cut, ids in zip(cuts, tokens, strict=True)]
        following = backend.next_token_logits([cut[index] for index in indices])
        first_only = backend.next_token_logits(cut[:1] if 0 in indices else [])  # with DP, a rank has nothing
        return list(indices), result, following, first_only

    cuts = [max(1, len(ids) - 1 - number % 3) for number, ids in enumerate(tokens)]
    for indices, result, following, first_only in run_distributed(on_rank, world_size, init=False):
        assert len(first_only) == (0 in indices)
        for position, index in enumerate(indices):
            last = logits[index][cuts[index] - 1]
            torch.testing.assert_close(following[position], last, atol=1e-5, rtol=1e-5)
            if index == 0:
                torch.testing.assert_close(first_only[0], last, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(result.logprobs[position], expected[index], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(result.entropy[position], entropies[index], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(result.logits[position], logits[index], atol=1e-5, rtol=1e-5)


def test_a_rank_without_samples_joins_the_others_collectives(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    tokens = token_lists()
    expected = hf_reference(parity_folder, checkpoint, tokens, steps=1)

    def on_rank():
        backend = make_backend(checkpoint, Parallel(expert=2))
        samples = causal_samples(tokens) if backend.rank == 0 else []
        result = backend.forward_backward(samples)
        return result.loss, backend.optimizer_step().grad_norm, backend.forward(samples).logprobs

    for rank, (loss, norm, logprobs) in enumerate(run_distributed(on_rank, 2, init=False)):
        assert loss == pytest.approx(expected.losses[0], abs=1e-5)
        assert norm == pytest.approx(expected.grad_norms[0], abs=1e-4)
        assert len(logprobs) == (len(tokens) if rank == 0 else 0)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_precision_asked_for_is_the_one_that_runs(checkpoint, precision):
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]

    def on_rank():
        backend = make_backend(checkpoint, Parallel(pipeline=2), precision=precision)
        engine = backend.engine
        parameters = {p.dtype for chunk in engine.bare_chunks for p in chunk.parameters()}
        result = backend.forward_backward(causal_samples(token_lists()))
        step = backend.optimizer_step()
        masters = {p.dtype for group in engine.optimizer.megatron.param_groups for p in group["params"]}
        return parameters, engine.config.pipeline_dtype, masters, result.loss, step

    for parameters, pipeline_dtype, masters, loss, step in run_distributed(on_rank, 2, init=False):
        assert parameters == {dtype}
        assert pipeline_dtype == dtype
        assert masters == {torch.float32}
        assert math.isfinite(loss)
        assert not step.skipped
        assert step.loss_scale == (2.0**16 if precision == "fp16" else 1.0)
