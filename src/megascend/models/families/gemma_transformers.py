"""Register Gemma 4's language models with transformers' Auto classes, which build them with their towers only."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, AutoModelForCausalLM

TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")


def register(model_type: str, model_class: Any) -> None:
    """Add the causal language model of a ``model_type``, which is its model for images and sound without the towers."""

    class LanguageModel(model_class):
        _keys_to_ignore_on_load_unexpected: ClassVar = [rf"{name}\." for name in (*TOWERS, "vision_embedder")]

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name in TOWERS:
                if hasattr(self.model, name):
                    setattr(self.model, name, None)

    LanguageModel.__name__ = LanguageModel.__qualname__ = model_class.__name__.replace(
        "ConditionalGeneration", "CausalLM"
    )
    AutoModelForCausalLM.register(CONFIG_MAPPING[model_type], LanguageModel, exist_ok=True)


if "gemma4_unified" in CONFIG_MAPPING:
    from transformers import Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration

    register("gemma4", Gemma4ForConditionalGeneration)
    register("gemma4_unified", Gemma4UnifiedForConditionalGeneration)
