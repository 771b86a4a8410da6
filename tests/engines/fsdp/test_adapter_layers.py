"""Adapters in transformers' modules, without sharding: experts in every order of storage, and modules that cannot be adapted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Qwen3Config

from megascend import Adam, Adapters, Lora, Schedule
from megascend.engines.fsdp.adapters import add_hooks
from megascend.engines.fsdp.transformers_api import COMPUTED_BY
from megascend.errors import ConfigError
from megascend.training.lora.adapter import Adapter
from megascend.training.lora.adapter_layers import AdapterLayers
from megascend.training.lora.registry import AdapterRegistry, AdapterSettings
from megascend.training.lora.segments import TokenSegments, token_segments
from megascend.training.lora.stacked_adapters import StackedAdapters
from megascend.training.lora.transformers_targets import (
    drawn_as,
    embedding_and_output,
    experts_without_gate,
    layer_targets,
)

CPU = torch.device("cpu")
EXPERTS, HIDDEN, MIDDLE, TOKENS, CHOSEN = 4, 6, 5, 12, 2


class Model(nn.Module):
    """A model with one layer, as far as adapters look at it."""

    def __init__(self, **inside: nn.Module) -> None:
        super().__init__()
        self.config = Qwen3Config()
        layer = nn.Module()
        for name, module in inside.items():
            layer.add_module(name, module)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(7, HIDDEN)
        self.model.layers = nn.ModuleList([layer])
        self.lm_head = nn.Linear(HIDDEN, 7, bias=False)

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head


def registry_of(model: Model) -> AdapterRegistry:
    targets = layer_targets(model)
    names = [target.slices[0].name for target in targets]
    settings = AdapterSettings(Adapters(), Adam(), Schedule(), 1, torch.float32, CPU)
    return AdapterRegistry.for_model(targets, names, settings)


def segments_of(counts: list[int]) -> TokenSegments:
    index = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return token_segments(index, counts, None, (0, 1), CPU)


def experts_of(kind: str) -> nn.Module:
    """Build experts of transformers with random parameters."""
    from transformers import AriaTextConfig, GptOssConfig, Qwen3MoeConfig
    from transformers.models.aria import modeling_aria
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": MIDDLE, "num_attention_heads": 1}
    if kind == "[experts, out, in]":
        module: nn.Module = Qwen3MoeExperts(Qwen3MoeConfig(moe_intermediate_size=MIDDLE, num_experts=EXPERTS, **sizes))
    elif kind == "interleaved, with biases":
        module = GptOssExperts(GptOssConfig(num_local_experts=EXPERTS, **sizes))
    elif hasattr(modeling_aria, "AriaExperts"):
        module = modeling_aria.AriaExperts(AriaTextConfig(moe_num_experts=EXPERTS, **sizes))
    else:
        pytest.skip("this transformers has no experts stored as [experts, in, out] without a bias")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.requires_grad_(False)


def with_deltas(adapter: Adapter, values: Tensor, registry: AdapterRegistry, module: Any) -> dict[str, Tensor]:
    """Return the experts' parameters with ``scaling * B A`` added, from a vector of the adapter's values."""
    factors: dict[str, dict[str, Tensor]] = {}
    for span, part in adapter.views(values):
        (target,) = registry.shape_groups[span.shape_group].target_modules
        name = target.slices[0].name.rsplit(".", 1)[-1]
        # [1, experts, 1, rank, in] and [1, experts, rank, out]
        factors.setdefault(name, {})[span.factor] = part[0, :, 0] if span.factor == "a" else part[0].mT
    parameters = {}
    for name, pair in factors.items():
        delta = adapter.lora.scaling * (pair["b"] @ pair["a"])
        parameters[name] = getattr(module, name) + (delta.mT if module.is_transposed else delta)
    return parameters


@pytest.mark.parametrize("kind", ["[experts, out, in]", "[experts, in, out]", "interleaved, with biases"])
@pytest.mark.parametrize("counts", [[5, 0, 7], [0, 12, 0]], ids=["two adapters", "one of three"])
def test_adapted_experts_match_transformers_with_merged_weights(kind, counts):
    torch.manual_seed(3)
    module = experts_of(kind)
    mlp = nn.Module()
    mlp.experts = module
    model = Model(mlp=mlp)
    registry = registry_of(model)
    layers = add_hooks(model, registry.shape_groups)
    adapters = [registry.create(name, Lora(rank=rank, alpha=3.0)) for name, rank in (("a", 2), ("b", 3), ("c", 1))]
    for adapter in adapters:
        nn.init.normal_(adapter.values, std=0.5)
    hidden, weights = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, CHOSEN)
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
    upstream = torch.randn(TOKENS, HIDDEN)

    def inputs() -> tuple[Tensor, Tensor]:
        return hidden.clone().requires_grad_(), weights.clone().requires_grad_()

    reference_inputs, vectors = inputs(), [adapter.values.detach().clone().requires_grad_() for adapter in adapters]
    parts, start = [], 0
    for adapter, vector, count in zip(adapters, vectors, counts, strict=True):
        rows = slice(start, start + count)
        merged = with_deltas(adapter, vector, registry, module)
        parts.append(
            functional_call(module, merged, (reference_inputs[0][rows], index[rows], reference_inputs[1][rows]))
        )
        start += count
    expected = torch.cat(parts)
    expected.backward(upstream)

    stacked = StackedAdapters(adapters, registry.shape_groups, torch.float32, CPU)
    stacked.fill()
    hidden_states, routing_weights = inputs()
    layers.stacked = stacked
    layers.segments = segments_of(counts)
    compute, token_adapters = getattr(module, COMPUTED_BY)
    actual = compute(module, hidden_states, index, routing_weights, token_adapters())
    layers.require_called()
    actual.backward(upstream)
    stacked.collect()
    torch.testing.assert_close(actual, expected)
    for tensor, reference in zip((hidden_states, routing_weights), reference_inputs, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad)
    for adapter, vector, count in zip(adapters, vectors, counts, strict=True):
        assert bool(adapter.grads.any()) == bool(count)
        torch.testing.assert_close(adapter.grads, vector.grad if count else torch.zeros_like(vector))
    assert all(parameter.grad is None for parameter in module.parameters())


def linear_layers() -> tuple[Model, AdapterLayers, StackedAdapters]:
    model = Model(q_proj=nn.Linear(HIDDEN, HIDDEN), k_proj=nn.Linear(HIDDEN, HIDDEN))
    registry = registry_of(model)
    layers = add_hooks(model, registry.shape_groups)
    stacked = StackedAdapters([registry.create("a", Lora(rank=2))], registry.shape_groups, torch.float32, CPU)
    stacked.fill()
    return model, layers, stacked


def test_a_layer_that_is_not_called_is_refused():
    model, layers, stacked = linear_layers()
    (layer,) = model.model.layers
    layers.stacked = stacked
    layers.segments = segments_of([3])
    layer.q_proj(torch.randn(1, 3, HIDDEN))
    with pytest.raises(ConfigError, match=r"does not call its layer model\.layers\.0\.k_proj"):
        layers.require_called()
    layer.k_proj(torch.randn(1, 3, HIDDEN))
    layers.require_called()


def test_a_layer_that_sees_other_rows_than_the_tokens_is_refused():
    model, layers, stacked = linear_layers()
    (layer,) = model.model.layers
    layers.stacked = stacked
    layers.segments = segments_of([2, 1])
    with pytest.raises(ConfigError, match=r"q_proj computes 6 rows in a micro batch of 3 tokens"):
        layer.q_proj(torch.randn(3, 2, HIDDEN))
    layers.stacked = layers.segments = None
    assert layer.q_proj(torch.randn(3, 2, HIDDEN)).shape == (3, 2, HIDDEN), "without adapters nothing is asked"


def test_layer_targets_of_a_model():
    scaled = type("Scaled", (nn.Embedding,), {})
    model = Model(q_proj=nn.Linear(HIDDEN, 4), gate=nn.Linear(HIDDEN, 4))
    names = [target.slices[0].name for target in layer_targets(model)]
    assert names == ["model.layers.0.q_proj"], "a router is no target"
    assert [target.slices[0].name for target in embedding_and_output(model)] == ["model.embed_tokens", "lm_head"]
    model.model.embed_tokens = scaled(7, HIDDEN)
    assert [target.slices[0].name for target in embedding_and_output(model)] == ["lm_head"]
    mlp = nn.Module()
    mlp.experts = nn.Module()
    mlp.experts.has_gate, mlp.experts.down_proj = False, nn.Parameter(torch.zeros(2, 3, 4))
    ungated = Model(mlp=mlp)
    assert layer_targets(ungated) == []
    assert list(experts_without_gate(ungated)) == ["model.layers.0.mlp.experts"]


@pytest.mark.parametrize(
    ("name", "allowed", "expected"),
    [
        ("a.v_proj", ["a.q_proj", "a.k_proj", "a.v_proj"], "a.q_proj"),
        ("a.v_proj", ["a.k_proj", "a.v_proj", "b.q_proj"], "a.k_proj"),
        ("a.up_proj", ["a.gate_proj", "a.up_proj"], "a.gate_proj"),
        ("a.down_proj", ["a.gate_proj", "a.down_proj"], None),
        ("a.up_proj", [], None),
    ],
)
def test_layers_that_megatron_fuses_draw_one_mask(name, allowed, expected):
    assert drawn_as(name, allowed) == expected
