"""Gemma 4's language model for mcore-bridge, which knows it with its towers only. Import after Megatron."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from mcore_bridge.bridge import GPTBridge
from mcore_bridge.model import GPTModel
from mcore_bridge.model.mm_gpts import gemma4
from mcore_bridge.model.register import ModelMeta, register_model
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from megascend.changes import patch
from megascend.models import architecture_of
from megascend.models.families.gemma import FULL, SLIDING

TEXT_TYPES = ["gemma4_text", "gemma4_unified_text"]
TOWER_TYPES = ["gemma4", "gemma4_unified"]
ABSENT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "num_kv_shared_layers": 0}
"""Settings that Gemma 4 Unified does not have."""


def text_settings(config: Any) -> SimpleNamespace:
    """Return the language model's settings as mcore-bridge reads them, by the names of the authors' configurations."""
    text = config.hf_config.get_text_config().to_dict()
    # "vision" concerns images, and "all" is refused.
    return SimpleNamespace(**ABSENT | architecture_of(text).normalise(text) | {"use_bidirectional_attention": None})


@contextlib.contextmanager
def readable(config: Any) -> Iterator[None]:
    """Let mcore-bridge's classes find ``hf_config.text_config`` within the context."""
    hf_config = config.hf_config
    config.hf_config = SimpleNamespace(text_config=text_settings(config), get_text_config=hf_config.get_text_config)
    try:
        yield
    finally:
        config.hf_config = hf_config


class Gemma4TextModel(gemma4.Gemma4TextGPTModel):
    """mcore-bridge's language model with scaled embeddings, transformers' rotary frequencies and a plain output layer.

    mcore-bridge scales embeddings where it adds images; megascend's output head caps the logits.
    """

    _forward_output_layer = GPTModel._forward_output_layer

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.logit_cap = self.final_logit_softcapping
        if self.hidden_size_per_layer_input and self.pre_process:
            # Each rank has the whole sequence there; mcore-bridge lets Megatron add the ranks' equal gradients.
            self.per_layer_projection_norm.weight.sequence_parallel = False

    def _set_inv_freq(self) -> None:
        config: Any = self.config
        text = config.hf_config.get_text_config()
        rotary: Any = Gemma4TextRotaryEmbedding(text)
        kinds = {kind: kind if kind in text.layer_types else text.layer_types[0] for kind in (SLIDING, FULL)}
        self.full_rotary_pos_emb = copy.copy(self.rotary_pos_emb)
        for kind, embedding in ((SLIDING, self.rotary_pos_emb), (FULL, self.full_rotary_pos_emb)):
            frequencies = getattr(rotary, f"{kinds[kind]}_inv_freq").data
            embedding.inv_freq = frequencies.to(self.rotary_pos_emb.inv_freq.device)
        config.attention_scaling = getattr(rotary, f"{kinds[SLIDING]}_attention_scaling")
        config.full_attention_scaling = getattr(rotary, f"{kinds[FULL]}_attention_scaling")

    def forward(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.pre_process and kwargs.get("decoder_input") is None:
            input_ids = self._without_placeholders(input_ids)
            embeddings = self.embedding(input_ids=input_ids, position_ids=position_ids)
            # Rounded to the model's dtype as in transformers.
            scale = torch.tensor(embeddings.shape[-1] ** 0.5, dtype=embeddings.dtype)
            extra = (kwargs.get("extra_block_kwargs") or {}) | {"llm_input_ids": input_ids}
            kwargs |= {"decoder_input": embeddings * float(scale), "extra_block_kwargs": extra}
        return super().forward(input_ids, position_ids, *args, **kwargs)

    def _without_placeholders(self, input_ids: Tensor) -> Tensor:
        """Replace tokens that stand for images and sound by padding, as transformers does."""
        hf: Any = self.config.hf_config
        names = ("image_token_id", "video_token_id", "audio_token_id")
        for token in [getattr(hf, name) for name in names if getattr(hf, name, None) is not None]:
            input_ids = input_ids.masked_fill(input_ids == token, self.text_config.pad_token_id)
        return input_ids


class Gemma4TextLoader(gemma4.Gemma4Loader):
    model_cls = Gemma4TextModel

    def build_model(self, *args: Any, **kwargs: Any) -> Any:
        with readable(self.config):
            return super().build_model(*args, **kwargs)


class Gemma4Bridge(gemma4.Gemma4Bridge):
    """Conversion of the language model in a checkpoint with towers."""

    def __init__(self, config: Any) -> None:
        with readable(config):
            super().__init__(config)

    def _set_word_embeddings(self, mg_model: Any, hf_state_dict: Any, to_mcore: bool) -> None:
        names = {"embedding.word_embeddings": "embed_tokens"}
        if self.hidden_size_per_layer_input:
            further = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
            names |= {name: name for name in further}
        for module, name in names.items():
            key = self.hf_embed_key.replace("embed_tokens", name)
            self._set_state_dict(mg_model, f"{module}.weight", hf_state_dict, key, to_mcore)


class Gemma4TextBridge(Gemma4Bridge):
    """Names of a checkpoint without towers."""

    hf_layers_prefix = GPTBridge.hf_layers_prefix
    hf_embed_key = GPTBridge.hf_embed_key
    hf_final_layernorm_key = GPTBridge.hf_final_layernorm_key


for model_types, conversion in ((TEXT_TYPES, Gemma4TextBridge), (TOWER_TYPES, Gemma4Bridge)):
    register_model(
        ModelMeta(f"megascend_{model_types[0]}", model_types, bridge_cls=conversion, loader=Gemma4TextLoader)
    )
# Its dimension is the number of parts there, which is one too low where keys are values, too.
patch(gemma4, "SplitAlongDim", None, "queries and keys are split by torch, along the last dimension")
