"""Megatron-Core's own reader reads the state in memory at the save call."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
from packaging.version import Version
from small_runs import files_of, make_backend, train

from megascend import Adam
from megascend.runtime.distributed.objects import gather_objects
from megascend.testing import run_distributed

pytestmark = [
    pytest.mark.usefixtures("megatron_imported"),
    pytest.mark.skipif(
        Version(torch.__version__) >= Version("2.15.dev0"),
        reason="Megatron-Core's reader gives torch 2.15's TensorProperties.strides to torch.empty, which raises TypeError",
    ),
]
MOMENTS = ("exp_avg", "exp_avg_sq")


def live(backend):
    """Return copies of the full parameters and optimizer state by name, assembled from all ranks.

    Runs of a distributed optimizer are written at their flat offsets, independently of our slice arithmetic.
    """
    engine = backend.engine
    names = {id(p): name for chunk in engine.bare_chunks for name, p in chunk.named_parameters()}
    full = {
        ("param", name): parameter.detach().clone()
        for chunk in engine.bare_chunks
        for name, parameter in chunk.named_parameters()
    }
    local = []
    for owned in engine.optimizer.parameter_states(loading=False):
        name, values = (
            names[id(owned.parameter)],
            {key: entry.reshape(-1).clone() for key, entry in owned.tensors.items()},
        )
        local.append((name, owned.start, tuple(owned.parameter.shape), values))
    for name, start, shape, states in [entry for rank in gather_objects(local, "dp", backend.groups) for entry in rank]:
        for state, values in states.items():
            target = full.setdefault((f"optimizer.{state}", name), torch.full(shape, torch.nan))
            target.view(-1)[start : start + values.numel()] = values
    return full


def read_by_megatron(directory):
    """Read a checkpoint's tensors under Megatron's parameter names, with separate layers."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    tensors = {}
    for key, tensor in load_plain_tensors(str(directory)).items():
        match = re.fullmatch(r"optimizer\.state\.(\w+?)\.((?:decoder|embedding|output_layer).*)", key)
        kind, name = (f"optimizer.{match[1]}", match[2]) if match else ("param", key)
        if not isinstance(tensor, torch.Tensor) or "_extra_state" in key:  # an object
            continue
        if name.startswith("decoder.layers."):
            for layer, values in enumerate(tensor):
                tensors[kind, name.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)] = values
        else:
            tensors[kind, name] = tensor
    return tensors


def assert_same(actual, expected):
    """Compare names and every bit."""
    assert set(actual) == set(expected)
    for name, values in expected.items():
        read = actual[name]
        assert (read.dtype, read.numel()) == (values.dtype, values.numel()), name
        assert torch.equal(read.reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8)), name


@pytest.mark.nightly_cases("plain")  # covered: distributed
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_asynchronous_checkpoint_has_the_state_of_the_save_call(checkpoint, tmp_path, distributed):
    """Train while the checkpoint is written; it must equal one that was written without training."""

    def work():
        optimizer = Adam(lr=1e-2, distributed=distributed)
        with make_backend(checkpoint, precision="bf16", optimizer=optimizer) as backend:
            train(backend, 2)
            expected = live(backend)
            backend.save(tmp_path / "still", wait=True)
            fsync = os.fsync
            os.fsync = lambda descriptor: (time.sleep(0.2), fsync(descriptor))
            pending = backend.save(tmp_path / "beside")
            steps = 0
            while backend.any_rank(not pending.done)[0]:  # ranks see the end at different times
                train(backend)
                steps += 1
            pending.wait()
            os.fsync = fsync
            moved = live(backend)
            assert steps >= 1
            assert all(not torch.equal(moved[name], values) for name, values in expected.items())
            assert not any(torch.isnan(values).any() for values in expected.values())
            kinds = {kind for kind, _ in expected}
            states = {f"optimizer.{name}" for name in MOMENTS}
            assert kinds == {"param", "optimizer.param"} | states
            for name in ("still", "beside"):
                assert_same(read_by_megatron(tmp_path / name), expected)
            return len(expected)

    counts = run_distributed(work, 2, init=False, timeout_s=180)
    assert counts[0] == counts[1] > 50
    for name in files_of(tmp_path / "still"):
        same = (tmp_path / "still" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes()
        assert same or name in ("megascend.json", ".metadata"), name
