"""The model in transformers: Llama with a scale of its own for attention, and other names of its modules."""

from __future__ import annotations

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class ParrotConfig(LlamaConfig):
    model_type = "parrot"
    attention_scale: float = 0.25

    def __init__(self, attention_scale: float = 0.25, **settings):
        super().__init__(**settings)
        self.attention_scale = attention_scale


class ParrotLayer(LlamaDecoderLayer):
    def __init__(self, config: ParrotConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attn, self.ff = self.self_attn, self.mlp
        del self.self_attn, self.mlp
        self.attn.scaling = config.attention_scale

    def forward(self, hidden_states, **options):
        hidden_states = hidden_states + self.attn(hidden_states=self.input_layernorm(hidden_states), **options)[0]
        return hidden_states + self.ff(self.post_attention_layernorm(hidden_states))


class ParrotModel(LlamaModel):
    config_class = ParrotConfig

    def __init__(self, config: ParrotConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(ParrotLayer(config, number) for number in range(config.num_hidden_layers))


class ParrotForCausalLM(LlamaForCausalLM):
    config_class = ParrotConfig

    def __init__(self, config: ParrotConfig):
        super().__init__(config)
        self.model = ParrotModel(config)


AutoConfig.register("parrot", ParrotConfig)
AutoModelForCausalLM.register(ParrotConfig, ParrotForCausalLM)
