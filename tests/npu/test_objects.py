"""Python objects are never sent over HCCL: the simulated HCCL refuses them, and everything works without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megascend.config import Parallel
from megascend.errors import ProcessGroupError
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.distributed.process_groups import initialize
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from support.exported import exported_tensors


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


def test_training_metrics_checkpoints_and_export_need_no_objects_on_hccl(npu, parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    results = run_distributed(save_load_and_export, 4, checkpoint, tmp_path, init=False, timeout_s=120)
    for after, resumed in results:
        assert after == resumed
    original, untrained, trained, loaded = (
        exported_tensors(folder)
        for folder in (checkpoint, tmp_path / "untrained", tmp_path / "trained", tmp_path / "trained, loaded")
    )
    assert original.keys() == untrained.keys() == trained.keys() == loaded.keys()
    for name, tensor in original.items():
        assert torch.equal(untrained[name], tensor), name
        assert torch.equal(loaded[name], trained[name]), name
    assert any(not torch.equal(trained[name], tensor) for name, tensor in original.items())
