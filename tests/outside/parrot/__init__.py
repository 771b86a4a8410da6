"""A package of somebody else's: an architecture. Importing it registers it with megascend, and imports neither side of it."""

import megascend
from parrot.adapters import layer_targets

megascend.register_architecture(
    "parrot", transformers="parrot.hugging_face", megatron="parrot.megatron", tiny={"attention_scale": 0.4}
)
megascend.register_lora_targets("parrot", layer_targets)
