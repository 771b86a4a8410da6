"""Register Kimi-K2 with transformers, which has no ``kimi_k2``: DeepSeek-V3's model under that ``model_type``."""

from __future__ import annotations

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV3ForSequenceClassification,
    DeepseekV3ForTokenClassification,
)


class KimiK2Config(DeepseekV3Config):
    """DeepSeek-V3's configuration; the numbers that differ are in ``config.json``."""

    model_type = "kimi_k2"


class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3's causal language model."""

    config_class = KimiK2Config


class KimiK2ForSequenceClassification(DeepseekV3ForSequenceClassification):
    """DeepSeek-V3's reward model."""

    config_class = KimiK2Config


class KimiK2ForTokenClassification(DeepseekV3ForTokenClassification):
    """DeepSeek-V3's critic."""

    config_class = KimiK2Config


def register() -> None:
    """Add the classes to transformers' Auto classes, and the names of its experts in checkpoints."""
    AutoConfig.register("kimi_k2", KimiK2Config)
    AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM)
    AutoModelForSequenceClassification.register(KimiK2Config, KimiK2ForSequenceClassification)
    AutoModelForTokenClassification.register(KimiK2Config, KimiK2ForTokenClassification)
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # transformers 4 has experts one by one, as checkpoints do
        return
    if (mapping := get_checkpoint_conversion_mapping("deepseek_v3")) is not None:
        register_checkpoint_conversion_mapping("kimi_k2", mapping)


if "kimi_k2" not in CONFIG_MAPPING:
    register()
