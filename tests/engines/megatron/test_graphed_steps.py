"""Micro batches that are padded to a few shapes and replayed: the figures are those of micro batches as they come."""

import pytest

from megascend import Adam, Adapters, Batching
from megascend.config import CudaGraphs
from megascend.testing import run_distributed
from megascend.testing.graphed_steps import CaptureAgain, differences, life
from megascend.testing.parity import case_checkpoint

pytestmark = pytest.mark.usefixtures("megatron_imported")

BOUND = 1e-5
"""Of relative differences in fp32: products of other numbers of rows, and ranks padded with zeros, are added in another order."""


def make_backend(checkpoint, settings=None, **options):
    from megascend.backends import MegatronBackend

    backend = MegatronBackend(
        checkpoint,
        precision="fp32",
        optimizer=Adam(lr=1e-4, eps=1e-6),
        batching=Batching(micro_batch_tokens=options.pop("micro_batch_tokens", 120)),
        adapters=Adapters(**options),
        timeout_s=60,
    )
    if settings is not None:
        graph(backend, settings)
    return backend


def graph(backend, settings):
    """As ``adapters.cuda_graphs`` would, with a stand-in for CUDA graphs."""
    engine = backend.engine

    def gradients():
        stacked = engine.adapters.layers.stacked
        return [] if stacked is None else [of for stack in stacked.stacks for of in (stack.a_grads, stack.b_grads)]

    engine.graph_steps(settings, CaptureAgain(gradients))


def test_a_life_of_adapters_is_the_same(parity_folder, caplog):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)

    def lives():
        expected = life_of(None)
        reports = {}
        found = {}
        for name, settings in {
            "roomy": CudaGraphs(max_tokens=512),
            "tight": CudaGraphs(max_tokens=128, max_count=2),
        }.items():
            found[name], reports[name] = life_of(settings)
        return expected[0], found, reports

    def life_of(settings):
        backend = make_backend(checkpoint, settings)
        found = life(backend)
        report = backend.engine.graphs.report() if settings else None
        backend.close()
        return found, report

    expected, found, reports = run_distributed(lives, 1, init=False, timeout_s=200)[0]
    for name, figures in found.items():
        apart = differences(figures, expected)
        print(name, reports[name], max(apart.items(), key=lambda entry: entry[1]))
        assert max(apart.values()) <= BOUND, {key: value for key, value in apart.items() if value > BOUND}
    assert reports["roomy"].replayed > reports["roomy"].captured > 4
    assert reports["roomy"].captures == reports["roomy"].captured, "nothing needed to be captured twice"
    assert reports["tight"].captures <= 2
    assert reports["tight"].dropped
