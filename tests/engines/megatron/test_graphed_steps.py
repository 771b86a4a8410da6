"""Micro batches that are padded to a few shapes and replayed give the results of plain micro batches.

CUDA graphs themselves are tested in tests/gpu/test_cuda_graphs.py; here a stand-in on the CPU replaces them.
"""

import pytest
import torch

from megascend import Adam, Adapters, Batching, CudaGraphs, Lora, Moe, Sample
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from support.graphed_steps import LAYOUTS, CaptureOnCpu, differences, gradients_of, life, life_of_a_model

pytestmark = pytest.mark.usefixtures("megatron_imported")

BOUND = 1e-5
"""Bound of relative differences in fp32: products with other row counts or padded ranks have another order of additions."""


def make_backend(checkpoint, settings=None, *, strict=False, micro_batch_tokens=240, adapters=True, **options):
    """Build a backend with ``settings`` as ``batching.cuda_graphs``, but with a stand-in for CUDA graphs."""
    from megascend.backends import MegatronBackend

    backend = MegatronBackend(
        checkpoint,
        precision="fp32",
        optimizer=Adam(lr=1e-4, eps=1e-6),
        batching=Batching(micro_batch_tokens=micro_batch_tokens),
        adapters=Adapters() if adapters else None,
        timeout_s=60,
        **options,
    )
    if settings is not None:
        backend.engine.use_cuda_graphs(settings, CaptureOnCpu(lambda: gradients_of(backend), strict=strict))
    return backend


def life_of(checkpoint, settings, **options):
    backend = make_backend(checkpoint, settings, **options)
    figures, report = life(backend), backend.cuda_graphs
    backend.close()
    return figures, report


def without_and_with(figures, settings=None):
    """Return ``figures`` of no setting, and of ``settings`` (default: CudaGraphs()), computed in a process of their own."""
    return run_distributed(lambda: (figures(None), figures(settings or CudaGraphs())), 1, init=False)[0]


def test_a_life_of_adapters_of_experts_is_the_same(parity_folder):
    """Send padding to experts as well; every row of theirs belongs to an adapter."""
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe", num_hidden_layers=2)

    def lives():
        settings = {"plain": None, "graphs": CudaGraphs(max_tokens=512, max_count=64)}
        return {name: life_of(checkpoint, value, moe=Moe(experts="grouped")) for name, value in settings.items()}

    results = run_distributed(lives, 1, init=False, timeout_s=300)[0]
    (expected, _), (figures, report) = results["plain"], results["graphs"]
    errors = differences(figures, expected)
    print(report, max(errors.items(), key=lambda entry: entry[1]))
    assert max(errors.values()) <= BOUND, {key: value for key, value in errors.items() if value > BOUND}
    assert report.replayed > report.captured > 4
    assert all("logprobs" in reason for reason in report.eager), "what the stand-in cannot capture"


def test_a_model_is_replayed_operation_by_operation(parity_folder):
    """Check that a replay depends on static memory only, not on any number of the call in which it was captured."""
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)
    layouts = {name: lengths for name, lengths in LAYOUTS.items() if name in ("rows", "one", "row")}

    def figures(settings):
        backend = make_backend(checkpoint, settings, strict=True, micro_batch_tokens=384, adapters=False)
        actual, report = life_of_a_model(backend, layouts), backend.cuda_graphs
        backend.close()
        return actual, report

    (expected, _), (actual, report) = without_and_with(figures)
    errors = differences(actual, expected)
    print(report, max(errors.items(), key=lambda entry: entry[1]))
    assert max(errors.values()) <= BOUND, {key: value for key, value in errors.items() if value > BOUND}
    assert report.eager == {}
    assert report.captured == report.captures == 2 * 3, "rows, and one sample of 384 tokens; two losses, and forward"


def test_a_checkpoint_is_loaded_to_where_captured_work_reads(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)
    sample = Sample.causal((torch.arange(385) * 7) % 300)

    def figures(settings):
        backend = make_backend(checkpoint, settings, strict=True, micro_batch_tokens=384, adapters=False)
        results, folder = [], tmp_path / ("graphs" if settings else "plain")
        for number in range(8):
            if number == 3:
                backend.save(folder)
            if number == 6:
                backend.load(folder)
            results += [backend.forward_backward([sample]).loss, backend.optimizer_step().grad_norm]
        report = backend.cuda_graphs
        backend.close()
        return results, report

    (expected, _), (actual, report) = without_and_with(figures)
    assert actual == pytest.approx(expected, rel=1e-5)
    assert actual[12:] == pytest.approx(actual[6:10], rel=1e-6), "what followed the save follows the load"
    assert actual[12] != pytest.approx(actual[10], rel=1e-3)
    assert (report.captured, report.replayed, report.eager) == (1, 7, {})


class FailsInTheBackwardPass(CaptureOnCpu):
    """Capture that fails in the backward pass: nothing was computed, and a gradient is left in ``grad``."""

    def __init__(self, backend):
        super().__init__(lambda: gradients_of(backend))
        self.backend = backend

    def capture(self, work):
        super().capture(work)
        for parameter in self.backend.engine.bare_chunks[0].parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        raise RuntimeError("broken, on purpose")


def test_a_capture_that_fails_leaves_no_gradient_behind(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)

    def figures(settings):
        backend = make_backend(checkpoint, None, micro_batch_tokens=384, adapters=False)
        if settings is not None:
            backend.engine.use_cuda_graphs(settings, FailsInTheBackwardPass(backend))
        actual = life_of_a_model(backend, {"rows": LAYOUTS["rows"]})
        report = backend.cuda_graphs
        backend.close()
        return actual, report

    (expected, _), (actual, report) = without_and_with(figures)
    assert max(differences(actual, expected).values()) <= BOUND
    assert report.captured == 0
    assert len(report.eager) == 3, "two losses, and forward"


def test_uncaptured_steps_run_eagerly_and_are_reported_once(parity_folder, caplog):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)

    def reports():
        backend = make_backend(checkpoint, CudaGraphs(max_tokens=128))
        backend.add_adapter("drops", Lora(rank=2, dropout=0.5))
        backend.add_adapter("keeps", Lora(rank=2))
        losses = []
        for name, length in (("drops", 9), ("drops", 10), ("keeps", 170), ("keeps", 180), ("keeps", 9)):
            ids = torch.arange(length + 1) % 90
            losses.append(backend.forward_backward([Sample.causal(ids)], adapter=name).loss)
        report = backend.cuda_graphs
        backend.remove_adapter("keeps")
        stacks = backend.engine.adapters._pool._stacks.values()
        left = sum(float(stack.b.abs().sum() + stack.a.abs().sum()) for entry in stacks for stack in entry.stacks)
        backend.close()
        return losses, report, left

    losses, report, left = run_distributed(reports, 1, init=False)[0]
    assert all(loss > 0 for loss in losses)
    assert report.eager == {
        "adapters with dropout": 2,
        "micro batches above batching.cuda_graphs.max_tokens=128 tokens": 2,
    }
    assert (report.first, report.captured, report.replayed) == (1, 0, 0)
    assert left == 0, "a removed adapter leaves no copy of its values"


class Full:
    """Forward pass of a model on a device that runs out of memory for ``tokens`` or more beside captures."""

    def __init__(self, engine, tokens, times):
        self.graphs, self.tokens, self.times = engine.graphs, tokens, times
        self.forward, engine._forward_chunk = engine._forward_chunk, self

    def __call__(self, chunk, batch):
        hidden = self.forward(chunk, batch)
        if self.graphs.report().captures and batch.input_ids.numel() >= self.tokens and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("no room, on purpose")
        return hidden


def test_captures_make_room_when_memory_runs_out(parity_folder, caplog):
    """Retry the micro batch that ran out of memory without captures; larger ones are not captured any more."""
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)
    lengths = (20, 20, 20, 140, 140, 140, 300, 140, 20, 20, 20)

    def figures(settings):
        backend = make_backend(checkpoint, settings, micro_batch_tokens=400)
        backend.add_adapter("a", Lora(rank=4))
        if settings is not None:
            Full(backend.engine, 300, times=1)
        actual = []
        for length in lengths:
            sample = Sample.causal((torch.arange(length + 1) * 7) % 300)
            for loss in ("cross_entropy", "importance_sampling"):
                sample.old_logprobs, sample.advantages = torch.full((length,), -5.5), torch.linspace(-1, 1, length)
                actual.append(backend.forward_backward([sample], loss, adapter="a").loss)
            actual.append(backend.optimizer_step("a").grad_norm)
        report = backend.cuda_graphs
        backend.close()
        return torch.tensor(actual, dtype=torch.float64), report

    (expected, _), (actual, report) = without_and_with(figures, CudaGraphs(max_tokens=512))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert report.dropped == 4, "of 128 and 256 tokens, two losses each"
    assert report.captures == 2
    assert report.captured == 4 + 2, "those of 128 tokens again"
    reason = "micro batches of sizes at which captures ran out of memory"
    assert report.eager == {reason: 1 + 2}, "importance sampling of the long one, and the next one of 140 tokens"


def test_memory_that_runs_out_in_a_backward_pass_is_an_error_after_which_there_is_room(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)

    def figures():
        backend = make_backend(checkpoint, CudaGraphs())
        backend.add_adapter("a", Lora(rank=4))
        short, long = (Sample.causal((torch.arange(length + 1) * 7) % 300) for length in (20, 140))
        for _ in range(2):
            backend.forward_backward([short], adapter="a")
        backend.discard_gradients()
        expected = backend.engine.adapters.registry["a"].grads.clone()

        def no_room(grad):
            raise torch.OutOfMemoryError("no room, on purpose")

        engine = backend.engine
        forward = engine._forward_chunk

        def fails_once(chunk, batch):
            engine._forward_chunk = forward
            hidden = forward(chunk, batch)
            hidden.register_hook(no_room)
            return hidden

        engine._forward_chunk = fails_once
        try:
            backend.forward_backward([long], adapter="a")
        except torch.OutOfMemoryError:
            captures, dropped = backend.cuda_graphs.captures, backend.cuda_graphs.dropped
        assert backend.recover_memory()
        unchanged = torch.equal(backend.engine.adapters.registry["a"].grads, expected)
        repeated = backend.forward_backward([long], adapter="a").loss
        backend.discard_gradients()
        plain = backend.forward([long], adapter="a").logprobs[0]
        backend.close()
        return captures, dropped, unchanged, repeated, -float(plain.mean())

    captures, dropped, unchanged, repeated_loss, plain = run_distributed(figures, 1, init=False)[0]
    assert (captures, dropped) == (0, 1)
    assert unchanged, "what was half done counts nowhere"
    assert repeated_loss == pytest.approx(plain, rel=1e-5)
