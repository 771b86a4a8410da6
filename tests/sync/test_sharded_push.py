"""Sharded pushes: from every layout, workers have their slices of the exported weights, bit for bit, or the old ones."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "weightwire"))
from engine_process import EngineProcess, ended_by, engines
from worker_slices import exported, slices_are, specs_of, vllm_like

import megascend
from megascend import Parallel
from megascend.errors import ConfigError, EngineFaultError, MegascendError, WeightSyncError
from megascend.sync.sharded import ShardedSync, why_complete
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from support.forked_programs import run_forked
from support.trainers import make_trainer
from weightwire.errors import PlanError
from weightwire.manifest import TensorSpec
from weightwire.sharded import ShardSender
from weightwire.transports.choice import Location, choose_pairs

pytestmark = pytest.mark.usefixtures("megatron_imported")

OLD = {"old": torch.arange(5.0)}

LAYOUTS: dict[str, tuple[int, dict[str, int], str, dict[str, Any]]] = {
    "TP2": (2, {"tensor": 2}, "qwen3", {}),
    "PP2, tied": (2, {"pipeline": 2}, "qwen3", {"tie_word_embeddings": True}),
    "MoE EP2": (2, {"expert": 2}, "qwen3_moe", {}),
    "DP2 x TP2": (4, {"tensor": 2}, "qwen2", {}),
    "latent attention, expert biases, EP2": (2, {"expert": 2}, "deepseek_v3", {}),
    "latent attention, expert biases, TP2": (2, {"tensor": 2}, "deepseek_v3", {}),
}


@pytest.mark.nightly_cases(
    "latent attention, expert biases, EP2-fp32",  # covered: in bf16; TP2 in fp32
    "PP2, tied-bf16",  # covered: in fp32; TP2 in bf16
    "MoE EP2-bf16",  # covered: in fp32; EP2 of latent attention in bf16
    "DP2 x TP2-bf16",  # covered: in fp32; TP2 in bf16
    "latent attention, expert biases, TP2-bf16",  # covered: in fp32; EP2 in bf16
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_workers_get_their_slices_of_the_export(parity_folder, tmp_path, name, precision):
    world_size, parallel, arch, overrides = LAYOUTS[name]
    checkpoint = case_checkpoint(parity_folder, arch, **overrides)

    with engines(tmp_path, "engine-a", "engine-b", workers=2, needs=vllm_like) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(**parallel), precision=precision)
            with megascend.WeightSync(backend, served, bucket_bytes=50_000) as sync:
                first = sync.push(1)
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
                second = sync.push(2)
                backend.export_hf(tmp_path / "after")
                order = [name for name, _ in backend.named_weights(receivers="main", device="meta")]
            return first, second, order

        results = run_distributed(on_rank, world_size, init=False, timeout_s=150)
        trained = exported(tmp_path / "after", results[0][2])
        specs = specs_of(trained)
        for engine in served:
            assert engine.state()["versions"] == {"model": 2}
            for number, worker in enumerate(engine.weights()[0]):
                assert slices_are(worker, vllm_like(specs, 2, number), trained)
    for first, second, _ in results:
        assert first.sharded
        assert second.why_not_sharded == ""
        assert second.version == 2
        largest = max(sum(piece.nbytes(specs) for piece in vllm_like(specs, 2, number)) for number in range(2))
        assert second.nbytes == largest
        received = [piece.nbytes(specs) for number in range(2) for piece in vllm_like(specs, 2, number)]
        assert second.payload == 2 * sum(received)  # two engines, whether from ranks or from each other


def test_engines_that_describe_nothing_get_whole_tensors_from_rank_0(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "described", needs=vllm_like) as first, engines(tmp_path, "silent") as second:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2))
            with megascend.WeightSync(backend, [*first, *second]) as sync:
                pushed = sync.push(1), sync.push(2)
            with megascend.WeightSync(backend, first, transport="files", options={"directory": str(tmp_path)}) as sync:
                files = sync.push(3)
            with megascend.WeightSync(backend, first, sharded=False) as sync:
                off = sync.push(4)
            return [push.why_not_sharded for push in (*pushed, files, off)], [
                push.sharded for push in (*pushed, files, off)
            ]

        for reasons, sharded in run_distributed(on_rank, 2, init=False, timeout_s=120):
            assert reasons[0] == reasons[1] == "silent do not describe what their workers load"
            assert "only broadcasts" in reasons[2]
            assert reasons[3] == "sharded is off"
            assert not any(sharded)
        source = load_file(checkpoint / "model.safetensors")
        (worker,) = second[0].weights()[0]
        assert all(torch.equal(worker[name], tensor) for name, tensor in source.items())


def test_a_plan_is_made_where_ranks_or_workers_share_the_transfer(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with (
        engines(tmp_path, "one worker", needs=vllm_like) as small,
        engines(tmp_path, "two workers", workers=2, needs=vllm_like) as large,
    ):

        def on_rank():
            backend = make_trainer(checkpoint)
            with megascend.WeightSync(backend, small) as sync:
                first = sync.push(1), sync.push(2)
                sync.engines = [*small, *large]
                shared = sync.push(3)
            with megascend.WeightSync(backend, small, sharded=True) as sync:
                explicit = sync.push(4)
            text = "a single rank has nothing to share out to engines of one worker"
            assert [push.why_not_sharded for push in first] == [text, text]
            return shared.sharded, explicit.sharded

        assert run_distributed(on_rank, 1, init=False, timeout_s=120) == [(True, True)]


def test_a_rank_that_fails_to_describe_its_slices_leaves_the_push_to_rank_0(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "engine", workers=2, needs=vllm_like) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2), timeout_s=30)
            if backend.rank == 1:
                backend.engine.weights = lambda: {}["no such layer"]
            with megascend.WeightSync(backend, served) as sync:
                return sync.push(1).why_not_sharded

        for reason in run_distributed(on_rank, 2, init=False, timeout_s=120):
            assert "cannot be described: KeyError: 'no such layer'" in reason
        source = load_file(checkpoint / "model.safetensors")
        for worker in served[0].weights()[0]:
            assert all(torch.equal(worker[name], tensor) for name, tensor in source.items())


GPUS = ("gpu 0", "gpu 1", "gpu 2")


@pytest.mark.parametrize(
    ("settings", "device", "engines", "visible", "outcome"),
    [
        ({}, "cpu", ["gpu 0"], GPUS, "gloo"),
        ({}, "cuda", ["gpu 1"], GPUS, "cuda_ipc"),
        ({"mode": "auto"}, "cuda", ["gpu 1"], GPUS, "cuda_ipc"),
        ({}, "cuda", ["gpu 0", "gpu 1"], GPUS, "to several engines are no default yet: set sharded=True"),
        ({"sharded": True}, "cuda", ["gpu 0", "gpu 1"], GPUS, "cuda_ipc"),
        ({}, "cuda", ["gpu 2"], GPUS, "weights on cuda over nccl are no default yet: set sharded=True"),
        ({"sharded": True}, "cuda", ["gpu 2"], GPUS, "nccl"),
        ({}, "cuda", ["gpu 1"], ("gpu 1",), "not all members see each other's GPUs"),
        ({"mode": "auto"}, "cuda", ["gpu 1"], ("gpu 1",), "not all members see each other's GPUs"),
        ({"mode": "delta"}, "cuda", ["gpu 1"], ("gpu 1",), "shared_memory"),
    ],
)
def test_weights_on_accelerators_are_sharded_by_default_over_cuda_ipc(settings, device, engines, visible, outcome):
    """An engine that shares a GPU with a trainer rank cannot join them over NCCL."""
    places = [Location(device, "a", "space", gpu, GPUS, nccl="2.27") for gpu in GPUS[:2]]
    members = {f"engine on {gpu}": Location(device, "a", "space", gpu, visible, nccl="2.27") for gpu in engines}
    counts = dict.fromkeys(members, 1)
    delivery: Any = SimpleNamespace(
        is_loopback=True,
        members=lambda engines: (counts, members),
        check_pairs=lambda members, places: choose_pairs(None, dict(enumerate(places)), members),
    )
    backend: Any = SimpleNamespace(groups=None)
    options: dict[str, Any] = {"sharded": None, "mode": "full", "full_every": 1, "chunk_bytes": 1} | settings
    sync = ShardedSync(backend, **options)
    if " " not in outcome:
        assert sync._connection([], places, delivery) == (counts, outcome)
    else:
        with pytest.raises(PlanError, match=outcome):
            sync._connection([], places, delivery)


@pytest.mark.parametrize(
    ("transport", "dtype", "reason"),
    [
        ("nccl", "bfloat16", ""),
        ("gloo", "float32", "16-bit numbers"),
        ("cuda_ipc", "bfloat16", "the search for changes"),
    ],
)
def test_mode_auto_sends_complete_weights_where_changes_cannot_be_worth_it(transport, dtype, reason):
    specs = [TensorSpec("weight", dtype, (4, 4))]
    assert reason in why_complete(transport, specs)
    assert bool(why_complete(transport, specs)) == bool(reason)


def test_ranks_of_another_host_need_an_address_of_rank_0(parity_folder, tmp_path, monkeypatch):
    """Send from rank 0, as every push was, where the other ranks cannot reach the loopback interface of rank 0's host."""
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "engine", workers=2, needs=vllm_like) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2))
            local = Location.of(torch.device("cpu"))
            monkeypatch.setattr(Location, "of", lambda device: dataclasses.replace(local, host=f"host {backend.rank}"))
            with megascend.WeightSync(backend, served) as sync:
                pushed = sync.push(1)
            with megascend.WeightSync(backend, served, sharded=True) as sync, pytest.raises(WeightSyncError) as caught:
                sync.push(2)
            return pushed.why_not_sharded, str(caught.value)

        for reason, message in run_distributed(on_rank, 2, init=False, timeout_s=120):
            assert "the ranks are on 2 hosts, and rank 0 listens on 127.0.0.1" in reason
            assert reason in message


@pytest.mark.parametrize(
    ("options", "setting"), [({"sharded": True}, "sharded=True is not"), ({"mode": "delta"}, "mode delta is not")]
)
def test_a_push_without_a_plan_is_refused_where_the_settings_need_one(parity_folder, tmp_path, options, setting):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "engine", workers=2, needs=vllm_like, weights=OLD, version=3) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2), adapters=megascend.Adapters())
            backend.add_adapter("a", megascend.Lora(rank=4, alpha=6.0))
            with megascend.WeightSync(backend, served, **options) as sync:
                with pytest.raises(WeightSyncError) as merged:
                    sync.push(4, "a")
                factors = sync.push(4, "a", adapter_only=True)
            files = {"transport": "files", "options": {"directory": str(tmp_path)}}
            with (
                megascend.WeightSync(backend, served, **options, **files) as sync,
                pytest.raises(WeightSyncError) as broadcast,
            ):
                sync.push(4)
            return str(merged.value), factors.why_not_sharded, str(broadcast.value)

        for merged, factors, broadcast in run_distributed(on_rank, 2, init=False, timeout_s=120):
            assert setting in merged
            assert "a merged adapter is sent by rank 0" in merged
            assert factors == "an adapter alone is sent by rank 0"
            assert setting in broadcast
        assert served[0].state()["versions"] == {"model": 3, "adapter a": 4}
        assert all(set(worker) == {"old"} for worker in served[0].weights()[0])


def fails_and_works_again(
    checkpoint: Path, tmp_path: Path, fault: Any, layout: str = "TP2"
) -> tuple[str, tuple[str, ...]]:
    """Push with ``fault(sync, served, backend)`` applied, then a step and a push without it; return (message, engines after)."""
    world_size, parallel, _, _ = LAYOUTS[layout]
    with engines(tmp_path, "engine-1", "engine-2", workers=2, weights=OLD, version=3, needs=vllm_like) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(**parallel), timeout_s=30)
            with megascend.WeightSync(backend, served, bucket_bytes=20_000, timeout_s=6.0, sharded=True) as sync:
                undo = fault(sync, served, backend)
                with pytest.raises(MegascendError) as caught:
                    sync.push(4)
                alive = [engine for engine in sync.engines if engine.alive()] if backend.rank == 0 else []
                states = [(engine.state()["versions"], engine.weights()[0]) for engine in alive]
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
                if undo is not None:
                    undo()
                after = sync.push(5)
                backend.export_hf(tmp_path / "after")
                order = [name for name, _ in backend.named_weights(receivers="main", device="meta")]
            old = [versions == {"model": 3} and all(set(w) == {"old"} for w in weights) for versions, weights in states]
            return type(caught.value).__name__, str(caught.value), old, after, order

        results = run_distributed(on_rank, world_size, init=False, timeout_s=150)
        trained = exported(tmp_path / "after", results[0][4])
        specs = specs_of(trained)
        for engine in served:
            if engine.name in results[0][3].engines:
                for number, worker in enumerate(engine.weights()[0]):
                    worker.pop("old")
                    assert slices_are(worker, vllm_like(specs, 2, number), trained)
    assert len({(kind, message) for kind, message, *_ in results}) == 1, "ranks differ in what they raise"
    assert all(results[0][2])
    assert results[0][3].sharded
    return results[0][1], results[0][3].engines


def at_message(rank: int, number: int, act: Any) -> Any:
    """Return a fault: rank ``rank`` calls ``act`` before its chunk ``number``; the result undoes it."""

    def fault(sync, served, backend):
        handed_over = ShardSender._hand_over

        def acting(self, index, *rest):
            if self._group.rank == rank and index == number:
                act(served)
            return handed_over(self, index, *rest)

        ShardSender._hand_over = acting

        def undo():
            ShardSender._hand_over = handed_over
            sync.engines = [engine for engine in sync.engines if engine.alive()]

        return undo

    return fault


@pytest.mark.parametrize(("rank", "number"), [(0, 5), (1, 0)])
def test_an_engine_killed_during_the_transfer_is_named(parity_folder, tmp_path, rank, number):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    message, after = fails_and_works_again(
        checkpoint, tmp_path, at_message(rank, number, lambda served: served[1].kill())
    )
    assert "engine-2" in message
    assert "is gone" in message
    assert after == ("engine-1",)


def test_a_rank_that_cannot_send_is_named(parity_folder, tmp_path):
    def fail(served):
        raise FloatingPointError("an error of its own")

    checkpoint = case_checkpoint(parity_folder, "qwen3")
    message, after = fails_and_works_again(checkpoint, tmp_path, at_message(1, 3, fail))
    assert "an error of its own" in message
    assert after == ("engine-1", "engine-2")


@pytest.mark.parametrize(("mode", "before", "after"), [("full", 2, 1), ("delta", 1, 2)])
@pytest.mark.nightly_cases("full-2-1")  # covered: delta-1-2
def test_an_engine_restarted_with_other_workers_gets_the_next_push(parity_folder, tmp_path, mode, before, after):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "kept", workers=2, needs=vllm_like) as served:
        first = EngineProcess(tmp_path, "engine", workers=before, needs=vllm_like)

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2), precision="bf16", timeout_s=30)
            new: Any = None
            with megascend.WeightSync(backend, [*served, first], timeout_s=6.0, sharded=True, mode=mode) as sync:
                sync.push(1)
                if backend.rank == 0:
                    first.end()
                    (tmp_path / "engine.socket").unlink()
                    new = sync.engines[1] = EngineProcess(tmp_path, "engine", workers=after, needs=vllm_like)
                try:
                    pushes = sync.push(2), sync.push(3)
                    versions = [status["versions"] for status in new.now("status")] if backend.rank == 0 else []
                    weights = new.weights()[0] if backend.rank == 0 else []
                finally:
                    if new is not None:
                        new.end()
            backend.export_hf(tmp_path / "sent")
            order = [name for name, _ in backend.named_weights(receivers="main", device="meta")]
            return pushes, versions, weights, order

        try:
            (pushes, versions, weights, order), _ = run_distributed(on_rank, 2, init=False, timeout_s=120)
        finally:
            first.end()
        expected = exported(tmp_path / "sent", order)
        for workers in (served[0].weights()[0], weights):
            for number, worker in enumerate(workers):
                assert slices_are(worker, vllm_like(specs_of(expected), len(workers), number), expected)
    assert versions == [{"model": 3}] * after
    assert [(push.sharded, push.base) for push in pushes] == [(True, None), (True, 2 if mode == "delta" else None)]


def test_an_engine_that_stops_while_members_connect_fails_the_push_in_time(parity_folder, tmp_path, monkeypatch):
    """Gloo's constructor returns after five times its timeout, which is longer than the other ranks wait."""
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    connect = ShardSender._connect
    with engines(tmp_path, "stopped", workers=2, needs=vllm_like) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2), timeout_s=20)

            def stop_first(sender, *arguments):
                if backend.rank == 0:
                    time.sleep(1.0)  # the workers have published their addresses, and wait for this rank's
                    served[0].kill(signal.SIGSTOP)
                return connect(sender, *arguments)

            with megascend.WeightSync(backend, served, sharded=True, timeout_s=5.0) as sync:
                monkeypatch.setattr(ShardSender, "_connect", stop_first)
                with pytest.raises(EngineFaultError, match=r"stopped worker 0, process \d+ on \S+\) is stopped"):
                    sync.push(1)
                monkeypatch.setattr(ShardSender, "_connect", connect)
                if backend.rank == 0:
                    served[0].kill(signal.SIGCONT)
                return sync.push(2).sharded

        assert run_distributed(on_rank, 2, init=False, timeout_s=120) == [True, True]
        assert served[0].state()["versions"] == {"model": 2}


@pytest.mark.parametrize(
    ("rank", "number"),
    # Covered: the fifth chunk of rank 0.
    [(0, 4), *(pytest.param(*moment, marks=pytest.mark.nightly) for moment in ((0, 0), (1, 0), (1, 4), (1, 8)))],
)
def test_a_trainer_killed_at_any_moment_leaves_the_old_weights(parity_folder, tmp_path, rank, number):
    """Kill one rank before one of its chunks; another trainer works once the lease has lapsed."""
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "engine", workers=2, weights=OLD, version=3, needs=vllm_like) as served:

        def die(served):
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        def dying():
            backend = make_trainer(checkpoint, Parallel(tensor=2), timeout_s=20)
            with megascend.WeightSync(backend, served, bucket_bytes=20_000, timeout_s=2.0, sharded=True) as sync:
                at_message(rank, number, die)(sync, served, backend)
                sync.push(4)

        assert ended_by(lambda: run_distributed(dying, 2, init=False, timeout_s=60), 90) != 0
        assert (tmp_path / "killed").exists()
        assert all(set(worker) == {"old"} for worker in served[0].weights()[0])
        assert served[0].state()["versions"] == {"model": 3}
        until = time.monotonic() + 60
        while any(status["update"]["state"] != "dropped" for status in served[0].now("status")):
            assert time.monotonic() < until
            time.sleep(0.1)

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2))
            with megascend.WeightSync(backend, served, sharded=True) as sync:
                return sync.push(4).sharded

        assert run_distributed(on_rank, 2, init=False, timeout_s=120) == [True, True]
        source = load_file(checkpoint / "model.safetensors")
        specs = specs_of(source)
        for worker, weights in enumerate(served[0].weights()[0]):
            weights.pop("old")
            assert slices_are(weights, vllm_like(specs, 2, worker), source)


@pytest.mark.parametrize(("engine", "arch"), [("fsdp", "qwen3_moe"), ("single", "deepseek_v3")])
@pytest.mark.nightly_cases("single-*")  # covered: fsdp, by the same code
def test_engines_without_megatron_send_their_slices(parity_folder, tmp_path, engine, arch):
    """In another process, which has not imported Megatron: complete weights and differences, in fp32 and bf16."""
    script = Path(__file__).with_name("sharded_push_without_megatron.py")
    completed = run_forked(script, engine, case_checkpoint(parity_folder, arch), tmp_path, timeout_s=300)
    assert completed.returncode == 0, completed.stderr[-6000:]


# --- differences ---


def test_differences_equal_complete_pushes(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "engine", workers=2, needs=vllm_like) as served:

        def on_rank():
            adam = megascend.Adam(lr=1e-5)
            backend = make_trainer(checkpoint, Parallel(tensor=2), precision="bf16", optimizer=adam)
            pushes = []
            with megascend.WeightSync(backend, served, mode="delta", full_every=3) as sync:
                for version in range(1, 7):
                    pushes.append(sync.push(version))
                    if version < 6:
                        backend.forward_backward(backend.shard(causal_samples(token_lists())))
                        backend.optimizer_step()
                backend.export_hf(tmp_path / "after")
                order = [name for name, _ in backend.named_weights(receivers="main", device="meta")]
            return pushes, order

        results = run_distributed(on_rank, 2, init=False, timeout_s=150)
        trained = exported(tmp_path / "after", results[0][1])
        for number, worker in enumerate(served[0].weights()[0]):
            assert slices_are(worker, vllm_like(specs_of(trained), 2, number), trained)
    for pushes, _ in results:
        assert [push.base for push in pushes] == [None, 1, 2, 3, None, 5]
        assert all(push.share == 1.0 for push in pushes if push.base is None)
        assert all(0 < push.share < 0.6 for push in pushes if push.base is not None), [p.share for p in pushes]


def test_a_single_rank_sends_differences_to_engines_that_describe_nothing(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "engine-1", "engine-2") as served:

        def on_rank():
            backend = make_trainer(checkpoint, precision="bf16", optimizer=megascend.Adam(lr=1e-6))
            with megascend.WeightSync(backend, served, mode="delta") as sync:
                first = sync.push(1)
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
                second = sync.push(2)
                # An engine that has lost its base: everyone gets a complete push, without an error.
                served[1].now("forget")
                third = sync.push(3)
                fourth = sync.push(4)
                backend.export_hf(tmp_path / "after")
                base = weakref.ref(next(iter(sync._shards._history.contents.values())))
            return first, second, third, fourth, base() is None

        ((first, second, third, fourth, released),) = run_distributed(on_rank, 1, init=False, timeout_s=120)
        trained = load_file(tmp_path / "after" / "model.safetensors")
        for engine in served:
            (worker,) = engine.weights()[0]
            assert all(torch.equal(worker[name], tensor) for name, tensor in trained.items())
    assert [push.base for push in (first, second, third, fourth)] == [None, 1, None, 3]
    assert second.share < 0.3
    assert fourth.share < 0.05, "nothing has changed"
    assert released, "a closed WeightSync keeps no copy of the weights"


def test_wrong_settings_are_refused(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3")

    def on_rank():
        backend = make_trainer(checkpoint)
        for options, text in (
            ({"mode": "sparse"}, "mode 'sparse'; expected full, delta, auto"),
            ({"mode": "delta", "full_every": 0}, "full_every 0"),
            ({"mode": "delta", "sharded": False}, "leave sharded out"),
        ):
            with pytest.raises(ConfigError, match=text):
                megascend.WeightSync(backend, [], **options)

    run_distributed(on_rank, 1, init=False, timeout_s=60)
