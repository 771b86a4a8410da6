"""Write small random Hugging Face checkpoints with a byte-level tokenizer, for ``megascend new-model``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.errors import ConfigError
from megascend.models.base import EXPERT_COUNTS, LINEAR, Images, LatentAttention, expert_count
from megascend.models.registry import BUILT_IN
from megascend.runtime.io.atomic import replacing_directory, require_vacant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Qwen's names, which chat templates and inference engines know.
IM_START, IM_END, END_OF_TEXT = SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
PATCH, LARGEST_SIDE = 8, 256
"""Side of a patch in pixels, and of the largest square image that the image processor leaves as it is."""
VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, so that any usual tensor parallel size divides it."""
EXPERTS, EXPERTS_PER_TOKEN = 4, 2

WITH_IMAGES = (
    "{% macro write(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + write(message['content']) + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""``IMAGE`` stands for the tokens of an image."""
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ModelSize:
    """Shape of the model to create."""

    arch: str = "qwen3"
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    vocab: int | None = None
    context: int = 2048
    tie: bool = False

    def __post_init__(self) -> None:
        if self.arch not in BUILT_IN:
            raise ConfigError(f"--arch {self.arch!r} is not known; choose one of {', '.join(BUILT_IN)}")
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"--hidden {self.hidden} must be a multiple of 2 x --heads ({2 * self.heads}): rotary embeddings need "
                "an even head size"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")
        self._check_experts()
        special = self.special_tokens
        if self.vocab is not None and self.vocab < 256 + special:
            raise ConfigError(
                f"--vocab {self.vocab} is below the tokenizer's {256 + special} (256 bytes and {special} special tokens)"
            )

    def _check_experts(self) -> None:
        options = {"--experts": self.experts, "--experts-per-token": self.experts_per_token}
        if not expert_count(BUILT_IN[self.arch].tiny):
            moe = ", ".join(name for name, architecture in BUILT_IN.items() if expert_count(architecture.tiny))
            for option, value in options.items():
                if value is not None:
                    raise ConfigError(
                        f"{option} {value}, but --arch {self.arch} has no experts: leave it out, or use one of {moe}"
                    )
        experts, per_token = self.expert_counts
        if per_token > experts:
            raise ConfigError(f"--experts-per-token {per_token} exceeds --experts {experts}")

    @property
    def expert_counts(self) -> tuple[int, int]:
        """Experts of a layer, and those that a token is sent to."""
        return self.experts or EXPERTS, self.experts_per_token or EXPERTS_PER_TOKEN

    @property
    def special_tokens(self) -> int:
        images = BUILT_IN[self.arch].images
        return len(SPECIAL_TOKENS) + (0 if images is None else len(images.special_tokens))

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        return self.vocab or -(-(256 + self.special_tokens) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def hf_settings(size: ModelSize) -> dict[str, Any]:
    """Return the keyword arguments of the architecture's transformers config class."""
    im_end, end_of_text = 256 + SPECIAL_TOKENS.index(IM_END), 256 + SPECIAL_TOKENS.index(END_OF_TEXT)
    settings = {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        # Explicit, because Qwen3's default is 128 whatever the hidden size.
        "head_dim": size.hidden // size.heads,
        "intermediate_size": size.ffn or 3 * size.hidden,
        "vocab_size": size.padded_vocab,
        "max_position_embeddings": size.context,
        "tie_word_embeddings": size.tie,
        # transformers' defaults would be other tokens in this vocabulary.
        "bos_token_id": None,
        "eos_token_id": im_end,
        "pad_token_id": end_of_text,
    }
    architecture = BUILT_IN[size.arch]
    full = {"model_type": size.arch} | settings | _particular(size)
    if architecture.images is None:
        return {name: value for name, value in architecture.full_config(full).items() if name != "model_type"}
    first = 256 + len(SPECIAL_TOKENS)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    tokens = {name: first + number for number, name in enumerate(names)}
    width = -(-size.hidden // 2 // 4) * 4  # a multiple of 2 x 2 heads
    tower = {
        "depth": 4,
        "hidden_size": width,
        "num_heads": 2,
        "intermediate_size": 2 * width,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 3][: size.layers],
    }
    full |= {"vision_config": tower} | tokens
    return {name: value for name, value in architecture.full_config(full).items() if name != "model_type"}


def _particular(size: ModelSize) -> dict[str, Any]:
    """Return the settings of the architecture's smallest model with the requested sizes."""
    settings = dict(BUILT_IN[size.arch].tiny)
    settings.pop("rms_norm_eps", None)  # some have a large one, for comparisons in fp32
    kinds = settings.get("layers_block_type") or settings.get("layer_types") or []
    attention = [index for index, kind in enumerate(kinds) if kind != LINEAR and "attention" in kind]
    # Fewer layers than the pattern's are its last ones, or the last ones up to an attention layer: transformers cannot sample
    # from a model without any.
    end = attention[-1] + 1 if attention and attention[-1] < len(kinds) - size.layers else len(kinds)
    for name, value in settings.items():
        if not isinstance(value, list) or not value:
            continue
        # One entry a layer: the last kind of MLP repeats, other patterns restart.
        if name != "mlp_layer_types" and size.layers < len(value):
            stop = end if len(value) == len(kinds) else len(value)
            settings[name] = value[max(0, stop - size.layers) :][: size.layers]
        else:
            extra_items = [value[-1]] if name == "mlp_layer_types" else value
            settings[name] = [*value, *extra_items * size.layers][: size.layers]
    if expert_count(settings):
        experts, per_token = size.expert_counts
        width = "moe_intermediate_size" if "moe_intermediate_size" in settings else "intermediate_size"
        names = dict.fromkeys(EXPERT_COUNTS, experts) | {"num_experts_per_tok": per_token, "moe_k": per_token}
        settings |= {name: value for name, value in names.items() if name in settings}
        settings[width] = size.ffn or size.hidden
    if LatentAttention.from_config(settings) is not None:
        settings["num_key_value_heads"] = size.heads
    rope = settings.get("rope_parameters", {})
    if rope.get("rope_type") == "yarn":  # transformers warns of a factor that is not the ratio of the two lengths
        settings["rope_parameters"] = rope | {
            "original_max_position_embeddings": max(1, size.context // int(rope["factor"]))
        }
    return settings


def byte_tokenizer(context: int, images: Images | None = None) -> PreTrainedTokenizerFast:
    """Build a tokenizer of one token per UTF-8 byte (token id = byte) and special tokens; any text round-trips.

    Args:
        images: declaration of a model's images, whose special tokens follow ChatML's; None: it takes none.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    # Without the regular expression that splits words: without merges it would only cost time.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *(images.special_tokens if images else ())])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    if images is not None:
        fast.chat_template = WITH_IMAGES.replace("IMAGE", "".join(images.special_tokens[index] for index in (0, 2, 1)))
    return fast


def processor_settings(images: Images) -> dict[str, dict[str, Any]]:
    """Return the settings of a model's image and video processor, by file."""
    image, video, processor = images.processor
    sizes = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "processor_class": processor}
    limits = {"shortest_edge": (4 * PATCH) ** 2, "longest_edge": LARGEST_SIDE**2}
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {
        "preprocessor_config.json": sizes | normal | {"image_processor_type": image, "size": limits},
        "video_preprocessor_config.json": sizes | normal | {"video_processor_type": video, "size": limits},
    }


def byte_characters() -> list[str]:
    """Return the printable character by which byte-level BPE writes each byte (GPT-2, openai/gpt-2 src/encoder.py).

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def write_checkpoint(out: Path, size: ModelSize, seed: int = 1234) -> int:
    """Create the model and write it to ``out``, all of it or nothing; returns the number of parameters."""
    require_vacant(out)

    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
    from transformers.utils import logging

    BUILT_IN[size.arch].make_known_to_transformers()
    images = BUILT_IN[size.arch].images
    torch.manual_seed(seed)
    config = AutoConfig.for_model(size.arch, **hf_settings(size))
    loader = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
    model = loader.from_config(config, dtype=torch.float32)
    text = config.get_text_config()
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id
    )
    logging.disable_progress_bar()  # one file, written in milliseconds

    try:
        with replacing_directory(out) as fresh:
            model.save_pretrained(fresh, safe_serialization=True)
            byte_tokenizer(size.context, images).save_pretrained(fresh)
            _name_tokenizer_class(fresh / "tokenizer_config.json")
            for name, settings in processor_settings(images).items() if images is not None else ():
                (fresh / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out} could not be written: {error}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def _name_tokenizer_class(path: Path) -> None:
    """Set a class name that transformers 4 and 5 both know; transformers 5 writes one that transformers 4 lacks."""
    values = json.loads(path.read_text(encoding="utf-8"))
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
