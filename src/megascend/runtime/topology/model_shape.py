"""Sizes of a model that a layout divides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    Attributes:
        num_query_groups: key/value heads; equal to ``num_heads`` without grouped-query attention (and with MLA).
        ffn_hidden_size: width of the dense MLPs, or None if every layer is a mixture of experts.
        num_experts: routed experts of an MoE layer, or None for a dense model.
        moe_ffn_hidden_size: width of one routed expert, or None for a dense model.
        shared_expert_ffn_hidden_size: width of all shared experts together, or None if there are none.
        max_position: longest sequence the model was made for, or None if the config does not say.
        tied: True if the output layer is the embedding.
        expert_bias: True if the layers of an expert have biases.
        prediction_head: True if a head for multi-token prediction is trained.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_query_groups: int
    vocab_size: int
    ffn_hidden_size: int | None
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    shared_expert_ffn_hidden_size: int | None = None
    max_position: int | None = None
    tied: bool = False
    expert_bias: bool = False
    prediction_head: bool = False

    @property
    def is_moe(self) -> bool:
        return self.num_experts is not None
