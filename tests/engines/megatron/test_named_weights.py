"""The stream of weights equals the checkpoint on every receiver, a layer at a time, and a lost reader is an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megascend import Adam, Adapters, Batching, Lora, Parallel
from megascend.errors import CheckpointError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from megascend.testing.reference import run_reference
from megascend.training.checkpoint.hf_slices import held_weights
from weightwire.slices import index_of

pytestmark = pytest.mark.usefixtures("megatron_imported")

FEW_SAMPLES = {"batching": Batching(micro_batch_tokens=64)}
LAYOUTS: dict[str, tuple[int, Parallel, str, dict[str, Any]]] = {
    "TP2 + SP": (2, Parallel(tensor=2, sequence=True), "qwen3", {}),
    "PP2 x VPP2, tied": (2, Parallel(pipeline=2, virtual_pipeline=2), "qwen3", {"tie_word_embeddings": True}),
    "TP2 x PP2, odd vocabulary": (4, Parallel(tensor=2, pipeline=2), "qwen2", {"vocab_size": 301}),
    "TP2 x DP2, fused gate and up": (4, Parallel(tensor=2), "glm4", {}),
    "MoE EP2": (2, Parallel(expert=2), "qwen3_moe", {}),
    "MoE EP2 x PP2, shared expert": (4, Parallel(expert=2, pipeline=2), "glm4_moe", {}),
    "MoE TP2 x EP2, ETP1": (4, Parallel(tensor=2, expert=2, expert_tensor=1), "qwen3_moe", {}),
    "MoE TP2 x EP2, ETP2": (4, Parallel(tensor=2, expert=2, expert_tensor=2), "qwen3_moe", {}),
}


def make_backend(checkpoint: Path, parallel: Parallel | None = None, **options: Any) -> Any:
    from megascend.backends import MegatronBackend

    settings = {"precision": "fp32", "timeout_s": 60, "self_check": False} | FEW_SAMPLES | options
    return MegatronBackend(checkpoint, parallel, **settings)


def stream(backend: Any, receivers: Any = "all", **options: Any) -> Any:
    from megascend.engines.megatron.named_weights import named_weights

    engine = backend.engine
    return named_weights(
        engine.bare_chunks,
        engine.config.bridge,
        backend.groups,
        backend.engine.info.tensors,
        receivers=receivers,
        **options,
    )


def copied(weights: Any) -> dict[str, torch.Tensor]:
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        assert name not in copies
        copies[name] = tensor.clone()
    return copies


def described(backend: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Stream headers to the main rank in its order, while no shard may be sent."""
    from megascend.engines.megatron.named_weights import _Collector

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_Collector, "_spread", None)
        patched.setattr(_Collector, "_assemble", None)
        weights = list(stream(backend, "main", device="meta"))
    assert all(tensor.is_meta for _, tensor in weights)
    return [(name, tensor.shape, tensor.dtype) for name, tensor in weights]


@pytest.mark.nightly_cases(
    "MoE TP2 x EP2, ETP1",  # covered: ETP2
    "MoE EP2",  # covered: MoE EP2 x PP2, shared expert
    "TP2 + SP",  # covered: TP2 x PP2
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_stream_is_the_checkpoint_bit_for_bit(parity_folder, name):
    world_size, parallel, arch, overrides = LAYOUTS[name]
    checkpoint = case_checkpoint(parity_folder, arch, **overrides)
    last = world_size - 1
    choices = {"all": range(world_size), "main": [0], (last,): [last], (0, last): [0, last]}

    def on_rank():
        backend = make_backend(checkpoint, parallel)
        streams = {receivers: copied(stream(backend, receivers)) for receivers in choices}
        return streams, described(backend)

    source = load_file(checkpoint / "model.safetensors")
    for rank, (streams, headers) in enumerate(run_distributed(on_rank, world_size, init=False, timeout_s=180)):
        streamed = [(key, tensor.shape, tensor.dtype) for key, tensor in streams["main"].items()]
        assert headers == streamed
        for receivers, ranks in choices.items():
            received = streams[receivers]
            assert set(received) == (set(source) if rank in ranks else set()), (rank, receivers)
            for key, tensor in received.items():
                assert tensor.dtype == source[key].dtype
                assert torch.equal(tensor, source[key]), (rank, receivers, key)


# --- adapters ---

MERGE = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

checkpoint, adapter, target = sys.argv[1:]
base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(target)
"""


def trained_adapter(checkpoint: Path, parallel: Parallel) -> Any:
    backend = make_backend(checkpoint, parallel, adapters=Adapters())
    backend.add_adapter("a", Lora(rank=4, alpha=6.0, optimizer=Adam(lr=1e-2)))
    for _ in range(2):
        backend.forward_backward(backend.shard(causal_samples(token_lists())), adapter="a")
        backend.optimizer_step()
    return backend


@pytest.mark.nightly_cases("qwen2*")  # covered: qwen3
@pytest.mark.parametrize(("arch", "parallel"), [("qwen3", Parallel(tensor=2)), ("qwen2", Parallel(pipeline=2))])
def test_merged_adapter_matches_peft(parity_folder, tmp_path, arch, parallel):
    from megascend.training.lora.factors import merged

    checkpoint = case_checkpoint(parity_folder, arch)

    def on_rank():
        backend = trained_adapter(checkpoint, parallel)
        backend.save_adapter("a", tmp_path / "adapter")
        manager = backend.engine.adapters
        merge = merged(manager.unsharded("a", everywhere=True))
        return copied(stream(backend, merge=merge)), copied(stream(backend))

    ranks = run_distributed(on_rank, 2, init=False, timeout_s=120)
    completed = run_reference(MERGE, checkpoint, tmp_path / "adapter", tmp_path / "merged")
    assert completed.returncode == 0, completed.stderr[-3000:]
    expected, source = load_file(tmp_path / "merged" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    for actual, base in ranks:
        assert set(actual) == set(expected) == set(source)
        assert all(torch.equal(base[name], tensor) for name, tensor in source.items())  # the model itself is untouched
        changed = {name for name, tensor in source.items() if not torch.equal(actual[name], tensor)}
        assert len(changed) == 4 * 7  # layers, projections
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-6, atol=1e-7)


# --- memory ---


class LiveBytes(TorchDispatchMode):
    """Bytes of live memory that operations under it have allocated; ``peak`` is their maximum."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in tensors)
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self.now = self.peak = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def peaks(checkpoint: Path, parallel: Parallel, receivers: str) -> Callable[[], int]:
    """Return the smallest peak of three streams: a Gloo thread may hold a buffer for a moment after its transfer is complete."""

    def on_rank() -> int:
        backend = make_backend(checkpoint, parallel)
        tensors = [
            tensor
            for chunk in backend.engine.bare_chunks
            for tensor in chunk.state_dict().values()
            if tensor is not None
        ]
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        peak_bytes = []
        for _ in range(3):
            with LiveBytes(tensors) as live:
                for _, tensor in stream(backend, receivers):
                    del tensor
            peak_bytes.append(live.peak)
        return min(peak_bytes)

    return on_rank


def test_peak_memory_is_one_layer_on_receivers_and_one_shard_elsewhere(parity_folder):
    """Check that memory does not grow with the number of layers, and other ranks hold only the largest tensor's shard."""
    shallow = case_checkpoint(parity_folder, "qwen3", vocab_size=64)
    deep = case_checkpoint(parity_folder, "qwen3", vocab_size=64, num_hidden_layers=8)
    shallow_peaks, deep_peaks = (
        run_distributed(peaks(path, Parallel(pipeline=2), "main"), 2, init=False, timeout_s=120)
        for path in (shallow, deep)
    )
    # 1 KiB: texts that ranks exchange differ in length.
    assert all(abs(a - b) <= 1024 for a, b in zip(shallow_peaks, deep_peaks, strict=True)), (shallow_peaks, deep_peaks)
    source = load_file(shallow / "model.safetensors")
    layer = sum(tensor.nbytes for name, tensor in source.items() if ".layers.1." in name)
    fused = sum(source[f"model.layers.1.mlp.{half}_proj.weight"].nbytes for half in ("gate", "up"))
    headers = 4096
    assert shallow_peaks[0] <= layer + 2 * fused + headers
    assert shallow_peaks[1] <= fused + headers


# --- readers that stop ---


@pytest.mark.parametrize("how", ["raises", "breaks off", "merges badly"])
def test_a_reader_that_stops_is_an_error_on_the_other_readers(parity_folder, how):
    checkpoint = case_checkpoint(parity_folder, "qwen3")

    def on_rank():
        backend = make_backend(checkpoint, Parallel(tensor=2))

        def merge(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if how == "merges badly" and backend.rank == 0 and "layers.1" in name:
                raise ZeroDivisionError("a bad merge")
            return tensor

        def consume() -> None:
            for count, _ in enumerate(stream(backend, merge=merge)):
                if backend.rank == 0 and count == 20:
                    if how == "raises":
                        raise ZeroDivisionError("a bad consumer")
                    if how == "breaks off":
                        break

        if backend.rank == 0 and how != "breaks off":
            with pytest.raises(ZeroDivisionError):
                consume()
        elif backend.rank == 0:
            consume()
        else:
            with pytest.raises(CheckpointError, match=r"rank 0 left the stream before layer \d"):
                consume()
        return len(copied(stream(backend)))  # and on they go

    assert run_distributed(on_rank, 2, init=False, timeout_s=180) == [4 * 11 + 3] * 2


def test_the_only_reader_may_stop_whenever_it_likes(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")

    def on_rank():
        backend = make_backend(checkpoint, Parallel(expert=2))
        grad_modes, names = [], []
        for stop in (1, 10, 10**6):
            for count, (name, _) in enumerate(stream(backend, "main"), start=1):
                grad_modes.append(torch.is_grad_enabled())
                names.append(name)
                if count == stop:
                    break
        return names, grad_modes

    (names, grad_modes), other = run_distributed(on_rank, 2, init=False, timeout_s=180)
    assert other == ([], [])
    assert len(names) == 11 + len(set(names))
    assert all(grad_modes)


def test_weights_are_described_again_after_a_parameter_has_moved(parity_folder: Path) -> None:
    with make_backend(case_checkpoint(parity_folder, "qwen3_moe")) as backend:
        state = backend.engine.weights()
        backend.forward_backward(causal_samples(token_lists()[:1]))
        assert not backend.optimizer_step().skipped
        assert backend.engine.weights() is state
        for parameter in backend.engine.bare_chunks[0].parameters():
            parameter.data = parameter.data.clone().add_(1)
        weights = dict(backend.named_weights())
        slices = list(held_weights(backend.engine.weights(), backend.engine.hf_slices()))
        assert {name for name, _, _ in slices} == weights.keys()
        assert all(
            torch.equal(weights[name][index_of(offsets, values.shape)], values) for name, offsets, values in slices
        )
