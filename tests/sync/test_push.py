"""After a push, engines have the checkpoint's weights from every layout; after a failure, their previous weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "weightwire"))
from engine_process import engines

import megascend
from megascend import Adam, Adapters, Lora, Parallel
from megascend.errors import ConfigError, MegascendError, WeightSyncError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from support.images import TOKEN, TOWER, image_fields, image_samples, image_tokens
from support.trainers import make_trainer

pytestmark = pytest.mark.usefixtures("megatron_imported")

LAYOUTS: dict[str, tuple[int, Parallel, str, dict[str, Any]]] = {
    "one rank": (1, Parallel(), "qwen3", {}),
    "TP2": (2, Parallel(tensor=2), "qwen3", {}),
    "PP2, tied": (2, Parallel(pipeline=2), "qwen3", {"tie_word_embeddings": True}),
    "MoE EP2": (2, Parallel(expert=2), "qwen3_moe", {}),
    "DP2 x TP2": (4, Parallel(tensor=2), "qwen2", {}),
}


def equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.core_cases("DP2 x TP2")
@pytest.mark.nightly_cases("TP2")  # covered: DP2 x TP2
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.nightly_cases(
    "PP2, tied",  # covered: test_sharded_push.py; DP2 x TP2
    "MoE EP2",  # covered: test_sharded_push.py; DP2 x TP2
)
def test_engines_get_the_checkpoint_bit_for_bit(parity_folder, tmp_path, name):
    world_size, parallel, arch, overrides = LAYOUTS[name]
    checkpoint = case_checkpoint(parity_folder, arch, **overrides)
    source = load_file(checkpoint / "model.safetensors")
    payload = sum(tensor.numel() * tensor.element_size() for tensor in source.values())

    with engines(tmp_path, "engine-a", "engine-b", workers=2) as served:

        def on_rank():
            backend = make_trainer(checkpoint, parallel)
            with megascend.WeightSync(backend, served, bucket_bytes=100_000) as sync:
                first = sync.push(1)
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
                second = sync.push(2)
                backend.export_hf(tmp_path / "after")
            return first, second

        results = run_distributed(on_rank, world_size, init=False, timeout_s=120)
        trained = load_file(tmp_path / "after" / "model.safetensors")
        assert not equal(trained, source)
        for engine in served:
            assert engine.state()["versions"] == {"model": 2}
            for worker in engine.weights()[0]:
                assert equal(worker, trained)
    for first, second in results:
        assert first.version == 1
        assert second.engines == ("engine-a", "engine-b")
        assert payload <= first.nbytes <= 1.01 * payload
        assert first.buckets == -(-payload // 100_000)
        assert first.payload == 4 * first.nbytes  # two engines of two workers


def test_push_of_merged_and_separate_adapters(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")

    with engines(tmp_path, "engine") as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2), adapters=Adapters())
            backend.add_adapter("a", Lora(rank=4, alpha=6.0, optimizer=Adam(lr=1e-2)))
            for _ in range(2):
                backend.forward_backward(backend.shard(causal_samples(token_lists())), adapter="a")
                backend.optimizer_step()
            with megascend.WeightSync(backend, served) as sync:
                merged, factors = sync.push(1, "a"), sync.push(1, "a", adapter_only=True)
                repeated = sync.push(2, "a", adapter_only=True)
                with pytest.raises(ConfigError, match="unknown adapter 'b'; loaded: a"):
                    sync.push(3, "b")
                with pytest.raises(ConfigError, match="name the adapter"):
                    sync.push(3, adapter_only=True)
            backend.save_adapter("a", tmp_path / "adapter", optimizer=False)
            backend.export_hf(tmp_path / "merged", adapter="a")
            return merged.nbytes, factors.nbytes, repeated.version

        (merged, factors, version), _ = run_distributed(on_rank, 2, init=False, timeout_s=120)
        weights, adapters = served[0].weights()
        assert equal(weights[0], load_file(tmp_path / "merged" / "model.safetensors"))
        assert equal(adapters["adapter a"], load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
        assert served[0].state()["versions"] == {"model": 1, "adapter a": 2}
    assert factors < merged / 4
    assert version == 2


@pytest.mark.parametrize("arch", ["qwen3_vl", pytest.param("qwen3_5_moe", marks=pytest.mark.nightly)])
def test_engines_and_exports_get_the_trained_vision_tower(parity_folder, tmp_path, arch):
    """Push and export a model with all of its towers' weights trained, and load the export in transformers' own class."""
    checkpoint, samples = case_checkpoint(parity_folder, arch), image_samples()
    source = load_file(checkpoint / "model.safetensors")

    with engines(tmp_path, "engine") as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2, sequence=True), vision_tower="train")
            with megascend.WeightSync(backend, served) as sync:
                backend.forward_backward(backend.shard(samples))
                backend.optimizer_step()
                sync.push(1)
                backend.export_hf(tmp_path / "after")
            return backend.forward(samples).logprobs

        logprobs = run_distributed(on_rank, 2, init=False, timeout_s=120)[0]
        exported = load_file(tmp_path / "after" / "model.safetensors")
        assert equal(served[0].weights()[0][0], exported)
    assert exported.keys() == source.keys()
    tower = [name for name in source if name.startswith(TOWER)]
    assert [name for name in tower if torch.equal(exported[name], source[name]) and source[name].numel() > 1] == []
    from transformers import AutoModelForImageTextToText

    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "after", dtype=torch.float32, output_loading_info=True
    )
    model, problems = loaded
    assert not problems["missing_keys"]
    assert not problems["unexpected_keys"]
    for tokens, fields, values in zip(image_tokens(), image_fields(), logprobs, strict=True):
        row = torch.tensor([tokens])
        images = {}
        if "pixel_values" in fields:
            images = {
                "pixel_values": torch.tensor(fields["pixel_values"]),
                "image_grid_thw": torch.tensor(fields["grids"]),
            }
        with torch.no_grad():
            logits = model(input_ids=row, mm_token_type_ids=(row == TOKEN).int(), **images).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        assert float((values - expected).abs().max()) <= 2e-5


OLD = {"old": torch.arange(5.0)}


def pushes_that_fail(checkpoint: Path, tmp_path: Path, fault: Any) -> Any:
    """Push with ``fault(engines, number)`` applied, take an optimizer step, and push again without the fault.

    Returns:
        The message on every rank.
    """
    with engines(tmp_path, "engine-1", "engine-2", weights=OLD, version=3) as served:

        def on_rank():
            backend = make_trainer(checkpoint, Parallel(tensor=2), timeout_s=30)
            with megascend.WeightSync(backend, served, bucket_bytes=50_000, timeout_s=6.0) as sync:
                undo = fault(sync, served) if backend.rank == 0 else None
                with pytest.raises(MegascendError) as caught:
                    sync.push(4)
                before = [(engine.state(), engine.weights()[0]) for engine in sync.engines if engine.alive()]
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
                if undo is not None:
                    undo()
                after = sync.push(5)
                backend.export_hf(tmp_path / "after")
            states = [
                (state["versions"], state["serving"], all(equal(w, OLD) for w in weights)) for state, weights in before
            ]
            return type(caught.value).__name__, str(caught.value), states, after.engines

        results = run_distributed(on_rank, 2, init=False, timeout_s=150)
        trained = load_file(tmp_path / "after" / "model.safetensors")
        for engine in served:
            if engine.name in results[0][3]:
                weights = engine.weights()[0]
                for worker in weights:
                    worker.pop("old")
                    assert equal(worker, trained)
    assert len({(kind, message) for kind, message, *_ in results}) == 1, "ranks differ in what they raise"
    return results[0]


def test_missing_engine_raises_weight_sync_error(parity_folder, tmp_path):
    def fault(sync, served):
        served[1].now("fault", deaf=True)
        return lambda: served[1].now("fault")

    checkpoint = case_checkpoint(parity_folder, "qwen3")
    kind, message, states, _ = pushes_that_fail(checkpoint, tmp_path, fault)
    assert kind == "EngineFaultError"
    assert "receiver 2 (engine-2" in message
    assert states == [({"model": 3}, True, True)] * 2


def test_an_engine_killed_during_the_transfer(parity_folder, tmp_path):
    def fault(sync, served):
        from weightwire.sender import Sender

        handed_over = Sender._hand_over

        def killing(self, bucket, *rest):
            if bucket.index == 3:
                served[1].kill()
            handed_over(self, bucket, *rest)

        Sender._hand_over = killing

        def undo():
            Sender._hand_over = handed_over
            sync.engines.remove(served[1])

        return undo

    checkpoint = case_checkpoint(parity_folder, "qwen3")
    kind, message, states, engines_after = pushes_that_fail(checkpoint, tmp_path, fault)
    assert kind == "EngineFaultError"
    assert "receiver 2 (engine-2" in message
    assert "is gone" in message
    assert states == [({"model": 3}, True, True)]
    assert engines_after == ("engine-1",)


def test_a_commit_that_fails_on_one_worker_is_undone_on_all(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    with engines(tmp_path, "engine", workers=2, weights=OLD, version=3) as served:

        def on_rank():
            backend = make_trainer(checkpoint)
            with megascend.WeightSync(backend, served) as sync:
                served[0].now("fault", fails=1)
                with pytest.raises(WeightSyncError, match="worker 1 cannot load") as caught:
                    sync.push(4)
                weights = served[0].weights()[0]
                served[0].now("fault")
                sync.push(5)
                return str(caught.value), [equal(worker, OLD) for worker in weights], served[0].state()["versions"]

        ((message, old, versions),) = run_distributed(on_rank, 1, init=False, timeout_s=90)
    assert "engine: CommitError: " in message or "CommitError" in message
    assert old == [True, True]
    assert versions == {"model": 5}
