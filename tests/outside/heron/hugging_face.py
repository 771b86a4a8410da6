"""The transformers side."""

from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM


class HeronConfig(MistralConfig):
    model_type = "heron"
    reach: int = 4096

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.sliding_window = self.reach


class HeronForCausalLM(MistralForCausalLM):
    config_class = HeronConfig


AutoConfig.register("heron", HeronConfig)
AutoModelForCausalLM.register(HeronConfig, HeronForCausalLM)
