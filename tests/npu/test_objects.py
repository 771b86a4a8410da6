"""Python objects are never sent over HCCL: the simulated HCCL refuses them, and everything works without."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megascend.config import Parallel
from megascend.errors import CollectiveTimeoutError, ProcessGroupError
from megascend.runtime.bootstrap import current_runtime
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.distributed.process_groups import initialize
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

COLLECTIVES = {
    "all_gather_object": lambda group: dist.all_gather_object([None] * 2, "x", group=group),
    "broadcast_object_list": lambda group: dist.broadcast_object_list(["x"], src=0, group=group),
    "gather_object": lambda group: dist.gather_object(
        "x", [None] * 2 if dist.get_rank() == 0 else None, dst=0, group=group
    ),
    "scatter_object_list": lambda group: dist.scatter_object_list(
        [None], ["a", "b"] if dist.get_rank() == 0 else None, src=0, group=group
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_simulated_hccl_refuses_objects(name, npu):
    def work():
        with pytest.raises(RuntimeError, match=f"{name} on an hccl group"):
            COLLECTIVES[name](None)

    run_distributed(work, 2, backend="hccl")


def test_default_group_uses_hccl_and_objects_use_gloo(npu):
    def work():
        from megascend.engines.megatron.groups import MegatronGroups

        groups = initialize(plan(Parallel(context=2), 4), npu.platform, 30, factory=MegatronGroups())
        default = dist.distributed_c10d._get_default_group()
        assert dist.get_backend() == "hccl"
        assert getattr(default, "bound_device_id", None) is None
        for name in ("world", "dp", "dp_cp", "cp", "tp", "pp", "ep", "edp"):
            assert dist.get_backend(groups.device_group(name)) == "hccl"
            assert groups.channel(name).ranks == groups.ranks(name)
            if len(groups.ranks(name)) > 1:
                assert dist.get_backend(groups.channel(name).group) == "gloo"
                assert dist.get_process_group_ranks(groups.channel(name).group) == groups.ranks(name)
        gathered = gather_objects(groups.rank, "dp", groups), gather_objects(groups.rank, "dp_cp", groups)
        groups.destroy()
        return gathered

    npu.configure_topology(plan(Parallel(), 1))
    results = run_distributed(work, 4, init=False)
    assert results[1] == ([1, 3], [0, 1, 2, 3])  # the gather over DP x CP spans both


def test_upstream_object_collectives_use_the_channel(npu):
    """Use upstream's object collectives: megatron-core gathers parameter groups on the default group, for example."""

    original = dist.all_gather_object

    def work():
        from megascend.engines.megatron.groups import MegatronGroups

        groups = initialize(plan(Parallel(tensor=2), 2), npu.platform, 30, factory=MegatronGroups())
        gathered: list = [None, None]
        dist.all_gather_object(gathered, {"rank": dist.get_rank()})
        over_tp: list = [None, None]
        dist.all_gather_object(over_tp, dist.get_rank(), group=groups.device_group("tp"))
        box = ["from 1"] if dist.get_rank() == 1 else [None]
        dist.broadcast_object_list(box, src=1, device=torch.device("npu"))
        with pytest.raises(
            ProcessGroupError, match=r"all_gather_object on a hccl group of ranks.*which carries no objects"
        ):
            dist.all_gather_object(gathered, 1, group=groups.device_group("mp"))
        groups.destroy()
        assert dist.all_gather_object is original
        return gathered, over_tp, box

    npu.configure_topology(plan(Parallel(), 1))
    for result in run_distributed(work, 2, init=False):
        assert result == ([{"rank": 0}, {"rank": 1}], [0, 1], ["from 1"])


def save_load_and_export(checkpoint, folder):
    from megascend.backends import MegatronBackend

    backend = MegatronBackend(checkpoint, Parallel(tensor=2), "fp32", platform="npu", timeout_s=60)
    samples = backend.shard(causal_samples(token_lists()))
    backend.export_hf(folder / "untrained")
    backend.forward_backward(samples)
    backend.optimizer_step()
    backend.save(folder / "step-1")
    backend.export_hf(folder / "trained")
    after = (
        backend.forward_backward(samples).loss,
        backend.optimizer_step().grad_norm,
        backend.forward_backward(samples).loss,
    )
    backend.optimizer_step()
    backend.load(folder / "step-1")
    backend.export_hf(folder / "trained, loaded")
    resumed = (
        backend.forward_backward(samples).loss,
        backend.optimizer_step().grad_norm,
        backend.forward_backward(samples).loss,
    )
    backend.close()
    return after, resumed


def exported(folder):
    """Return all tensors of a Hugging Face directory by name."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def test_training_metrics_checkpoints_and_export_need_no_objects_on_hccl(npu, parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    results = run_distributed(save_load_and_export, 4, checkpoint, tmp_path, init=False, timeout_s=120)
    for after, resumed in results:
        assert after == resumed
    original, untrained, trained, loaded = (
        exported(folder)
        for folder in (checkpoint, tmp_path / "untrained", tmp_path / "trained", tmp_path / "trained, loaded")
    )
    assert original.keys() == untrained.keys() == trained.keys() == loaded.keys()
    for name, tensor in original.items():
        assert torch.equal(untrained[name], tensor), name
        assert torch.equal(loaded[name], trained[name]), name
    assert any(not torch.equal(trained[name], tensor) for name, tensor in original.items())


TIMEOUT = 6.0
VICTIM = 2


def gather_without(failure, folder):
    """Return each rank's error message and the seconds until it; ranks leave their names in ``folder``."""
    if int(os.environ["RANK"]) == VICTIM and (participant := os.fork()):
        # The harness ends all ranks if one of its processes dies, so a child takes part, and dies, in its place.
        until = time.monotonic() + 150
        while len(os.listdir(folder)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(participant, signal.SIGKILL)
        os.waitpid(participant, 0)
        return None
    groups = initialize(plan(Parallel(), 4), current_runtime("a test").platform, TIMEOUT)
    gather_objects("first", "dp_cp", groups)
    if groups.rank == VICTIM:
        if failure == "missing":  # alive, but not in the collective
            time.sleep(600)
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}.get(failure, signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        gather_objects("second", "dp_cp", groups)
    (folder / os.environ["RANK"]).touch()
    return str(caught.value), time.monotonic() - start


@pytest.mark.nightly_cases("stopped")  # covered: killed, missing; reliability/test_hang_and_death.py
@pytest.mark.parametrize("failure", ["killed", "stopped", "missing"])
def test_other_ranks_raise_in_time_and_name_the_missing_one(failure, npu, tmp_path):
    npu.configure_topology(plan(Parallel(), 1))
    results = run_distributed(gather_without, 4, failure, tmp_path, init=False, timeout_s=180)
    for rank in (0, 1, 3):
        message, seconds = results[rank]
        assert seconds < TIMEOUT + 45
        assert f"did not arrive at gather_objects on group 'dp_cp' within {TIMEOUT:g} s: rank {VICTIM}." in message
