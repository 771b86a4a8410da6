"""A checkpoint of one layout loads under any other with equal parameters and moments.

Each loaded checkpoint is saved again, and torch's own reader reads both as full tensors for the comparison.
"""

import functools
import itertools

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from megascend import Adam, Batching, Parallel
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.usefixtures("megatron_imported")

LAYOUTS = {
    "single": (1, Parallel()),
    "TP2": (2, Parallel(tensor=2)),
    "PP2": (2, Parallel(pipeline=2)),
    "DP2": (2, Parallel()),
    "EP2": (2, Parallel(expert=2)),
}
SETS = {
    "two": [("TP2", "EP2"), ("EP2", "TP2")],
    "all": list(itertools.permutations(LAYOUTS, 2)),
}
"""Layouts of a checkpoint, and those under which it is loaded. In CI each of two is saved and loaded once."""

over_pairs = pytest.mark.parametrize(
    ("pairs", "saved", "loaded"),
    [
        pytest.param(key, *pair, id=f"{' to '.join(pair)}, {key}", marks=[pytest.mark.nightly] if key == "all" else [])
        for key, pairs in SETS.items()
        for pair in pairs
    ],
)


def on_layout(layout, work):
    """Return a function that runs ``work(backend, samples, ...)`` on every rank of ``layout``, with rank 0's result."""
    world_size, parallel = LAYOUTS[layout]

    def on_rank(checkpoint, *arguments):
        from megascend.backends import MegatronBackend

        with MegatronBackend(
            model=checkpoint,
            parallel=parallel,
            precision="fp32",
            optimizer=Adam(lr=1e-3),
            batching=Batching(micro_batch_tokens=64),
            timeout_s=60,
        ) as backend:
            return work(backend, backend.shard(causal_samples(token_lists())), *arguments)

    return lambda *arguments: run_distributed(on_rank, world_size, *arguments, init=False, timeout_s=120)[0]


def step(backend, samples):
    result = backend.forward_backward(samples)
    return result.loss, backend.optimizer_step().grad_norm


def whole_tensors(directories):
    """Return the full tensors of every checkpoint, read by torch."""
    tables = {}
    for directory in directories:
        entries = {}
        reader = FileSystemReader(directory)
        _load_state_dict(entries, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        tables[directory] = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    return tables


@pytest.fixture(scope="module")
def tables(parity_folder, tmp_path_factory):
    """Return a function that builds the table of a set once; an indirect parameter would build it for every test."""
    return functools.cache(lambda key: make_table(SETS[key], parity_folder, tmp_path_factory.mktemp("resharding")))


def make_table(pairs, parity_folder, folder):
    """Train every layout and load its checkpoint in its pairs: checkpoints, and figures of the fourth step."""
    layouts = list(dict.fromkeys(name for pair in pairs for name in pair))
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")

    def train(backend, samples, path):
        for _ in range(3):
            step(backend, samples)
        backend.save(path, wait=True)
        return step(backend, samples)

    def reload(backend, samples, name):
        figures = {}
        for saved in layouts:
            if (saved, name) in pairs:
                backend.load(folder / saved)
                backend.save(folder / f"{saved} at {name}", wait=True)
                figures[saved] = (backend.step_count, *step(backend, samples))
        return figures

    expected = {name: on_layout(name, train)(checkpoint, folder / name) for name in layouts}
    loaded = {name: on_layout(name, reload)(checkpoint, name) for name in layouts}
    tensors = whole_tensors(
        [folder / name for name in layouts] + [folder / f"{saved} at {loaded}" for saved, loaded in pairs]
    )
    return folder, expected, loaded, tensors


@over_pairs
def test_parameters_and_moments_survive_resharding(tables, pairs, saved, loaded):
    folder, _, _, tensors = tables(pairs)
    before, after = tensors[folder / saved], tensors[folder / f"{saved} at {loaded}"]
    assert before.keys() == after.keys()
    assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in before) > 10
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


@over_pairs
def test_next_step_after_resharding_is_equal(tables, pairs, saved, loaded, record_property):
    _, expected, figures, _ = tables(pairs)
    steps, loss, norm = figures[loaded][saved]
    record_property("loss_difference", abs(loss - expected[saved][0]))
    record_property("norm_difference", abs(norm - expected[saved][1]))
    assert steps == 3
    assert loss == pytest.approx(expected[saved][0], abs=1e-6)
    assert norm == pytest.approx(expected[saved][1], abs=1e-5)
