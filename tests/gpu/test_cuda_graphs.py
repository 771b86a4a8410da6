"""Micro batches as CUDA graphs equal eager ones, whatever changes between replays. Needs a CUDA GPU."""

from contextlib import nullcontext

import pytest
import torch

import megascend
from megascend.testing.parity import case_checkpoint
from support.graphed_steps import differences, life, life_of_a_model

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

REPLAYED = 1e-4
"""Bound of relative differences between replays and the same padded work without graphs: the same kernels."""
PADDED, POLICY = 2e-2, 1e-1
"""Bounds between padded and other work, in bf16: padding changes the sizes of products and attention, and so their kernels. The
policy is far from its old log-probabilities, and its loss has the exponential of the difference."""

MODEL_BOUND = 1e-3
"""As REPLAYED, for all parameters: attention's backward pass adds in no fixed order, and a gradient's last bit decides some
roundings of parameters to bf16."""

LENGTHS = (300, 150, 90, 500, 64, 1)


def make_backend(checkpoint, settings, *, adapters=True, micro_batch_tokens=600, **options):
    return megascend.MegatronBackend(
        model=checkpoint,
        platform="cuda",
        precision="bf16",
        optimizer=megascend.Adam(lr=1e-4, eps=1e-6),
        batching=megascend.Batching(micro_batch_tokens=micro_batch_tokens, cuda_graphs=settings),
        adapters=megascend.Adapters() if adapters else None,
        **options,
    )


@pytest.fixture(scope="module")
def checkpoint(parity_folder):
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return case_checkpoint(parity_folder, "qwen3", max_position_embeddings=1024, **shape)


class Refuses:
    """Capture that always fails, so that padded work runs eagerly each time."""

    bytes = 0

    def capture(self, work):
        raise RuntimeError("not captured, on purpose")

    def stream(self):
        return nullcontext()

    def wait(self):
        torch.cuda.synchronize()

    def free(self):
        torch.cuda.empty_cache()


def life_of(checkpoint, settings, capture=None, **options):
    """Return (figures, report)."""
    backend = make_backend(checkpoint, None if capture else settings, **options)
    try:
        if capture is not None:
            backend.engine.use_cuda_graphs(settings, capture)
        return life(backend, LENGTHS), backend.cuda_graphs
    finally:
        backend.close()


@pytest.fixture(scope="module")
def padded(checkpoint):
    return life_of(checkpoint, megascend.CudaGraphs(max_count=64), Refuses())


def check(results, expected, bound):
    """Compare figures; ``bound`` maps the name of a figure to its bound."""
    deviations = differences(results, expected)
    for name, difference in deviations.items():
        print(f"{difference:.1e} {name}")
    assert not {name: value for name, value in deviations.items() if value > bound(name)}


def test_padding_changes_no_more_than_rounding(checkpoint, padded):
    plain, _ = life_of(checkpoint, None)
    results, report = padded
    assert report.captured == 0
    check(results, plain, lambda name: POLICY if name.startswith("policy") else PADDED)


@pytest.mark.parametrize(
    "settings",
    [megascend.CudaGraphs(max_count=64), megascend.CudaGraphs(max_count=2)],
    ids=["all kept", "two kept"],
)
def test_replays_equal_the_same_work_without_graphs(checkpoint, padded, settings, caplog):
    caplog.clear()
    results, report = life_of(checkpoint, settings)
    print(report)
    check(results, padded[0], lambda name: REPLAYED)
    assert not report.eager, "everything was captured"
    assert "could not be captured" not in caplog.text
    assert report.captured > 5
    assert report.captures <= settings.max_count
    if settings.max_count > 2:
        assert report.replayed > report.captured
        assert report.captures == report.captured
        assert 0 < report.capture_bytes < 2**30


def test_expert_adapters_equal_eager(parity_folder, caplog):
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe", max_position_embeddings=1024)
    settings, grouped = megascend.CudaGraphs(max_count=64), {"moe": megascend.Moe(experts="grouped")}
    padded, _ = life_of(checkpoint, settings, Refuses(), **grouped)
    caplog.clear()
    results, report = life_of(checkpoint, settings, **grouped)
    print(report)
    check(results, padded, lambda name: MODEL_BOUND)
    assert not report.eager, "everything was captured"
    assert "could not be captured" not in caplog.text
    assert report.replayed > report.captured > 5


def test_repeated_replays_equal_the_first_run(checkpoint):
    """Replay the same kernels on the same memory: no tensor that a graph reads has moved or been freed."""
    backend = make_backend(checkpoint, megascend.CudaGraphs())
    for name in ("a", "b", "c"):
        backend.add_adapter(name, megascend.Lora(rank=8))
    generator = torch.Generator().manual_seed(5)
    samples = [
        megascend.Sample.causal(torch.randint(0, backend.vocab_size, (length,), generator=generator))
        for length in (200, 31, 90)
    ]
    for sample, name in zip(samples, ("a", "b", "c"), strict=True):
        sample.adapter = name

    def figures():
        """Return losses, gradients, which are then dropped, and log-probabilities."""
        backend.forward_backward(samples)
        grads = {name: adapter.grads.clone() for name, adapter in backend.adapters.items()}
        backend.forward_backward(samples[:1])
        a_only = backend.adapters["a"].grads.clone() - grads["a"]
        backend.discard_gradients(list(backend.adapters))
        return [*grads.values(), a_only, *backend.forward(samples).logprobs, *backend.forward(samples[:1]).logprobs]

    first = figures()
    for _ in range(3):
        second = figures()
        # Overwrite freed memory of the eager path with NaN between replays: a capture that reads any of it would return NaN.
        junk = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
        del junk
        torch.cuda.empty_cache()
        for length in range(2, 40):  # more rotary tables than upstream keeps
            backend.engine.bare_chunks[0].rotary_pos_emb(length)
        for reference, repeated in zip(first, second, strict=True):
            deviation = (reference.double() - repeated.double()).norm() / reference.double().norm()
            assert deviation <= 1e-3, float(deviation)  # attention's backward pass adds in no fixed order
    report = backend.cuda_graphs
    assert report.captured >= 4
    assert report.replayed >= 12
    backend.close()


def test_memory_stays_bounded(checkpoint):
    """Use random lengths, padded to four sizes: graphs share one pool, which stays at the size of the largest one."""
    backend = make_backend(checkpoint, megascend.CudaGraphs(max_tokens=512, max_count=3))
    backend.add_adapter("a", megascend.Lora(rank=8))
    generator = torch.Generator().manual_seed(7)
    sizes = []
    for step in range(150):
        length = 512 if step < 3 else int(torch.randint(20, 512, (1,), generator=generator))
        ids = torch.randint(0, backend.vocab_size, (length + 1,), generator=generator)
        backend.forward_backward([megascend.Sample.causal(ids)], adapter="a")
        backend.optimizer_step("a")
        sizes.append(backend.cuda_graphs.capture_bytes)
    report = backend.cuda_graphs
    print(report, sizes[::10])
    assert report.captures <= 3
    assert report.dropped, "more shapes came than are kept"
    assert sizes[-1] <= 2 * sizes[20], "the pool has its size early on"
    backend.close()
    left = {}
    for segment in torch.cuda.memory_snapshot():
        if any(segment["segment_pool_id"]):
            sizes = [block["size"] for block in segment["blocks"] if block["state"].startswith("active")]
            left[tuple(segment["segment_pool_id"]), segment["address"]] = segment["total_size"], sizes
    assert not left, "all of it goes with the backend"


def test_graphs_are_captured_again_after_the_last_one_is_dropped(checkpoint):
    backend = make_backend(checkpoint, megascend.CudaGraphs(max_count=1))
    backend.add_adapter("a", megascend.Lora(rank=8))
    for length in (100, 300, 100):
        for _ in range(3):
            backend.forward_backward([megascend.Sample.causal(list(range(3, 4 + length)))], adapter="a")
            backend.optimizer_step("a")
    report = backend.cuda_graphs
    backend.close()
    assert not report.eager
    assert (report.captured, report.replayed) == (3, 6)


def life_of_one_model(checkpoint, settings, capture=None):
    """Return (figures, report) of a model whose own parameters are trained."""
    backend = make_backend(checkpoint, None if capture else settings, adapters=False, micro_batch_tokens=384)
    try:
        if capture is not None:
            backend.engine.use_cuda_graphs(settings, capture)
        return life_of_a_model(backend), backend.cuda_graphs
    finally:
        backend.close()


def test_full_model_trains_equally(checkpoint, caplog):
    settings = megascend.CudaGraphs(max_count=64)
    plain, _ = life_of_one_model(checkpoint, None)
    padded, _ = life_of_one_model(checkpoint, settings, Refuses())
    check(padded, plain, lambda name: POLICY if "ppo" in name else PADDED)
    caplog.clear()
    results, report = life_of_one_model(checkpoint, settings)
    print(report)
    check(results, padded, lambda name: MODEL_BOUND)
    assert not report.eager, "everything was captured"
    assert "could not be captured" not in caplog.text
    assert report.captured > 5
    assert report.replayed > report.captured
