"""Which rows of Megatron's fused layers are which rows of Hugging Face's weights, against layers fused by hand."""

from types import SimpleNamespace

import pytest
import torch

from megascend.errors import ConfigError
from megascend.lora.target_modules import ModelLayout, find_target_modules, matches, restrict

HIDDEN, HEADS, GROUPS, SIZE, MIDDLE, EXPERTS, VOCABULARY = 6, 4, 2, 3, 8, 4, 7
CONFIG = SimpleNamespace(
    multi_latent_attention=False,
    kv_channels=SIZE,
    num_query_groups=GROUPS,
    num_attention_heads=HEADS,
    gated_linear_unit=True,
    num_moe_experts=EXPERTS,
    hf_model_type="test",
    untie_embeddings_and_output_weights=True,
)


def weight(name, rows, columns):
    """Every element says where it is in which weight."""
    start = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "up_proj": 6, "down_proj": 7}[name]
    return start * 1e4 + torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)


HUGGING_FACE = {
    "q_proj": weight("q_proj", HEADS * SIZE, HIDDEN),
    "k_proj": weight("k_proj", GROUPS * SIZE, HIDDEN),
    "v_proj": weight("v_proj", GROUPS * SIZE, HIDDEN),
    "o_proj": weight("o_proj", HIDDEN, HEADS * SIZE),
    "gate_proj": weight("gate_proj", MIDDLE, HIDDEN),
    "up_proj": weight("up_proj", MIDDLE, HIDDEN),
    "down_proj": weight("down_proj", HIDDEN, MIDDLE),
}
HUGGING_FACE["gate_up_proj"] = torch.cat([HUGGING_FACE["gate_proj"], HUGGING_FACE["up_proj"]])


def megatron_layer(tensor, rank):
    """The four fused weights of one tensor parallel rank, put together head by head."""
    hf = HUGGING_FACE
    qkv = []
    for group in range(rank * GROUPS // tensor, (rank + 1) * GROUPS // tensor):
        for head in range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS):
            qkv.append(hf["q_proj"][head * SIZE : (head + 1) * SIZE])
        qkv += [hf[name][group * SIZE : (group + 1) * SIZE] for name in ("k_proj", "v_proj")]
    fc1 = torch.cat([hf[name].chunk(tensor)[rank] for name in ("gate_proj", "up_proj")])
    return torch.cat(qkv), hf["o_proj"].chunk(tensor, 1)[rank], fc1, hf["down_proj"].chunk(tensor, 1)[rank]


def target_modules_of(tensor=1, rank=0, experts=False, expert=1, expert_rank=0, embedding_and_head=False, tied=False):
    qkv, proj, fc1, fc2 = (SimpleNamespace(weight=part) for part in megatron_layer(tensor, rank))
    mlp = SimpleNamespace(linear_fc1=fc1, linear_fc2=fc2)
    if experts:
        grouped = SimpleNamespace(
            linear_fc1=SimpleNamespace(weight0=fc1.weight), linear_fc2=SimpleNamespace(weight0=fc2.weight)
        )
        mlp = SimpleNamespace(experts=grouped)
    layer = SimpleNamespace(layer_number=3, self_attention=SimpleNamespace(linear_qkv=qkv, linear_proj=proj), mlp=mlp)
    names = [f"model.layers.2.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [f"model.layers.2.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    names += ["model.embed_tokens.weight", "lm_head.weight"]
    topology = SimpleNamespace(tensor=tensor, expert_tensor=tensor, expert=expert, sequence_parallel=False)
    place = SimpleNamespace(tensor=rank, expert_tensor=rank, expert=expert_rank)
    padded = SimpleNamespace(weight=torch.empty(-(-VOCABULARY // tensor), HIDDEN), reduce_scatter_embeddings=False)
    chunk = SimpleNamespace(
        decoder=SimpleNamespace(layers=[layer]),
        pre_process=embedding_and_head,
        post_process=embedding_and_head,
        share_embeddings_and_output_weights=tied,
        embedding=SimpleNamespace(word_embeddings=padded),
        output_layer=padded,
    )
    return find_target_modules([chunk], ModelLayout(CONFIG, topology, place, names, VOCABULARY))


@pytest.mark.parametrize(("tensor", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("experts", [False, True])
def test_every_row_and_column_is_where_the_site_says(tensor, rank, experts):
    target_modules = target_modules_of(tensor, rank, experts)
    covered = []
    for target in target_modules:
        local = getattr(target.module, "weight", None)
        local = target.module.weight0 if local is None else local
        columns = slice(target.in_start, target.in_start + target.in_features)
        for part in target.slices:
            whole = HUGGING_FACE[part.name.rsplit(".", 1)[-1]]
            assert (part.out_features, target.in_total) == tuple(whole.shape)
            assert torch.equal(local[part.local_rows], whole[part.global_rows][:, columns])
        rows = torch.cat([part.local_rows for part in target.slices]).sort().values
        assert torch.equal(rows, torch.arange(target.out_features)), "every row is in exactly one slice"
        covered += [part.name for part in target.slices]
    mlp = ["experts.gate_up_proj", "experts.down_proj"] if experts else ["gate_proj", "up_proj", "down_proj"]
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert covered == [f"model.layers.2.{name}" for name in [*attention, *(f"mlp.{name}" for name in mlp)]]


def test_experts_are_counted_over_expert_parallel_ranks():
    for target in target_modules_of(experts=True, expert=2, expert_rank=1)[2:]:
        assert target.is_expert
        assert (target.experts, target.expert_start, target.expert_total) == (2, 2, 4)


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
def test_ends_have_the_ranks_tokens_without_padding(tensor, rank, tokens):
    """Seven tokens on two ranks: the second has one row of padding."""
    start, stop = tokens
    embedding, *_, output = target_modules_of(tensor, rank, embedding_and_head=True)
    assert (embedding.is_embedding, output.is_output) == (True, True)
    assert (embedding.split, embedding.in_start, embedding.in_features) == ("row", start, stop - start)
    assert (embedding.in_total, embedding.out_features) == (VOCABULARY, HIDDEN)
    (part,) = output.slices
    assert (output.split, output.in_features, output.out_features) == ("column", HIDDEN, stop - start)
    assert (part.out_features, part.global_rows.tolist()) == (VOCABULARY, list(range(start, stop)))


def test_ends_that_share_a_weight_are_not_adapted():
    assert len(target_modules_of(embedding_and_head=True)) == 6
    assert len(target_modules_of(embedding_and_head=True, tied=True)) == 4


def test_restriction_keeps_the_targeted_parts():
    qkv, proj, *_ = target_modules_of()
    kept = restrict(qkv, ("v_proj", "q_proj"))
    assert [part.name.rsplit(".", 1)[-1] for part in kept.slices] == ["q_proj", "v_proj"]
    assert kept.out_features == qkv.out_features
    assert restrict(proj, ("v_proj", "q_proj")) is None
    assert kept.shape_key != qkv.shape_key


def test_attention_that_adapters_do_not_know_is_refused():
    layout = ModelLayout(
        SimpleNamespace(multi_latent_attention=True, hf_model_type="deepseek_v3"), None, None, ["layers.0.x.weight"], 7
    )
    with pytest.raises(ConfigError, match="deepseek_v3"):
        find_target_modules([], layout)
