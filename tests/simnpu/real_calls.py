"""Generated calls of fused operators, as expressions for ``real_torch_npu.outcomes``: mostly right, often wrong in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[Any], Any]
Arguments = Callable[[Draw, str], str]
CALLS: dict[str, Callable[[Draw], str]] = {}
"""For each operator, a function that draws the arguments of one call of it."""

FLOATS = st.sampled_from(["bfloat16"] * 4 + ["float16", "float32", "float64", "int32", "bool"])
SIZE = st.integers(1, 5)
SHAPES = st.lists(SIZE, min_size=1, max_size=5)


def calls(operators: str) -> Callable[[Arguments], Arguments]:
    def enter(draw_arguments: Arguments) -> Arguments:
        for name in operators.split():
            CALLS[name] = lambda draw, name=name: f"npu.{name}({draw_arguments(draw, name)})"
        return draw_arguments

    return enter


def t(shape: Sequence[int], dtype: str = "bfloat16", **options: Any) -> str:
    sizes = "".join(f"{size}, " for size in shape)
    return f't({sizes}dtype="{dtype}"{"".join(f", {key}={value}" for key, value in options.items())})'


def changed(draw: Draw, shape: Sequence[int]) -> list[int]:
    """Return a shape, one time in five with another size or number of dimensions."""
    shape = list(shape)
    change = draw(st.integers(0, 9))
    if change == 0 and shape:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(SIZE)
    elif change == 1:
        shape = draw(SHAPES)
    return shape


@calls("npu_swiglu npu_geglu")
def halves(draw: Draw, name: str) -> str:
    shape = draw(SHAPES)
    dim = draw(st.integers(-len(shape) - 1, len(shape)))
    if -len(shape) <= dim < len(shape) and draw(st.integers(0, 3)):
        shape[dim] *= 2
    return f"{t(shape, draw(FLOATS))}, dim={dim}"


@calls("npu_gelu fast_gelu npu_fast_gelu npu_silu")
def pointwise(draw: Draw, name: str) -> str:
    approximate = draw(st.sampled_from(["", 'approximate="tanh"', 'approximate="none"', 'approximate="x"']))
    return f"{t(draw(SHAPES), draw(FLOATS))}{', ' + approximate if approximate and name == 'npu_gelu' else ''}"


@calls("npu_rms_norm npu_gemma_rms_norm npu_add_rms_norm")
def norms(draw: Draw, name: str) -> str:
    shape, dtype = draw(SHAPES), draw(FLOATS)
    gamma = changed(draw, shape[draw(st.integers(0, len(shape) - 1)) :])
    second = f"{t(changed(draw, shape), dtype)}, " if name == "npu_add_rms_norm" else ""
    return f"{t(shape, dtype)}, {second}{t(gamma, draw(st.sampled_from([dtype, 'float32'])))}"


@calls("npu_rotary_mul")
def rotary(draw: Draw, name: str) -> str:
    b, s, n, d = draw(SIZE), draw(SIZE), draw(SIZE), 2 * draw(SIZE)
    x, cos = draw(st.sampled_from([((b, n, s, d), (1, 1, s, d)), ((b, s, n, d), (1, s, 1, d)), ((s, n, d), (s, 1, d))]))
    mode = draw(st.sampled_from(["half", "interleave", "quarter"]))
    angles = t(changed(draw, cos))
    return f'{t(changed(draw, x), draw(FLOATS))}, {angles}, {angles}, "{mode}"'


@calls("npu_scaled_masked_softmax")
def masked_softmax(draw: Draw, name: str) -> str:
    shape = changed(draw, [draw(SIZE), draw(SIZE), 32, draw(st.sampled_from([32, 64, 48]))])
    return f"{t(shape, draw(FLOATS))}, {t(changed(draw, [1, 1, *shape[-2:]]), 'bool')}, 0.5, False"


@calls("npu_bmmV2")
def batched_product(draw: Draw, name: str) -> str:
    b, m, k, n = (draw(SIZE) for _ in range(4))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    return f"{t(changed(draw, (b, m, k)), dtype)}, {t(changed(draw, (b, k, n)), dtype)}, []"


@calls("npu_linear")
def linear(draw: Draw, name: str) -> str:
    m, k, n = (draw(SIZE) for _ in range(3))
    bias = draw(st.sampled_from(["", f", {t((n,))}"]))
    return f"{t(changed(draw, (m, k)))}, {t(changed(draw, (n, k)))}{bias}"


@calls("npu_confusion_transpose")
def transpose(draw: Draw, name: str) -> str:
    shape = draw(st.lists(SIZE, min_size=2, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    first = draw(st.booleans())
    moved = [shape[i] for i in order] if first else shape
    return f"{t(shape)}, {order}, {[moved[0] * moved[1], *moved[2:]] if first else moved}, {first}"


@calls("npu_moe_token_permute")
def permute(draw: Draw, name: str) -> str:
    tokens, topk = draw(SIZE), draw(SIZE)
    indices = t(changed(draw, (tokens, topk)), draw(st.sampled_from(["int32", "int64", "float32"])))
    rows = draw(st.sampled_from([None, 0, tokens * topk, 1, 99, -1]))
    return f"{t(changed(draw, (tokens, 4)), draw(FLOATS))}, {indices}, {rows}"


@calls("npu_moe_token_unpermute")
def unpermute(draw: Draw, name: str) -> str:
    tokens, topk = draw(SIZE), draw(SIZE)
    probs = draw(st.sampled_from([f", {t((tokens, topk))}", ""]))
    rows = tokens * topk
    return f"{t((rows, 4), draw(FLOATS))}, {t((rows,), draw(st.sampled_from(['int32', 'int64'])), fill=-1)}{probs}"


@calls("npu_moe_gating_top_k_softmax")
def gating_softmax(draw: Draw, name: str) -> str:
    shape = draw(st.lists(SIZE, min_size=1, max_size=4))
    return f"{t(shape, draw(FLOATS))}, None, k={draw(st.integers(0, 6))}"


@calls("npu_moe_gating_top_k")
def gating(draw: Draw, name: str) -> str:
    groups, k = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 9))
    flag, kind = draw(st.booleans()), draw(st.sampled_from([0, 1]))
    return f"{t(changed(draw, (3, 16)), draw(FLOATS))}, {k}, group_count={groups}, k_group=1, out_flag={flag}, norm_type={kind}"


@calls("npu_moe_init_routing")
def init_routing(draw: Draw, name: str) -> str:
    rows, k = draw(SIZE), draw(SIZE)
    index = t(changed(draw, (rows, k)), "int32", fill=-1)
    return f"{t((rows, 4), draw(FLOATS))}, {index}, {t((rows, k), 'int32')}, {draw(st.integers(1, 6))}"


@calls("npu_moe_init_routing_v2")
def init_routing_v2(draw: Draw, name: str) -> str:
    rows, k = draw(SIZE), draw(SIZE)
    options = (
        f"active_num={draw(st.sampled_from([-1, 0, rows * k]))}, expert_tokens_num_type={draw(st.integers(0, 2))}, "
    )
    options += f"expert_tokens_num_flag={draw(st.booleans())}, quant_mode={draw(st.sampled_from([-1, -1, 1]))}, "
    return f"{t((rows, 4), draw(FLOATS))}, {t((rows, k), 'int32')}, expert_num=4, {options}active_expert_range=[0, 4]"


@calls("npu_cross_entropy_loss")
def cross_entropy(draw: Draw, name: str) -> str:
    n, c = draw(SIZE), draw(SIZE)
    reduction = draw(st.sampled_from(["mean", "sum", "none", "x"]))
    return f'{t(changed(draw, (n, c)), draw(FLOATS))}, {t((n,), "int64")}, reduction="{reduction}"'


@calls("npu_dynamic_quant npu_dynamic_block_quant npu_dynamic_mx_quant")
def quantise(draw: Draw, name: str) -> str:
    shape = draw(SHAPES)
    kind = draw(st.sampled_from(["", "dst_type=torch.int8", "dst_type=torch.float8_e4m3fn"]))
    return f"{t([*shape[:-1], 64 * shape[-1]], draw(FLOATS))}, {kind}"


@calls("npu_quantize")
def quantize(draw: Draw, name: str) -> str:
    shape = draw(SHAPES)
    kind = draw(st.sampled_from(["qint8", "int8", "quint8", "qint32"]))
    return f"{t(shape, draw(FLOATS))}, {t((1,), 'float32', fill=1)}, None, torch.{kind}, -1"


@calls("npu_quant_matmul")
def quantised_product(draw: Draw, name: str) -> str:
    m, k, n = draw(SIZE), 32 * draw(SIZE), 32 * draw(SIZE)
    scale = t((draw(st.sampled_from([1, n, 3])),), draw(st.sampled_from(["float32", "bfloat16", "int64"])))
    kind = draw(st.sampled_from(["torch.int8", "torch.bfloat16", "torch.float16", "torch.int32", "None"]))
    return f"{t(changed(draw, (m, k)), 'int8')}, {t((k, n), 'int8')}, {scale}, output_dtype={kind}"


@calls("npu_grouped_matmul")
def grouped_matmul(draw: Draw, name: str) -> str:
    groups, rows, k, n = draw(st.integers(1, 3)), draw(SIZE), draw(SIZE), draw(SIZE)
    dtype = draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]))
    kind, split = draw(st.sampled_from([None, -1, 0, 2])), draw(st.integers(0, 4))
    ends = [rows * (i + 1) for i in range(groups)]
    stacked = draw(st.booleans())
    x = f"[{t((groups * rows, k), dtype)}]"
    weight = f"[{t((groups, k, n), dtype)}]" if stacked else f"[{t((k, n), dtype)}] * {groups}"
    if kind == 2:
        x, weight = f"[{t((groups * rows, k), dtype)}.t()]", f"[{t((groups * rows, n), dtype)}]"
    elif kind == -1:
        x, weight = (
            f"[{t((rows, k), dtype)}] * {groups}",
            f"[{t((k, n), dtype)}] * {draw(st.sampled_from([groups, 2]))}",
        )
    lists = ["None", str(ends)] if kind == -1 else [f"torch.tensor({ends}).to('npu:0')", str(ends), "None"]
    return f"{x}, {weight}, group_list={draw(st.sampled_from(lists))}, split_item={split}, group_type={kind}"


def attention_inputs(draw: Draw) -> tuple[str, list[int], int]:
    """Return a layout, the shape of query, key and value, and the number of heads."""
    b, s, n, d = draw(st.integers(1, 2)), draw(SIZE), draw(st.integers(1, 3)), draw(SIZE)
    shapes = {"BNSD": (b, n, s, d), "BSND": (b, s, n, d), "BSH": (b, s, n * d), "SBH": (s, b, n * d), "TND": (s, n, d)}
    layout = draw(st.sampled_from(list(shapes)))
    return layout, list(shapes[layout]), n


@calls("npu_fusion_attention")
def attention(draw: Draw, name: str) -> str:
    layout, shape, heads = attention_inputs(draw)
    q, k, v = (t(changed(draw, shape) if draw(st.integers(0, 3)) == 0 else shape, draw(FLOATS)) for _ in range(3))
    if draw(st.integers(0, 2)):
        q = k = v = t(shape)
    options = f", keep_prob={draw(st.sampled_from([1.0, 1.0, 0.5, 0.0, 1.5]))}, sparse_mode={draw(st.integers(-1, 9))}"
    options += f', softmax_layout="{draw(st.sampled_from(["", "", "TND", "SBH"]))}"'
    if layout == "TND":
        options += f", actual_seq_qlen=[{shape[0]}], actual_seq_kvlen=[{shape[0]}]"
    name_of_layout = draw(st.sampled_from([layout] * 5 + [layout.lower(), "NSD"]))
    return f'{q}, {k}, {v}, {draw(st.sampled_from([heads] * 5 + [0]))}, "{name_of_layout}"{options}'


@calls("npu_fusion_attention_v2")
def attention_v2(draw: Draw, name: str) -> str:
    return attention(draw, name) + f", pse_type={draw(st.integers(0, 1))}"


@calls("npu_fusion_attention_grad npu_fusion_attention_grad_v2")
def attention_gradient(draw: Draw, name: str) -> str:
    b, s, n, d = draw(st.integers(1, 2)), draw(SIZE), draw(st.integers(1, 3)), draw(SIZE)
    x, statistics = t((b, n, s, d)), t((b, n, s, 8), "float32", fill=1)
    pse = draw(st.sampled_from(["", f", pse={t((b, n, s, s))}"]))
    given = f", softmax_max={statistics}, softmax_sum={statistics}, attention_in={x}"
    return f'{x}, {x}, {x}, {x}, {n}, "BNSD"{pse}{given}, sparse_mode={draw(st.integers(-1, 7))}'


@calls("npu_ring_attention_update")
def ring_update(draw: Draw, name: str) -> str:
    b, s, n, d = draw(SIZE), draw(SIZE), draw(SIZE), draw(SIZE)
    part = f"{t((s, b, n * d), draw(FLOATS))}, {', '.join([t((b, n, s, 8), 'float32', fill=1)] * 2)}"
    return f"{part}, {part}"


@calls("npu_moe_token_permute_with_routing_map")
def permute_with_map(draw: Draw, name: str) -> str:
    tokens, experts = draw(SIZE), draw(SIZE)
    routed = t(changed(draw, (tokens, experts)), draw(st.sampled_from(["bool", "int8", "float32"])), fill=1)
    probs = draw(st.sampled_from(["", f", probs={t((tokens, experts))}"]))
    rows = draw(st.sampled_from([tokens * experts, tokens, None]))
    return f"{t((tokens, 4), draw(FLOATS))}, {routed}{probs}, num_out_tokens={rows}, drop_and_pad={draw(st.booleans())}"


@calls("npu_moe_token_unpermute_with_routing_map _npu_moe_token_unpermute_with_routing_map")
def unpermute_with_map(draw: Draw, name: str) -> str:
    tokens, experts = draw(SIZE), draw(SIZE)
    rows = tokens * experts
    probs = draw(st.sampled_from(["", f", probs={t((tokens, experts))}"]))
    places, routed = t((rows,), "int32", fill=-1), t((tokens, experts), "bool", fill=1)
    return f"{t((rows, 4))}, {places}, [{tokens}, 4], routing_map={routed}{probs}"


@calls("npu_moe_token_permute_with_routing_map_grad")
def permute_with_map_gradient(draw: Draw, name: str) -> str:
    tokens, experts = draw(SIZE), draw(SIZE)
    rows = tokens * experts
    probs = draw(st.sampled_from(["None", t((rows,))]))
    places, routed = t((rows,), "int32", fill=-1), t((tokens, experts), "bool", fill=1)
    return f"{t((rows, 4))}, {probs}, {places}, {routed}, {experts}, {tokens}, False"


@calls("npu_moe_token_unpermute_with_routing_map_grad")
def unpermute_with_map_gradient(draw: Draw, name: str) -> str:
    tokens, experts = draw(SIZE), draw(SIZE)
    rows = tokens * experts
    probs = draw(st.sampled_from(["None", t((tokens, experts))]))
    places, routed = t((rows,), "int32", fill=-1), t((tokens, experts), "bool", fill=1)
    return f"{t((tokens, 4))}, {places}, {places}, {routed}, {t((rows, 4))}, {probs}, False, [{tokens}, 4]"


@calls("npu_trans_quant_param")
def encoded_scale(draw: Draw, name: str) -> str:
    shape = draw(SHAPES)
    offset = draw(st.sampled_from(["None", t(shape, "float32"), t((1,), "float32")]))
    return f"{t(shape, draw(st.sampled_from(['float32', 'float32', 'bfloat16'])))}, {offset}"


@calls("npu_dtype_cast")
def dtype_cast(draw: Draw, name: str) -> str:
    return f"{t(draw(SHAPES), draw(FLOATS))}, torch.{draw(st.sampled_from(['float32', 'int32', 'bool', 'bfloat16']))}"


@calls("npu_apply_adam_w")
def adam_step(draw: Draw, name: str) -> str:
    shape, dtype = draw(SHAPES), draw(st.sampled_from(["float32", "bfloat16"]))
    state = ", ".join([t(shape, dtype)] * draw(st.integers(2, 4)))
    out = draw(st.sampled_from(["", f", out=[{state}]"]))
    return f"0.9, 0.9, 0.1, 0.1, 0.9, 0.9, 1e-8, {t(shape, dtype)}, None, False, False{out}"


@calls("npu_apply_rotary_pos_emb")
def rotate_in_place(draw: Draw, name: str) -> str:
    b, s, n = draw(SIZE), draw(SIZE), draw(SIZE)
    angles = t(changed(draw, (b, s, 1, 64)), "float16")
    return f"{t((b, s, n, 64), draw(FLOATS))}, {t(changed(draw, (b, s, 1, 64)), 'float16')}, {angles}, {angles}"
