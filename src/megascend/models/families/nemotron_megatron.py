"""Nemotron-H for mcore-bridge: dense MLPs, latent experts, packed samples in state spaces, the norms' epsilon.

Import after Megatron.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from mcore_bridge.model.gpts import nemotron_h
from mcore_bridge.model.hybrid_model import HybridModel
from mcore_bridge.model.register import ModelMeta, register_model
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from megascend.changes import patch
from megascend.reference import fla as reference_fla
from megascend.reference.fla.state_space import exact_in_fp32

FIRST_PROJECTION = "linear_fc1_up.weight"
"""mcore-bridge's key of the first projection of MLPs without a gate."""


class PackedMambaMixer(MambaMixer):
    """Megatron-Core's layer that keeps packed samples apart, and whose norm has the model's epsilon.

    Megatron-Core numbers the tokens' samples in descriptions of packed batches that state their number of tokens, which
    megascend's, as attention needs them, do not; without numbers it would compute a micro batch as one sample.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm.eps = self.config.layernorm_epsilon

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        packed: Any = packed_seq_params
        if packed is not None and packed.seq_idx is None:
            # Shared by the layers of a micro batch. Context parallel ranks have exchanged heads for whole sequences here.
            packed.seq_idx = _sample_numbers(packed, len(zxBCdt))
        return super()._ssm_training(zxBCdt, packed_seq_params)


def _sample_numbers(packed: Any, tokens: int) -> Tensor:
    """Return the number of each token's sample, int32 [1, tokens]."""
    starts = packed.cu_seqlens_q
    positions = torch.arange(tokens, dtype=starts.dtype, device=starts.device)
    return (torch.searchsorted(starts, positions, right=True) - 1).int()[None]


def partitioned_indices(starts: Tensor, tokens: int, ranks: int, rank: int) -> Tensor:
    """Return the positions of a context parallel rank's tokens in a packed row, as Transformer Engine's function of C++ does.

    Each sample is divided into 2 x ``ranks`` pieces, of which a rank has one from either end.
    """
    pieces = 2 * ranks
    positions = torch.arange(tokens, dtype=starts.dtype, device=starts.device)
    sample = torch.searchsorted(starts, positions, right=True) - 1
    sizes = (starts[1:] - starts[:-1])[sample] // pieces
    piece = (positions - starts[sample]) // sizes
    return positions[(piece == rank) | (piece == pieces - 1 - rank)]


class StagedHybridModel(HybridModel):
    """mcore-bridge's model whose layers are also divided over virtual pipeline stages, equally as those of others."""

    @staticmethod
    def _resolve_hybrid_layer_pattern(config: Any) -> str | None:
        pattern = HybridModel._resolve_hybrid_layer_pattern(config)
        virtual = config.virtual_pipeline_model_parallel_size
        if pattern is None or not virtual:
            return pattern
        # Megatron-Core divides over virtual stages only where the pattern says so, and not in mcore-bridge's configuration, whose
        # symbols are counted.
        size = len(pattern) // (virtual * config.pipeline_model_parallel_size)
        return "|".join(pattern[start : start + size] for start in range(0, len(pattern), size))


class NemotronHLoader(nemotron_h.NemotronHLoader):
    """Models with :class:`PackedMambaMixer`."""

    model_cls = StagedHybridModel

    def get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        spec: Any = super().get_transformer_layer_spec(vp_stage=vp_stage)
        spec.submodules.mamba_layer.submodules.mixer.module = PackedMambaMixer
        return spec


class NemotronHBridge(nemotron_h.NemotronHBridge):
    """mcore-bridge's conversion with the layers that it leaves out: dense MLPs, and the projections of latent experts.

    Packed tensors of state spaces are exported by the methods that megascend replaces to send each tensor to its receivers only.
    """

    def _set_layer_mlp(
        self, mg_layer: Any, hf_state_dict: Any, layer_idx: int, to_mcore: bool, is_mtp: bool = False
    ) -> Any:
        if self._get_layer_type(layer_idx) != "mlp":
            return super()._set_layer_mlp(mg_layer, hf_state_dict, layer_idx, to_mcore, is_mtp)
        mlp = None if mg_layer is None else mg_layer.mlp
        hf_state_dict.update(self._set_mlp_state(mlp, hf_state_dict, f"{self.hf_mlp_prefix}.", layer_idx, to_mcore))
        norm = "mlp.linear_fc1.layer_norm_weight"
        self._set_state_dict(mg_layer, norm, hf_state_dict, self.hf_input_layernorm_key, to_mcore)
        return hf_state_dict

    def _set_moe_state(
        self, mg_mlp: Any, hf_state_dict: Any, hf_prefix: str, layer_idx: int, to_mcore: bool, is_mtp: bool = False
    ) -> Any:
        converted = super()._set_moe_state(mg_mlp, hf_state_dict, hf_prefix, layer_idx, to_mcore, is_mtp)
        if self.config.moe_latent_size:
            for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
                weights = hf_state_dict if to_mcore else converted
                self._set_state_dict(mg_mlp, name, weights, f"{hf_prefix}{name}", to_mcore)
        return converted

    def _set_weight(
        self,
        mg_param: Any,
        hf_weight: Tensor,
        mg_key: Any,
        offset: float = 0,
        is_expert: bool = False,
        **options: Any,
    ) -> None:
        ranks, rank = self.etp_size or 1, self.etp_rank or 0
        if not is_expert or mg_key != FIRST_PROJECTION or ranks == 1:
            super()._set_weight(mg_param, hf_weight, mg_key, offset, is_expert, **options)
            return
        # Divided within each expert; mcore-bridge would give each rank other experts.
        experts = hf_weight.view(len(mg_param), -1, hf_weight.shape[-1])
        for parameter, rows in zip(mg_param, experts.chunk(ranks, dim=1)[rank], strict=True):
            self._set_param(parameter, rows, None)

    def _get_weight(self, mg_weight: Any, mg_key: str | None, offset: float = 0, is_expert: bool = False) -> Any:
        weight, scale = super()._get_weight(mg_weight, mg_key, offset, is_expert)
        ranks = self.etp_size or 1
        if weight is not None and is_expert and mg_key == FIRST_PROJECTION and ranks > 1:
            experts, _, columns = weight.shape
            weight = weight.view(ranks, experts, -1, columns).transpose(0, 1).reshape(experts, -1, columns)
        return weight, scale

    def _set_mamba_state(self, mg_layer: Any, hf_state_dict: Any, layer_idx: int, to_mcore: bool) -> Any:
        prefix = f"{self.hf_attn_prefix}."
        weights = self._remove_prefix(hf_state_dict, prefix) if to_mcore else {}
        mixer = None if mg_layer is None else mg_layer.mixer
        # Gate, input, B, C and steps; the convolution has the three in between.
        blocks = self._mamba_block_sizes()
        self._set_blocks(mixer, "in_proj.weight", weights, "in_proj.weight", blocks, to_mcore)
        self._set_blocks(mixer, "conv1d_weight", weights, "conv1d.weight", blocks[1:4], to_mcore)
        self._set_blocks(mixer, "conv1d_bias", weights, "conv1d.bias", blocks[1:4], to_mcore)
        for name in ("A_log", "D", "dt_bias", "out_proj.weight"):
            self._set_state_dict(mixer, name, weights, name, to_mcore)
        self._set_state_dict(mg_layer, "mixer.norm.weight", weights, "norm.weight", to_mcore)
        return {} if to_mcore else self._add_prefix(weights, prefix)

    def _set_blocks(
        self, mixer: Any, mg_key: str, weights: Any, hf_key: str, blocks: list[int], to_mcore: bool
    ) -> None:
        """Convert a tensor of which a tensor parallel rank has a part of each block of rows."""
        if self.tp_size == 1:
            self._set_state_dict(mixer, mg_key, weights, hf_key, to_mcore)
            return
        module, _, name = mg_key.rpartition(".")
        parameter = mixer and getattr(getattr(mixer, module) if module else mixer, name)
        if to_mcore:
            local = self._split_packed_dim0(weights[hf_key].load(), blocks)
            self._set_weight(parameter, local, None)
            return
        gathered, _ = self._get_weight(None if parameter is None else parameter.data, mg_key)
        if gathered is not None:
            weights[hf_key] = self._merge_packed_dim0(gathered, blocks)


# Absent where mamba_ssm is; the reference is exact already.
if mamba_mixer.HAVE_MAMBA_SSM and not reference_fla.is_installed():
    exact = exact_in_fp32(mamba_mixer.mamba_split_conv1d_scan_combined)
    patch(mamba_mixer, "mamba_split_conv1d_scan_combined", exact, "fp32 is computed in fp32, not in TF32")
if mamba_context_parallel.tex is None:  # the reference Transformer Engine has no functions of C++
    functions = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    patch(
        mamba_context_parallel,
        "tex",
        functions,
        "packed samples are joined and divided again over context parallel ranks",
    )
register_model(ModelMeta("megascend_nemotron_h", ["nemotron_h"], bridge_cls=NemotronHBridge, loader=NemotronHLoader))
