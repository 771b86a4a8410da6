"""Maps of an architecture's target modules that a package outside megascend registers."""

import importlib
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from fused_by_hand import HUGGING_FACE, assert_rows_are_in_place, chunk_of, layout_of, megatron_layer

from megascend import ConfigError, register_lora_targets
from megascend.training.lora.target_maps import find_target_modules, layer_targets

OUTSIDE = """
    import torch
    import megascend
    from megascend.training.lora.target_maps import attention, linear
    from megascend.training.lora.target_modules import FusedSlice, TargetModule


    def query_key_value(module, number, layout):
        \"\"\"One weight, ``attention.query_key_value``: all queries above all keys above all values, head by head.\"\"\"
        rank, size = layout.tensor_rank(expert=False)
        width, groups = layout.config.kv_channels, layout.config.num_query_groups
        heads = layout.config.num_attention_heads // groups  # of one query group
        numbers = torch.arange(groups * (heads + 2) * width).view(groups * (heads + 2), width)
        queries, keys, values = numbers.split([groups * heads, groups, groups])
        # Megatron's order: of every query group its queries, its key, its value; and each rank has some of the groups.
        order = torch.cat([queries.view(groups, heads, width), keys[:, None], values[:, None]], dim=1)
        mine = order.chunk(size)[rank].flatten()
        name = layout.name(number, "attention", "query_key_value")
        fused_slice = FusedSlice(name, numbers.numel(), torch.arange(len(mine)), mine)
        return TargetModule.of(module, "column", layout, [fused_slice])


    def fused_attention(layer, number, layout):
        yield query_key_value(layer.self_attention.linear_qkv, number, layout)
        yield linear(layer.self_attention.linear_proj, "row", layout, [layout.name(number, "attention", "dense")])


    megascend.register_lora_targets("outside", fused_attention)
    megascend.register_lora_targets("llama", attention)
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Create a package ``outside_targets``, which registers two maps when it is imported; yield its parent folder."""
    package = tmp_path / "outside_targets"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(OUTSIDE), encoding="utf-8")
    monkeypatch.setattr("megascend.training.lora.target_maps._by_model_type", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("outside_targets", None)


@pytest.mark.parametrize(("tensor", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_registered_map_locates_every_row(outside, tensor, rank):
    importlib.import_module("outside_targets")
    qkv, proj, *_ = (SimpleNamespace(weight=weight) for weight in megatron_layer(tensor, rank))
    layer = SimpleNamespace(layer_number=3, self_attention=SimpleNamespace(linear_qkv=qkv, linear_proj=proj))
    names = [f"model.layers.2.attention.{name}.weight" for name in ("query_key_value", "dense")]
    targets = find_target_modules([chunk_of(layer, tensor)], layout_of(tensor, rank, names, model_type="outside"))
    hugging_face = {
        "query_key_value": torch.cat([HUGGING_FACE[name] for name in ("q_proj", "k_proj", "v_proj")]),
        "dense": HUGGING_FACE["o_proj"],
    }
    assert [f"{name}.weight" for name in assert_rows_are_in_place(targets, hugging_face)] == names


def test_an_architecture_has_one_map(outside):
    importlib.import_module("outside_targets")
    register_lora_targets("another", layer_targets)
    register_lora_targets("another", layer_targets)
    with pytest.raises(ConfigError, match="another map is registered for model_type 'outside'"):
        register_lora_targets("outside", layer_targets)
