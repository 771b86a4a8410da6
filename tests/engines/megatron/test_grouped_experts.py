"""``moe.experts: grouped``: the same training in every layout, one tensor of all experts, and what is refused."""

from __future__ import annotations

import gc
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend import Moe, Parallel, Recompute
from megascend.errors import ConfigError
from megascend.testing import run_distributed
from megascend.testing.parity import (
    STEPS,
    Case,
    TrainingCurve,
    case_backend,
    case_checkpoint,
    causal_samples,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from support.lora_parity import adapter_differences, case_adapter, peft_reference, run_mixed, share_of

pytestmark = pytest.mark.usefixtures("megatron_imported")

MOE: dict[str, Any] = {"arch": "qwen3_moe", "logits_bound": 2e-5, "experts": "grouped"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TP2_EP2 = Parallel(tensor=2, expert=2, expert_tensor=1)
CASES = [
    Case("recomputed activation", recompute=Recompute(granularity="selective", modules=("moe_act",)), **MOE),
    Case("TP2 x EP2 + SP", 2, TP2_EP2, **MOE),
    Case("DP2, overlapped", 2, optimizer=OVERLAP, **MOE),
]
MORE = [
    Case("single", **MOE),
    Case("full recompute", recompute=Recompute(granularity="full"), **MOE),
    Case("saved and loaded", resumes=True, **MOE),
    Case("auxiliary loss", aux_loss=0.01, micro_batch_tokens=4096, **MOE | {"loss_bound": 5e-5, "norm_bound": 3e-4}),
    Case("DP2, plain optimizer", 2, optimizer={"distributed": False}, **MOE),
    Case("TP2 + SP (ETP2)", 2, Parallel(tensor=2), **MOE),
    Case("EP2", 2, Parallel(expert=2), **MOE),
    Case("EP2, padded", 2, Parallel(expert=2), packing=False, **MOE | {"micro_batch_tokens": 200}),
    Case("CP2 x EP2", 2, Parallel(context=2, expert=2), **MOE),
    Case("EP2 x DP2, overlapped", 4, Parallel(expert=2), optimizer=OVERLAP, **MOE),
    Case("TP2 x PP2 x EP2", 4, Parallel(tensor=2, pipeline=2, expert=2, expert_tensor=1), **MOE),
    Case("TP2 x EP2, ETP2", 4, Parallel(tensor=2, expert=2, expert_tensor=2), **MOE),
]


def parameters(short: list[Case], long: list[Case]) -> list[Any]:
    return short + [pytest.param(case, marks=pytest.mark.nightly) for case in long]


# differs: outputs that recomputation replaces, without a compiler
@pytest.mark.difference_cases("recomputed activation")
@pytest.mark.parametrize("case", parameters(CASES, MORE), ids=lambda case: case.name)
def test_trajectory_equals_hugging_face(case: Case, parity_folder):
    checkpoint, tokens = case_checkpoint(parity_folder, case.arch), token_lists()
    reference = hf_reference(parity_folder, checkpoint, tokens, aux_loss=case.aux_loss, aux_formula=case.aux_formula)
    difference = differences(train_case(case, checkpoint, tokens), reference)
    assert difference.loss <= case.loss_bound, difference
    assert difference.grad_norm <= case.norm_bound, difference
    assert difference.logits is None or difference.logits <= case.logits_bound, difference


def resumed(before: Case, after: Case, checkpoint: Path, saved: Path) -> TrainingCurve:
    """Train half of the steps with one setting, and the rest with another one, from a checkpoint."""
    losses, norms = [], []
    backend = case_backend(before, checkpoint)
    samples = backend.shard(causal_samples(token_lists()))
    for number in range(STEPS):
        if number == STEPS // 2:
            backend.save(saved, wait=True)
            backend.close()
            backend = case_backend(after, checkpoint)
            backend.load(saved)
        losses.append(backend.forward_backward(samples).loss)
        norms.append(backend.optimizer_step().grad_norm)
    backend.close()
    return TrainingCurve(losses, norms, [])


@pytest.mark.nightly
@pytest.mark.parametrize("order", [("upstream", "grouped"), ("grouped", "upstream")], ids=" to ".join)
def test_a_checkpoint_serves_either(order: tuple[Any, Any], parity_folder, tmp_path):
    """Load a checkpoint whose optimizer shards of two ranks have another order of parameters."""
    checkpoint = case_checkpoint(parity_folder, "qwen3_moe")
    before, after = (Case("DP2", 2, **MOE | {"experts": experts}) for experts in order)
    ranks = run_distributed(resumed, 2, before, after, checkpoint, tmp_path / "saved", init=False, timeout_s=120)
    difference = differences(ranks[0], hf_reference(parity_folder, checkpoint, token_lists()))
    assert difference.loss <= before.loss_bound, difference
    assert difference.grad_norm <= before.norm_bound, difference


@pytest.mark.nightly_cases("EP2-2")  # covered: trajectories of TP2 x EP2 + SP; lora/test_parity_with_peft.py: experts
@pytest.mark.parametrize(
    ("case", "tenants"),
    [
        *((case, 2) for case in MORE if case.name == "EP2"),
        pytest.param(CASES[1], 3, marks=pytest.mark.nightly),
        *(pytest.param(case, 1, marks=pytest.mark.nightly) for case in MORE if case.name == "full recompute"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_tenants_equal_pefts(case: Case, tenants: int, parity_folder, tmp_path):
    """Adapt experts, whose rows are sorted by tenant and expert on the device; one tenant's are in order already."""
    checkpoint = case_checkpoint(parity_folder, case.arch)
    adapters = [case_adapter(checkpoint, case, seed=seed) for seed in range(tenants)]
    ranks = run_distributed(
        run_mixed, case.world_size, case, checkpoint, adapters, STEPS, tmp_path, init=False, timeout_s=120
    )
    for number, adapter in enumerate(adapters):
        reference = peft_reference(parity_folder, checkpoint, adapter, share_of(number, tenants))
        difference = adapter_differences(ranks[0][number], reference)
        assert difference.loss <= case.loss_bound, difference
        assert difference.grad_norm <= case.norm_bound, difference
        assert difference.factors <= 1e-3, difference


def test_the_grouped_path_is_the_one_that_runs(parity_folder):
    """Check that experts are views of one tensor and of Megatron's gradient buffer, and that each has a gradient."""
    from megascend.engines.megatron.grouped_experts import IndexedDispatcher, one_view

    backend = case_backend(MORE[0], case_checkpoint(parity_folder, "qwen3_moe"))
    (chunk,) = backend.engine.bare_chunks
    backend.forward_backward(causal_samples(token_lists()))
    for layer in chunk.decoder.layers:
        assert isinstance(layer.mlp.token_dispatcher, IndexedDispatcher)
        for grouped in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
            weights = [getattr(grouped, f"weight{index}") for index in range(grouped.num_gemms)]
            assert one_view([weight.data for weight in weights]).data_ptr() == weights[0].data_ptr()
            assert one_view([weight.main_grad for weight in weights]).any(-1).any(-1).all()
            assert all(weight.grad is None for weight in weights)
    backend.close()


def tensors_of_graphs() -> list[torch.Tensor]:
    gc.collect()
    return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and item.grad_fn is not None]


@pytest.mark.parametrize("modules", [None, ("moe",)], ids=["full", "moe"])
@pytest.mark.parametrize("experts", ["grouped", "upstream"])
@pytest.mark.nightly_cases("upstream-moe", "grouped-full")  # covered: grouped-moe, upstream-full
def test_backward_pass_leaves_no_graph_of_a_layer(experts: Any, modules: Any, parity_folder: Path) -> None:
    recompute = Recompute(granularity="selective", modules=modules) if modules else Recompute(granularity="full")
    case = Case("recomputed", recompute=recompute, **MOE | {"experts": experts})
    with case_backend(case, case_checkpoint(parity_folder, "qwen3_moe")) as backend:
        before = tensors_of_graphs()  # by which Megatron's DDP gets its hooks
        backend.forward_backward(causal_samples(token_lists()[:2]))
        after = tensors_of_graphs()
        assert [tuple(tensor.shape) for tensor in after if not any(tensor is other for other in before)] == []


def test_tensors_that_do_not_lie_evenly_have_no_common_view():
    from megascend.engines.megatron.grouped_experts import one_view

    storage = torch.arange(40.0)
    parts = [storage[start : start + 6].view(2, 3) for start in (0, 8, 16, 24)]
    assert one_view(parts).tolist() == [part.tolist() for part in parts]
    assert one_view(parts[:1]).shape == (1, 2, 3)
    for uneven in (
        parts[::-1],
        [*parts, storage[30:36].view(2, 3)],
        [parts[0], storage[5:11].view(2, 3)],
        [parts[0], parts[1].clone()],
        [parts[0], storage[8:14].view(3, 2)],
        [part.T for part in parts],
    ):
        assert one_view(uneven) is None


def config(**changed: Any) -> Any:
    """Build the part of mcore-bridge's configuration that the checks read."""
    sizes = {"num_moe_experts": 4, "hidden_size": 64, "moe_ffn_hidden_size": 32, "expert_tensor_parallel_size": 1}
    return types.SimpleNamespace(
        **{"hf_model_type": "qwen3_moe", "moe_expert_capacity_factor": None, **sizes, **changed}
    )


@pytest.mark.parametrize(
    ("device", "changed", "words"),
    [
        ("npu", {}, "on NPUs experts are those of the provider's packages"),
        ("cpu", {"num_moe_experts": None, "hf_model_type": "qwen3"}, "qwen3 has no experts"),
        ("cpu", {"moe_permute_fusion": True}, "the model has moe_permute_fusion"),
        ("cpu", {"moe_expert_capacity_factor": 1.0}, "tokens above a capacity are dropped"),
    ],
)
def test_unsupported_settings_of_grouped_experts_raise_config_error(device, changed, words):
    device = types.SimpleNamespace(type=device)
    assert not is_enabled("auto", config(**changed), "bf16", device)
    with pytest.raises(ConfigError, match=f"moe.experts: grouped, but {words}; set moe.experts: upstream"):
        is_enabled("grouped", config(**changed), "bf16", device)
    assert is_enabled("grouped", config(), "fp32", torch.device("cpu"))
    assert not is_enabled("upstream", config(**changed), "bf16", device)


def is_enabled(experts: Any, config: Any, precision: Any, device: Any, *, overlapped: bool = False) -> bool:
    """Call the engine's check with ``moe.experts``."""
    from megascend.engines.megatron import grouped_experts

    return grouped_experts.is_enabled(Moe(experts=experts), config, precision, device, overlapped=overlapped)


@pytest.mark.parametrize(
    ("capability", "precision", "changed", "words"),
    [
        ((10, 0), "bf16", {}, "need compute capability 9.0, and this is some GPU"),
        ((9, 0), "fp32", {}, "need precision bf16, not fp32"),
        ((9, 0), "bf16", {"moe_ffn_hidden_size": 40, "expert_tensor_parallel_size": 2}, "not 64 and 20"),
    ],
)
def test_unsupported_gpu_settings_raise_config_error(capability, precision, changed, words, monkeypatch, caplog):
    """Also check that ``auto`` leaves experts to upstream, with the reason in the log."""
    kernel, gpu = "torch" if capability == (9, 0) else None, torch.device("cuda", 0)
    monkeypatch.setattr("megascend.engines.megatron.grouped_experts.kernel_of", lambda device: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    with pytest.raises(ConfigError, match=words):
        is_enabled("grouped", config(**changed), precision, gpu)
    caplog.set_level("INFO")
    assert not is_enabled("auto", config(**changed), precision, gpu)
    assert words in caplog.text


def test_auto_groups_experts_on_supported_gpus(monkeypatch, caplog):
    monkeypatch.setattr("megascend.engines.megatron.grouped_experts.kernel_of", lambda device: "torch")
    gpu = torch.device("cuda", 0)
    assert is_enabled("auto", config(), "bf16", gpu)
    assert is_enabled("grouped", config(), "bf16", gpu, overlapped=True)
    caplog.set_level("INFO")
    assert not is_enabled("auto", config(), "bf16", gpu, overlapped=True)
    assert "optimizer.overlap_grad_reduce may divide a layer's gradients" in caplog.text
    assert not is_enabled("auto", config(), "bf16", torch.device("cpu")), "a loop of products"
    caplog.clear()
    assert not is_enabled("auto", config(num_moe_experts=None), "bf16", gpu)
    assert not caplog.text, "a dense model has nothing to say about experts"
