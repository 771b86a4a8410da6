"""Slices of published models: what each rank of a Megatron trainer holds, and what each worker of a vLLM engine needs.

Written from the layouts' definitions, not with the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weightwire.manifest import TensorSpec
from weightwire.plan import Region


@dataclass(frozen=True)
class Model:
    """Sizes of a mixture of experts, from its config.json."""

    layers: int
    hidden: int
    vocabulary: int
    experts: int
    expert_width: int
    dense_layers: int = 0
    dense_width: int = 0
    shared_width: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 128
    latent: bool = False


DEEPSEEK_V3 = Model(61, 7168, 129280, 256, 2048, 3, 18432, 2048, heads=128, latent=True)
QWEN3_235B = Model(94, 4096, 151936, 128, 1536, heads=64, kv_heads=4)

SPLITS = {"column": 0, "row": 1}


def tensors(model: Model) -> Iterator[tuple[TensorSpec, str, int, int]]:
    """Yield (tensor, how it is divided, layer or -1 / layers, expert or -1)."""

    def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
        return TensorSpec(name, dtype, shape)

    hidden, width = model.hidden, model.head_dim
    yield spec("model.embed_tokens.weight", model.vocabulary, hidden), "vocabulary", -1, -1
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        if model.latent:  # multi-head latent attention: heads of 128 + 64 for q and k, 128 for v
            rows = [
                ("self_attn.q_a_proj.weight", (1536, hidden), "all"),
                ("self_attn.q_a_layernorm.weight", (1536,), "all"),
                ("self_attn.q_b_proj.weight", (model.heads * 192, 1536), "column"),
                ("self_attn.kv_a_proj_with_mqa.weight", (576, hidden), "all"),
                ("self_attn.kv_a_layernorm.weight", (512,), "all"),
                ("self_attn.kv_b_proj.weight", (model.heads * 256, 512), "column"),
                ("self_attn.o_proj.weight", (hidden, model.heads * 128), "row"),
            ]
        else:
            rows = [
                ("self_attn.q_proj.weight", (model.heads * width, hidden), "column"),
                ("self_attn.k_proj.weight", (model.kv_heads * width, hidden), "kv"),
                ("self_attn.v_proj.weight", (model.kv_heads * width, hidden), "kv"),
                ("self_attn.o_proj.weight", (hidden, model.heads * width), "row"),
                ("self_attn.q_norm.weight", (width,), "all"),
                ("self_attn.k_norm.weight", (width,), "all"),
            ]
        rows += [("input_layernorm.weight", (hidden,), "all"), ("post_attention_layernorm.weight", (hidden,), "all")]
        mlps = [("mlp.", model.dense_width)] if layer < model.dense_layers else []
        if layer >= model.dense_layers:
            rows.append(("mlp.gate.weight", (model.experts, hidden), "all"))
            if model.latent:
                yield (
                    spec(f"{prefix}mlp.gate.e_score_correction_bias", model.experts, dtype="float32"),
                    "all",
                    layer,
                    -1,
                )
            if model.shared_width:
                mlps.append(("mlp.shared_experts.", model.shared_width))
        for mlp, size in mlps:
            rows += [
                (f"{mlp}gate_proj.weight", (size, hidden), "column"),
                (f"{mlp}up_proj.weight", (size, hidden), "column"),
                (f"{mlp}down_proj.weight", (hidden, size), "row"),
            ]
        for name, shape, kind in rows:
            yield spec(prefix + name, *shape), kind, layer, -1
        if layer >= model.dense_layers:
            for expert in range(model.experts):
                for name, shape, kind in (
                    ("gate_proj", (model.expert_width, hidden), "column"),
                    ("up_proj", (model.expert_width, hidden), "column"),
                    ("down_proj", (hidden, model.expert_width), "row"),
                ):
                    yield spec(f"{prefix}mlp.experts.{expert}.{name}.weight", *shape), kind, layer, expert
    yield spec("model.norm.weight", hidden), "all", model.layers, -1
    yield spec("lm_head.weight", model.vocabulary, hidden), "vocabulary", model.layers, -1


def part(index: int, spec: TensorSpec, dim: int, start: int, stop: int) -> Iterator[Region]:
    """Yield rows or columns ``start`` to ``stop``, as far as the tensor has them (a vocabulary may be padded)."""
    stop = min(stop, spec.shape[dim])
    if stop > start:
        offsets = tuple(start if axis == dim else 0 for axis in range(len(spec.shape)))
        sizes = tuple(stop - start if axis == dim else size for axis, size in enumerate(spec.shape))
        yield Region(index, offsets, sizes)


def complete_slice(index: int, spec: TensorSpec) -> Region:
    return Region(index, (0,) * len(spec.shape), spec.shape)


def divided(index: int, spec: TensorSpec, kind: str, size: int, rank: int, model: Model) -> Iterator[Region]:
    """Yield a tensor parallel rank's slice."""
    if kind == "all":
        yield complete_slice(index, spec)
    elif kind == "vocabulary":
        padded = -(-spec.shape[0] // (64 * size)) * 64  # rows of a rank, after padding to a multiple of 64 each
        yield from part(index, spec, 0, rank * padded, (rank + 1) * padded)
    elif kind == "kv" and size > model.kv_heads:  # every head is on several ranks
        head = rank // (size // model.kv_heads)
        yield from part(index, spec, 0, head * model.head_dim, (head + 1) * model.head_dim)
    else:
        dim = SPLITS.get(kind, 0)
        rows = spec.shape[dim] // size
        yield from part(index, spec, dim, rank * rows, (rank + 1) * rows)


def megatron(model: Model, tensor: int, pipeline: int, expert: int, data: int) -> Callable[[], list[list[Region]]]:
    """Return a builder of every rank's slices: TP fastest, then DP, then PP; experts complete, over EP."""

    def build() -> list[list[Region]]:
        stage_ranks = tensor * data
        holdings: list[list[Region]] = [[] for _ in range(stage_ranks * pipeline)]
        for index, (spec, kind, layer, number) in enumerate(tensors(model)):
            # The first layers % pipeline stages have one more.
            stage = 0
            if layer >= model.layers:
                stage = pipeline - 1
            elif layer >= 0:
                per, extra = divmod(model.layers, pipeline)
                border = extra * (per + 1)
                stage = layer // (per + 1) if layer < border else extra + (layer - border) // per
            for rank in range(stage_ranks):
                pieces = holdings[stage * stage_ranks + rank]
                if number >= 0:
                    if rank % expert == number // (model.experts // expert):
                        pieces.append(complete_slice(index, spec))
                else:
                    pieces.extend(divided(index, spec, kind, tensor, rank % tensor, model))
        return holdings

    return build


def vllm(model: Model, size: int, *, experts: str) -> list[list[Region]]:
    """Return the needs of each worker: experts divided over workers (``ep``), or each expert's width (``tp``)."""
    needs: list[list[Region]] = [[] for _ in range(size)]
    for index, (spec, kind, _, number) in enumerate(tensors(model)):
        for rank in range(size):
            if number >= 0 and experts == "ep":
                if number // (model.experts // size) == rank:
                    needs[rank].append(complete_slice(index, spec))
            else:
                needs[rank].extend(divided(index, spec, kind, size, rank, model))
    return needs


def specs(model: Model) -> tuple[TensorSpec, ...]:
    return tuple(row[0] for row in tensors(model))


def bytes_of(pieces: Any, table: Any) -> int:
    return sum(piece.nbytes(table) for piece in pieces)
