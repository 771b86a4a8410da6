"""Detection of token-mixing layers by their modules, and of attention by the options that it passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megascend.engines.fsdp import transformers_api
from megascend.engines.fsdp.attention import KEYWORD, SampleLengths, attention, sample_lengths
from megascend.engines.fsdp.token_mixing import check_layers, pass_borders
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.scalar_head import ScalarHead

ALL_ATTENTION_FUNCTIONS: dict[str, Any] = {}
"""Name of transformers' registry in its modules."""


class Attention(nn.Module):
    def forward(self, states: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["any"](states)


class OwnAttention(nn.Module):
    def forward(self, states: Any) -> Any:
        return states.softmax(-1) @ states


class ShortConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3)


class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(2))


def replaceable(*arguments: str, replaced: bool = True) -> Any:
    """Return a function as transformers makes one that a package's replaces, which has these arguments."""
    is_new_implementation, applicable_params = replaced, arguments
    return lambda *args, **kwargs: (args, kwargs, is_new_implementation, applicable_params)


causal_conv1d_fn = replaceable("x", "weight", "seq_idx")
torch_chunk_gated_delta_rule = replaceable("q", "k", "v", "cu_seqlens")
"""Names of transformers' functions in its modules."""


class DeltaRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(2))

    def forward(self, states: Any, **kwargs: Any) -> Any:
        mixed = causal_conv1d_fn(states, **kwargs)
        return torch_chunk_gated_delta_rule(mixed, cu_seqlens=kwargs.pop("cu_seq_lens_q", None)), kwargs


class DeltaRuleWithoutBorders(DeltaRule):
    def forward(self, states: Any) -> Any:
        return torch_chunk_gated_delta_rule(causal_conv1d_fn(states))


class Model(nn.Module):
    def __init__(self, *layers: nn.Module, layer_types: tuple[str, ...] = (), extra: nn.Module | None = None) -> None:
        super().__init__()
        text = SimpleNamespace(model_type="novel", layer_types=layer_types)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.layers = nn.ModuleList(layers)
        self.extra = extra


def check(model: Model, packing: bool = True, context: int = 1) -> None:
    check_layers(model, model.layers, packing=packing, context=context, longest=64)


def layer(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts, nn.Linear(2, 2))


def test_layers_with_attention_of_the_registry_are_known() -> None:
    check(Model(layer(Attention()), layer(Attention())), context=2)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (layer(ShortConvolution()), "ShortConvolution in Sequential"),
        (layer(Attention(), StateSpace()), "StateSpace in Sequential"),
        (layer(OwnAttention()), "(Sequential)"),
    ],
    ids=["convolution", "state beside attention", "attention of its own"],
)
def test_other_layers_are_refused_where_samples_share_a_row_or_are_divided(other: nn.Module, named: str) -> None:
    model = Model(layer(Attention()), other)
    with pytest.raises(ConfigError, match="novel mixes tokens other than by attention") as packed:
        check(model)
    assert named in str(packed.value)
    assert str(packed.value).endswith("packed samples affect each other; set batching.packing: false")
    with pytest.raises(ConfigError, match=r"ignore those on other ranks; set parallel\.context: 1$"):
        check(model, packing=False, context=2)
    with pytest.raises(ConfigError, match=r"set batching\.packing: false and parallel\.context: 1$"):
        check(model, context=2)
    check(model, packing=False)


def test_linear_attention_whose_functions_know_borders_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(layer(Attention()), layer(DeltaRule()))
    check(model)
    with pytest.raises(
        ConfigError, match=r"\(DeltaRule in Sequential\), .*; set batching.packing: false and parallel.context: 1$"
    ):
        check(model, context=2)
    with pytest.raises(ConfigError, match=r"set batching\.packing: false$"):
        check(Model(layer(Attention()), layer(DeltaRuleWithoutBorders())))
    monkeypatch.setitem(globals(), "causal_conv1d_fn", replaceable("x", "weight"))
    with pytest.raises(
        ConfigError,
        match=r"; install flash-linear-attention, whose functions keep them apart, or set batching\.packing: false$",
    ):
        check(model)
    monkeypatch.setitem(globals(), "torch_chunk_gated_delta_rule", replaceable("q", "cu_seqlens", replaced=False))
    with pytest.raises(ConfigError, match="install flash-linear-attention, "):
        check(model)
    monkeypatch.setitem(globals(), "causal_conv1d_fn", lambda states, **kwargs: states)  # of an older transformers
    with pytest.raises(ConfigError, match=r"affect each other; set batching\.packing: false$"):
        check(model)
    check(model, packing=False)


def test_borders_reach_linear_attention() -> None:
    model = Model(layer(DeltaRule()))
    pass_borders(model)
    module: Any = next(module for module in model.modules() if isinstance(module, DeltaRule))
    (_, rule, *_), rest = module(
        QUERY, **{KEYWORD: sample_lengths((3, 1, 2), None, torch.device("cpu"), torch.float32)}
    )
    assert rule["cu_seqlens"].tolist() == [0, 3, 4, 6]
    assert rest["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2]]
    (_, rule, *_), rest = module(QUERY, **{KEYWORD: ROW})
    assert rule["cu_seqlens"] is None
    assert rest.keys() == {KEYWORD}
    with pytest.raises(ConfigError, match="do not pass keywords on to DeltaRule"):
        module(QUERY)


def test_mixers_outside_of_the_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(ShortConvolution\)"):
        check(Model(layer(Attention()), extra=ShortConvolution()))


def test_models_without_attention_of_the_registry_are_refused_in_every_layout() -> None:
    with pytest.raises(ConfigError, match="does not take its attention from transformers' registry"):
        check(Model(layer(OwnAttention())), packing=False)
    check(Model(layer(StateSpace())), packing=False)


def test_chunked_attention_is_refused_in_every_layout() -> None:
    with pytest.raises(ConfigError, match="chunked_attention, whose mask is not supported"):
        check(Model(layer(Attention()), layer_types=("full_attention", "chunked_attention")), packing=False)


WINDOWED = {
    "phimoe": {"sliding_window": 16},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 16},
    "mistral": {"sliding_window": 16},
    "olmoe": {"sliding_window": 16},
}


@pytest.mark.parametrize(
    ("model_type", "head"),
    [("phimoe", None), ("qwen2_moe", None), ("qwen2_moe", ScalarHead("token", bias=True)), ("mistral", None)],
)
def test_sliding_window_only_in_the_mask_is_refused(model_type: str, head: ScalarHead | None) -> None:
    check_window(model_type, 16, head)
    check_window(
        model_type,
        64,
        head,
        sliding_window=None,
        **({"use_sliding_window": False} if model_type == "qwen2_moe" else {}),
    )
    if model_type == "mistral":  # its attention is given the window
        check_window(model_type, 64, head)
        return
    with pytest.raises(
        ConfigError, match=f"{model_type} has a sliding window of 16 tokens, applied only by a mask"
    ) as caught:
        check_window(model_type, 64, head)
    assert "set batching.max_length: 16 or less" in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("olmoe", {}, "olmoe has sliding_window: 16, which some of transformers' attention functions ignore"),
        (
            "qwen2_moe",
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "sliding_window: 0, which",
        ),
    ],
)
def test_sliding_window_without_a_mask_or_tokens_is_refused(model_type: str, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_window(model_type, 64, None, **settings)


def check_window(model_type: str, longest: int, head: ScalarHead | None, **settings: Any) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 64, "intermediate_size": 32}
    config = AutoConfig.for_model(model_type, **sizes | WINDOWED[model_type] | settings)
    with torch.device("meta"):
        model = transformers_api.engine_model(config, head)
    check_layers(model, transformers_api.layers(model), packing=False, context=1, longest=longest)


QUERY = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
ROW = SampleLengths(None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "an attention mask"),
        ({"position_bias": torch.zeros(1, 2, 5, 5)}, "position_bias"),
        ({"indices": torch.zeros(1, 5, 2)}, "indices"),
        ({"softcap": 30.0}, "softcap"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_attention_that_asks_for_more_raises_config_error(options: dict[str, Any], named: str) -> None:
    options = {"attention_mask": None} | options | {KEYWORD: ROW}
    with pytest.raises(ConfigError, match=f"attention with {named} \\(Attention\\) is not supported"):
        attention(Attention(), QUERY, QUERY, QUERY, **options)


@pytest.mark.parametrize("packed", [None, (3, 2)], ids=["a row each", "packed"])
def test_attention_returns_contiguous_tensors_as_transformers_does(packed: tuple[int, ...] | None) -> None:
    """Return contiguous tensors, because some layers call ``view`` on them."""
    starts = None if packed is None else torch.tensor([0, 3, 5], dtype=torch.int32)
    lengths = SampleLengths(packed, starts=starts, longest=None if packed is None else torch.tensor([3]))
    options = {KEYWORD: lengths, "position_ids": torch.arange(5)[None]}
    mixed, _ = attention(Attention(), QUERY, QUERY, QUERY, None, **options)
    assert mixed.shape == (1, 5, 2, 4)
    assert mixed.is_contiguous()
