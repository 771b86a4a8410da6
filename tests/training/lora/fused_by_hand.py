"""A transformer layer whose Megatron weights are assembled by hand from Hugging Face's."""

from types import SimpleNamespace

import torch

from megascend.training.lora.target_maps import find_target_modules
from megascend.training.lora.target_modules import ModelLayout

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
    """Build a weight in which every element encodes its weight and position."""
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
    """Build the four fused weights of one tensor parallel rank, head by head."""
    hf = HUGGING_FACE
    qkv = []
    for group in range(rank * GROUPS // tensor, (rank + 1) * GROUPS // tensor):
        for head in range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS):
            qkv.append(hf["q_proj"][head * SIZE : (head + 1) * SIZE])
        qkv += [hf[name][group * SIZE : (group + 1) * SIZE] for name in ("k_proj", "v_proj")]
    fc1 = torch.cat([hf[name].chunk(tensor)[rank] for name in ("gate_proj", "up_proj")])
    return torch.cat(qkv), hf["o_proj"].chunk(tensor, 1)[rank], fc1, hf["down_proj"].chunk(tensor, 1)[rank]


def layout_of(tensor, rank, names, expert=1, expert_rank=0, model_type="test"):
    topology = SimpleNamespace(tensor=tensor, expert_tensor=tensor, expert=expert, sequence_parallel=False)
    coordinates = SimpleNamespace(tensor=rank, expert_tensor=rank, expert=expert_rank)
    config = SimpleNamespace(**vars(CONFIG) | {"hf_model_type": model_type})
    return ModelLayout(config, topology, coordinates, names, VOCABULARY)


def chunk_of(layer, tensor=1, embedding_and_head=False, tied=False):
    padded = SimpleNamespace(weight=torch.empty(-(-VOCABULARY // tensor), HIDDEN), reduce_scatter_embeddings=False)
    return SimpleNamespace(
        decoder=SimpleNamespace(layers=[layer]),
        pre_process=embedding_and_head,
        post_process=embedding_and_head,
        share_embeddings_and_output_weights=tied,
        embedding=SimpleNamespace(word_embeddings=padded),
        output_layer=padded,
    )


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
    layout = layout_of(tensor, rank, names, expert, expert_rank)
    return find_target_modules([chunk_of(layer, tensor, embedding_and_head, tied)], layout)


def assert_rows_are_in_place(targets, hugging_face):
    """Compare rows and columns of the targets' weights with those of Hugging Face's; return their names."""
    covered = []
    for target in targets:
        local = getattr(target.module, "weight", None)
        local = target.module.weight0 if local is None else local
        columns = slice(target.in_start, target.in_start + target.in_features)
        for fused_slice in target.slices:
            weight = hugging_face[fused_slice.name.rsplit(".", 1)[-1]]
            assert (fused_slice.out_features, target.in_total) == tuple(weight.shape)
            assert torch.equal(local[fused_slice.local_rows], weight[fused_slice.global_rows][:, columns])
        rows = torch.cat([fused_slice.local_rows for fused_slice in target.slices]).sort().values
        assert torch.equal(rows, torch.arange(target.out_features)), "every row is in exactly one slice"
        covered += [fused_slice.name for fused_slice in target.slices]
    return covered
