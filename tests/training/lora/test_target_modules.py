"""Mapping of Megatron's fused rows to Hugging Face's weights, compared with layers fused by hand."""

from types import SimpleNamespace

import pytest
import torch
from fused_by_hand import (
    HIDDEN,
    HUGGING_FACE,
    VOCABULARY,
    assert_rows_are_in_place,
    chunk_of,
    layout_of,
    target_modules_of,
)

from megascend.errors import ConfigError
from megascend.training.lora.target_maps import find_target_modules
from megascend.training.lora.target_modules import matches


@pytest.mark.parametrize(("tensor", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("experts", [False, True])
def test_target_modules_locate_every_row_and_column(tensor, rank, experts):
    covered = assert_rows_are_in_place(target_modules_of(tensor, rank, experts), HUGGING_FACE)
    mlp = ["experts.gate_up_proj", "experts.down_proj"] if experts else ["gate_proj", "up_proj", "down_proj"]
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert covered == [f"model.layers.2.{name}" for name in [*attention, *(f"mlp.{name}" for name in mlp)]]


def test_targets_match_whole_components_only():
    name = "model.layers.1.self_attn.q_proj"
    assert matches(name, "all-linear")
    for target in ("q_proj", "self_attn.q_proj", "1.self_attn.q_proj", name):
        assert matches(name, [target])
    for target in ("proj", "_proj", "Q_proj", "q_proj.", "self_attn", "layers.1", "attn.q_proj", ".*q_proj", "k_proj"):
        assert not matches(name, [target])
    assert not matches("model.layers.11.self_attn.q_proj", ["1.self_attn.q_proj"])
    assert matches(name, ["k_proj", "q_proj"])
    for end in ("lm_head", "model.embed_tokens"):
        assert matches(end, [end])
        assert not matches(end, "all-linear"), "as in peft"


@pytest.mark.parametrize(("tensor", "rank", "tokens"), [(1, 0, (0, 7)), (2, 0, (0, 4)), (2, 1, (4, 7))])
def test_embedding_and_head_have_the_ranks_tokens_without_padding(tensor, rank, tokens):
    """Divide seven tokens over two ranks: the second has one padding row."""
    start, stop = tokens
    embedding, *_, output = target_modules_of(tensor, rank, embedding_and_head=True)
    assert (embedding.is_embedding, output.is_output) == (True, True)
    assert (embedding.split, embedding.in_start, embedding.in_features) == ("row", start, stop - start)
    assert (embedding.in_total, embedding.out_features) == (VOCABULARY, HIDDEN)
    (fused_slice,) = output.slices
    assert (output.split, output.in_features, output.out_features) == ("column", HIDDEN, stop - start)
    assert (fused_slice.out_features, fused_slice.global_rows.tolist()) == (VOCABULARY, list(range(start, stop)))


def test_an_embedding_and_a_head_that_share_a_weight_are_not_adapted():
    assert len(target_modules_of(embedding_and_head=True)) == 6
    assert len(target_modules_of(embedding_and_head=True, tied=True)) == 4


@pytest.mark.parametrize("gated", [False, True])
def test_attention_that_the_map_does_not_know_is_refused(gated):
    names = ["q_down", "linear_qkv"] if gated else ["q_down"]
    attention = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
    if gated:
        attention.linear_qkv = attention["linear_qkv"]
    layout = layout_of(1, 0, ["layers.0.x.weight"], model_type="deepseek_v3")
    layout.config.attention_output_gate = gated
    layer = SimpleNamespace(layer_number=1, self_attention=attention, mlp=torch.nn.Identity())
    with pytest.raises(ConfigError, match=r"layer 0 has ModuleDict.*'deepseek_v3'.*register_lora_targets"):
        find_target_modules([chunk_of(layer)], layout)
