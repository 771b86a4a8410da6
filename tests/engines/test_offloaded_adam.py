"""Adam with state in host memory, compared with the same Adam over whole tensors; runs compared with runs without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megascend
from megascend import Parallel
from megascend.engines.common import offloaded_adam
from megascend.engines.common.checkpoints import engine_state
from megascend.engines.common.offloaded_adam import OffloadedAdam, host_blocks
from megascend.reference.te.optimizers import FusedAdam
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

SHAPES = [(37, 29), (5,), (64, 48), (300,)]
COMMON: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the parameters of tests, which are small, as a run divides large ones."""
    monkeypatch.setattr(offloaded_adam, "CHUNK", 16 * 7)
    monkeypatch.setattr(offloaded_adam, "SLAB", 16 * 100)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_steps_in_chunks_are_those_of_whole_tensors_bit_for_bit(kind: Any, share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(*shape, generator=generator) for shape in SHAPES]
    plain = [value.clone() for value in values]
    streamed = [value.clone() for value in values]
    # The last two are parameters of the model, in fp32; the others are main parameters of 16-bit ones.
    weights = {
        id(main): main.view(-1) if index > 1 else main.bfloat16().view(-1) for index, main in enumerate(streamed)
    }
    expected = kind([{"params": plain[:3]}, {"params": plain[3:], "weight_decay": 0.0}], **COMMON)
    inner = kind([{"params": streamed[:3]}, {"params": streamed[3:], "weight_decay": 0.0}], **COMMON)
    optimizer = OffloadedAdam(inner, weights, share=share, page_locked=False, stored_count=int)
    for step in range(4):
        for main, streamed_main in zip(plain, streamed, strict=True):
            main.grad = torch.randn(*main.shape, generator=generator)
            streamed_main.grad = main.grad.clone()
        if step == 2:
            plain[1].grad = streamed[1].grad = None  # parameters without a gradient stay as they are
        for group in (*expected.param_groups, *optimizer.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        expected.step()
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]
    for index, (main, streamed_main) in enumerate(zip(plain, streamed, strict=True)):
        joined: dict[str, list[torch.Tensor]] = {}
        for start, tensors in optimizer.state_of(streamed_main).runs():
            assert start == sum(part.numel() for part in joined.get("exp_avg", []))
            for name, tensor in tensors.items():
                joined.setdefault(name, []).append(tensor)
        for name, moment in (
            ("exp_avg", expected.state[main]["exp_avg"]),
            ("exp_avg_sq", expected.state[main]["exp_avg_sq"]),
        ):
            # torch's Adam counts steps of a parameter: one that missed a gradient is a step behind there.
            if index != 1 or kind is FusedAdam:
                assert torch.equal(torch.cat(joined[name]), moment.view(-1)), (index, name)
        if index > 1:
            assert torch.equal(streamed_main, main)
        elif index != 1 or kind is FusedAdam:
            assert torch.equal(torch.cat(joined["param"]), main.view(-1))
            assert torch.equal(weights[id(streamed_main)], main.bfloat16().view(-1))


def test_values_that_left_the_device_are_nan_and_cannot_be_assigned() -> None:
    main = torch.ones(3, 4)
    OffloadedAdam(
        torch.optim.AdamW([main]), {id(main): torch.ones(12).bfloat16()}, share=1.0, page_locked=False, stored_count=int
    )
    assert main.shape == (3, 4)
    assert main.isnan().all()
    assert main.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        main.copy_(torch.ones(3, 4))


def test_host_memory_is_divided_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_adam, "SLAB", 3 * 1024)
    blocks = host_blocks([(3, 700), (2, 1), (3, 2500), (2, 0), (3, 16)], page_locked=False)
    assert [sum(piece.shape[1] for piece in pieces) for pieces in blocks] == [700, 1, 2500, 0, 16]
    slabs = {
        piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for pieces in blocks for piece in pieces
    }
    # A slab ends with less than an aligned run of three rows.
    assert sum(slabs.values()) < 4 * (3 * 704 + 2 * 16 + 3 * 2512 + 3 * 16 + 3 * 48)
    for number, piece in enumerate(piece for pieces in blocks for piece in pieces):
        assert not piece.any()  # of no other piece
        assert all(row.is_contiguous() and row.data_ptr() % 64 == blocks[0][0].data_ptr() % 64 for row in piece)
        piece.fill_(number + 1)


def train(backend: Any, steps: int, samples: list[Any]) -> dict[str, list[float]]:
    results: dict[str, list[float]] = {"losses": [], "norms": []}
    for _ in range(steps):
        results["losses"].append(backend.forward_backward(samples).loss)
        results["norms"].append(backend.optimizer_step().grad_norm)
    return results


def flat_state(backend: Any) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state of this rank's slices, however they are divided."""
    values = {}
    for name, tensor in engine_state(backend.engine, loading=True).items():
        if hasattr(tensor, "slices"):
            joined = torch.full(tensor.shape, float("nan"))
            for offsets, part in tensor.slices:
                sizes = zip(offsets, part.shape, strict=True)
                joined[tuple(slice(start, start + size) for start, size in sizes)] = part.detach().float()
            values[name] = joined
    return values


def run_of(
    checkpoint: str, folder: Path, offload: bool | float, *, trains: bool, load: str | None, **options: Any
) -> list[Any]:
    """Return results and state of three steps: after two others and a save, and after the checkpoint ``load``."""
    options["optimizer"] = megascend.Adam(**options.pop("optimizer", {}), lr=1e-2, offload=offload)
    batching = megascend.Batching(micro_batch_tokens=64)
    settings: dict[str, Any] = {"platform": "cpu", "timeout_s": 60, "self_check": False, "batching": batching}
    outcomes = []
    with megascend.MegatronBackend(model=checkpoint, **settings, **options) as backend:
        samples = backend.shard(causal_samples(token_lists()))
        if trains:
            train(backend, 2, samples)
            backend.save(str(folder / f"offload-{offload}"), wait=True)
            outcomes.append((train(backend, 3, samples), flat_state(backend)))
        if load is not None:
            backend.load(str(folder / load))
            outcomes.append((train(backend, 3, samples), flat_state(backend)))
    return outcomes


def compare(checkpoint: str, folder: Path, offload: bool | float, options: dict[str, Any]) -> int:
    """Raise unless runs with and without offload, and continued from each other's checkpoints, are equal bit for bit."""
    [(expected, state)] = run_of(checkpoint, folder, False, trains=True, load=None, **options)
    continued = [
        *run_of(checkpoint, folder, offload, trains=True, load="offload-False", **options),
        *run_of(checkpoint, folder, False, trains=False, load=f"offload-{offload}", **options),
    ]
    names = ("offloaded", "offloaded from a checkpoint without", "without from an offloaded checkpoint")
    for name, (results, other) in zip(names, continued, strict=True):
        assert results == expected, name
        assert other.keys() == state.keys(), name
        unequal = [key for key in state if not torch.equal(other[key].nan_to_num(7), state[key].nan_to_num(7))]
        assert not unequal, (name, unequal)
    return len(state)


LAYOUTS: dict[str, tuple[int, str, bool | float, dict[str, Any]]] = {
    "DP2": (2, "qwen3", True, {"precision": "bf16"}),
    "one process": (1, "qwen3", True, {"precision": "bf16"}),
    "one process, fp32": (1, "qwen3", True, {"precision": "fp32"}),
    "DP2, plain optimizer, fp16, half": (2, "qwen3", 0.5, {"precision": "fp16", "optimizer": {"distributed": False}}),
    "DP2, overlapped": (
        2,
        "qwen3",
        True,
        {"precision": "bf16", "optimizer": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    ),
    "TP2, groups": (
        2,
        "qwen3",
        True,
        {
            "precision": "bf16",
            "parallel": Parallel(tensor=2),
            "optimizer": {"groups": [{"match": "*.layers.0.*", "lr_scale": 0.5, "weight_decay": 0.4}]},
        },
    ),
    "EP2 x DP2, half": (4, "qwen3_moe", 0.5, {"precision": "bf16", "parallel": Parallel(expert=2)}),
}


@pytest.mark.usefixtures("megatron_imported", "small_chunks")
@pytest.mark.parametrize(
    "layout", [layout if layout == "DP2" else pytest.param(layout, marks=pytest.mark.nightly) for layout in LAYOUTS]
)
def test_runs_with_and_without_offload_are_equal_bit_for_bit(parity_folder: Path, tmp_path: Path, layout: str) -> None:
    world_size, arch, offload, options = LAYOUTS[layout]
    checkpoint = str(case_checkpoint(parity_folder, arch))
    counts = run_distributed(compare, world_size, checkpoint, tmp_path, offload, options, init=False, timeout_s=300)
    assert min(counts) > 20
