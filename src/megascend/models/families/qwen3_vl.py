"""Qwen3-VL: a Qwen3 decoder, dense or with experts, that reads images through a vision tower (arXiv:2511.21631)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascend.models.base import Architecture, Config, Images
from megascend.models.families.decoders import EXPERTS

IMAGES = Images()
TINY_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    # A table of 4 x 4 positions, interpolated to the grid of each image.
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}
TINY_TOKENS = {
    "vision_start_token_id": 312,
    "vision_end_token_id": 313,
    "image_token_id": 314,
    "video_token_id": 315,
}
"""Special tokens of a vocabulary of 320, above all token ids that tests draw."""


def with_tower(text: Config, text_type: str, tower: Mapping[str, Any], rotated: float = 1.0) -> dict[str, Any]:
    """Return the ``config.json`` of a tiny model with images.

    Args:
        text: settings of its language model; those of the tower and of special tokens may be among them.
        text_type: ``model_type`` of its ``text_config``.
        tower: default of ``vision_config``.
        rotated: share of a head that rotary embeddings rotate.
    """
    text = dict(text)
    outer = {
        "model_type": text.pop("model_type"),
        "architectures": text.pop("architectures", None),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "torch_dtype": text.get("torch_dtype", "float32"),
    }
    vision = text.pop("vision_config", tower) | {"out_hidden_size": text["hidden_size"]}
    tokens = {name: text.pop(name, token) for name, token in TINY_TOKENS.items()}
    # Height and width get 5 of 16 frequencies each, as in the models of this family.
    frequencies = int(text["head_dim"] * rotated) // 2
    side = max(1, frequencies * 5 // 16)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta", 10000.0),
        "mrope_section": [frequencies - 2 * side, side, side],
        "mrope_interleaved": True,
    }
    if rotated < 1:
        text["rope_parameters"]["partial_rotary_factor"] = rotated
    return outer | tokens | {"text_config": text | {"model_type": text_type}, "vision_config": vision}


@dataclass(frozen=True)
class Qwen3VL(Architecture):
    """Qwen3-VL. Its text model is Qwen3's, with rotary angles by time, height and width (interleaved MRoPE)."""

    images: Images | None = IMAGES
    text_type: str = "qwen3_vl_text"

    def full_config(self, text: Config) -> dict[str, Any]:
        return with_tower(text, self.text_type, TINY_TOWER)


@dataclass(frozen=True)
class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL with experts, which its authors store as [experts, in, out] and transformers 5 as [experts, out, in]."""

    def transposes_experts(self, shapes: Mapping[str, tuple[int, ...]], config: Config) -> bool:
        hidden, width = config["hidden_size"], config["moe_intermediate_size"]
        plain = {".experts.gate_up_proj": (2 * width, hidden), ".experts.down_proj": (hidden, width)}
        for name, shape in shapes.items():
            # A square tensor does not tell; of the two kinds at most one is square.
            expected = next((dims for end, dims in plain.items() if name.endswith(end)), None)
            if expected is not None and expected[0] != expected[1]:
                return tuple(shape[1:]) != expected
        return False


_WINDOWS = (
    "its vision tower attends within windows, and its checkpoints have names of tensors that no engine here reads"
)
UNDECLARED = {"qwen2_vl": "its checkpoints have names of tensors that no engine here reads", "qwen2_5_vl": _WINDOWS}
"""Models with images that are often asked for, and the reason why no engine trains them."""


def undeclared(model_type: str) -> str:
    """Return why a multimodal model without a declaration is refused."""
    reason = UNDECLARED.get(model_type)
    return (
        f"{model_type} is a multimodal model that megascend does not declare{f' ({reason})' if reason else ''}; it trains text "
        "models, and those with images that docs/images.md lists"
    )


FAMILIES = (
    Qwen3VL(
        ("qwen3_vl",),
        proven_with_images=True,
        model_class="Qwen3VLForConditionalGeneration",
        tiny={"attention_bias": False},
    ),
    Qwen3VLMoe(
        ("qwen3_vl_moe",),
        proven_with_images=True,
        model_class="Qwen3VLMoeForConditionalGeneration",
        text_type="qwen3_vl_moe_text",
        fixed={"norm_topk_prob": True, "routed_scaling_factor": 1.0},
        tiny={"attention_bias": False} | EXPERTS,
    ),
)
