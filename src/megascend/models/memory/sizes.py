"""Sizes of a model and of a step's workload that determine the step's memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from megascend.models import architecture_of, expert_layers, text_config
from megascend.models.base import ATTENTION_LAYERS, IndexedAttention, LatentAttention, LinearAttention, StateSpace
from megascend.models.checkpoint_files.info import ModelInfo

Items = dict[str, int]
"""Bytes by purpose."""

Kernels = Literal["fused", "plain"]
"""``fused``: Transformer Engine's and Triton's, on CUDA; also assumed for NPUs, where nothing was measured. ``plain``: PyTorch's
on a CPU."""

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class TeacherSizes:
    """A teacher on the trainer's ranks (:mod:`megascend.apps.train.teacher_model`).

    Attributes:
        info, sizes: of its checkpoint.
        swapped: it takes the model's place on the device; False: it is a second model there.
        loss: divergence over the whole vocabulary that is learned; None: only its log-probabilities are.
    """

    info: ModelInfo
    sizes: ModelSizes
    swapped: bool
    loss: DivergenceKind | None


@dataclass(frozen=True)
class Workload:
    """The largest micro batch of a run, and the outputs that are computed for it.

    Attributes:
        tokens: padding included, over all context parallel ranks.
        micro_batches: largest number on a rank in a step.
        packed: samples of different length are concatenated; False: a padded batch, also used for samples of equal length.
        longest: tokens of the longest sample; None: one sample may fill the micro batch.
        step_tokens: tokens of a data parallel rank in a step; None: those of all micro batches.
        teacher: teacher on the ranks, or None.
    """

    tokens: int
    micro_batches: int = 1
    packed: bool = True
    longest: int | None = None
    step_tokens: int | None = None
    teacher: TeacherSizes | None = None


class LayerKey(NamedTuple):
    """Kind of a layer.

    Attributes:
        with_experts: its MLP is one of experts.
        linear: its attention is linear.
        mixer: the only thing that it has; empty if it has attention and an MLP.
    """

    with_experts: bool
    linear: bool
    mixer: str


LAYER = re.compile(r"\.layers\.(\d+)\.|\.h\.(\d+)\.")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model; widths are elements per token.

    Attributes:
        query, key_value: widths of all query heads, and of all key heads (values are as wide).
        ffn: FFN width of a dense MLP.
        expert_ffn, shared_ffn: FFN width of one routed expert, and of all shared experts together.
        experts, topk: routed experts of a layer, and of a token.
        qk_norm: queries and keys are normalised per head.
        gated: MLPs have a gate projection.
        silu, clamped: their activation is SiLU, which has kernels; the first projection is limited before it, as in gpt-oss.
        latent: sizes of multi-head latent attention; None for another attention.
        linear: sizes of linear attention; None if all layers have softmax attention.
        indexed: sizes of the indexer of sparse attention; None for attention to all keys.
        state_space: sizes of state spaces; None if no layer is one.
        mixers: kind of each layer of a model whose layers have one thing each; empty for other models.
        latent_experts: width of the rows that experts compute, where it is not the hidden size; 0: it is.
        output_gate: softmax attention's output is multiplied by a gate of its width.
        with_experts: True for each layer that has experts.
        prediction_head: a head for multi-token prediction is trained, with a layer like the last one.
    """

    hidden: int
    heads: int
    head_dim: int
    query: int
    key_value: int
    ffn: int
    expert_ffn: int
    shared_ffn: int
    experts: int
    topk: int
    vocabulary: int
    tied: bool
    qk_norm: bool
    gated: bool
    latent: LatentAttention | None
    with_experts: tuple[bool, ...]
    prediction_head: bool = False
    linear: LinearAttention | None = None
    output_gate: bool = False
    indexed: IndexedAttention | None = None
    state_space: StateSpace | None = None
    mixers: tuple[str, ...] = ()
    latent_experts: int = 0
    silu: bool = True
    clamped: bool = False

    @cached_property
    def layer_keys(self) -> list[LayerKey]:
        """Return the kind of each layer."""
        mixers = self.mixers or ("",) * len(self.with_experts)
        return [LayerKey(*key) for key in zip(self.with_experts, self.linear_layers, mixers, strict=True)]

    @property
    def attention_layers(self) -> int:
        """Return the number of layers with softmax attention."""
        if self.mixers:
            return sum(kind in ATTENTION_LAYERS for kind in self.mixers)
        return sum(not linear for linear in self.linear_layers)

    @cached_property
    def linear_layers(self) -> tuple[bool, ...]:
        """Return True for each layer with linear attention."""
        return self.linear.layers if self.linear is not None else (False,) * len(self.with_experts)

    @classmethod
    def of(cls, info: ModelInfo, hf_config: Mapping[str, Any]) -> ModelSizes:
        """Read the sizes of a checkpoint from its headers and its ``config.json``."""
        text = architecture_of(hf_config).normalise(text_config(hf_config))
        shape, names = info.shape, info.tensors
        head_dim = info.attention_width // shape.num_heads
        if shape.is_moe:
            moe_layers = {layer_of(name) for name in names if ".experts." in name}
            with_experts = expert_layers(text) or [layer in moe_layers for layer in range(shape.num_layers)]
        else:
            with_experts = [False] * shape.num_layers
        return cls(
            hidden=shape.hidden_size,
            heads=shape.num_heads,
            head_dim=head_dim,
            query=info.attention_width,
            key_value=shape.num_query_groups * head_dim,
            ffn=shape.ffn_hidden_size or 0,
            expert_ffn=shape.moe_ffn_hidden_size or 0,
            shared_ffn=shape.shared_expert_ffn_hidden_size or 0,
            experts=shape.num_experts or 0,
            topk=int(text.get("num_experts_per_tok") or 0),
            vocabulary=shape.vocab_size if info.scalar_head is None else info.scalar_head.outputs,
            tied=shape.tied,
            qk_norm=any(name.endswith("q_norm.weight") for name in names),
            gated=any(".gate_proj" in name or ".gate_up_proj" in name or ".w3." in name for name in names),
            latent=LatentAttention.from_config(text),
            with_experts=tuple(with_experts),
            prediction_head=info.mtp == "train",
            linear=info.linear,
            output_gate=info.linear is not None,
            indexed=IndexedAttention.from_config(text),
            state_space=info.state_space,
            mixers=info.mixers,
            latent_experts=int(text.get("moe_latent_size") or 0),
            silu=(text.get("hidden_activation") or text.get("hidden_act") or "silu") in ("silu", "swish"),
            clamped=text.get("swiglu_limit") is not None,
        )


@lru_cache(maxsize=2**17)  # a plan of layouts asks for every tensor in every layout
def layer_of(name: str) -> int | None:
    """Return the index of a weight's layer, by its name; None for a weight outside the layers."""
    match = LAYER.search(name)
    return None if match is None else int(match[1] or match[2])
