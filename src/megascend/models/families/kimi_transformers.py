"""Register Kimi-K2 and the text model of Kimi-K2.5 to 2.7 with transformers.

transformers has no ``kimi_k2``, which is DeepSeek-V3's model, and ``kimi_k25`` with its vision tower only.
"""

from __future__ import annotations

from typing import ClassVar

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


def register_text_model() -> None:
    """Add Kimi-K2.5's causal language model, which is its model for images without the tower, to transformers' Auto classes."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    class KimiK25ForCausalLM(Kimi_K25ForConditionalGeneration):
        _keys_to_ignore_on_load_unexpected: ClassVar = [r"vision_tower\.", r"mm_projector\."]

        def __init__(self, config: Kimi_K25Config) -> None:
            super().__init__(config)
            del self.model.vision_tower, self.model.mm_projector

    AutoModelForCausalLM.register(Kimi_K25Config, KimiK25ForCausalLM, exist_ok=True)
    # transformers 5.24's names for kimi_k25 rename the text model's layers too when weights are written.
    names = [
        WeightRenaming(r"^language_model\.model\.", "model.language_model."),
        WeightRenaming(r"^language_model\.lm_head\.", "lm_head."),
    ]
    for prefix in ("", "FSDP"):  # which fully_shard adds to a sharded model's class
        register_checkpoint_conversion_mapping(f"{prefix}{KimiK25ForCausalLM.__name__}", list(names))
    register_checkpoint_conversion_mapping("Kimi_K25Model", [])


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
    if "kimi_k25" in CONFIG_MAPPING:
        register_text_model()
