"""Slice of a model: a small model with the settings of a large one, cheap enough to build twice. Pure.

Sizes shrink, settings stay. These shrink: the number of layers (until the slice still has every kind of layer), heads (to 4 in
2 query groups, or in 4 or 1 as in the model), hidden and feed-forward sizes, the vocabulary, and positions where RoPE depends
on the sequence length. All else stays, including head size, experts and RoPE's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascend.errors import ConfigError
from megascend.models import architecture_named

HIDDEN, FFN, EXPERT_FFN, SHARED_FFN, VOCABULARY = 64, 96, 32, 48, 128
ORIGINAL_POSITIONS = 24
"""``original_max_position_embeddings`` of a slice: some of its samples are shorter and some longer."""
POSITIONS = 64
WINDOW = 16
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_window_size", "attention_window_size")
"""Settings that limit attention to a window of preceding tokens."""
LENGTHS = (3, 8, 13, 40, 48)
MAX_LAYERS = 8
FIXED_ROPE = ("default", "linear", "yarn", "llama3")
"""Kinds of RoPE whose angles do not depend on the length of a sample."""
ROPE_SECTIONS = ("rope_scaling", "rope_parameters")

WITH_TOWER = "no slice is made of a model with a vision tower that megascend does not declare"
TOWER_HEADS = 2
IRRELEVANT_SETTINGS = (
    "_name_or_path",
    "auto_map",
    "initializer_range",
    "output_router_logits",
    "pretraining_tp",
    "quantization_config",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Settings that do not affect a forward pass in fp32, or that only describe how the weights are stored."""


class CannotSliceError(ConfigError):
    """A configuration from which no small model can be made; the message gives the reason."""


@dataclass(frozen=True)
class Slice:
    """A small model that represents a large one.

    Attributes:
        config: settings under the names of the model's own ``config.json``.
        lengths: tokens of the samples, ascending.
        not_shown: description of kinds of layers that only occur beyond the slice's last layer; empty if there are none.
    """

    config: dict[str, Any]
    lengths: tuple[int, ...]
    not_shown: str = ""

    @property
    def text_config(self) -> dict[str, Any]:
        """Return the settings of the language model."""
        return self.config.get("text_config", self.config)

    @property
    def layers(self) -> int:
        """Return the number of its layers."""
        return self.text_config["num_hidden_layers"]


def slice_model(raw: Mapping[str, Any], full: Mapping[str, Any], longest: int, window_active: bool) -> Slice:
    """Return the slice of a model, or raise CannotSliceError.

    ``raw``: its ``config.json``; ``full``: with all defaults; ``longest``: tokens of the longest sample that a run allows.
    Without ``window_active`` samples are never longer than the model's sliding window.
    """
    architecture = architecture_named(str(raw.get("model_type") or ""))
    if architecture.copied and "text_config" in raw:  # its tower is not built, and its text model is another family's
        raw, full = {**raw["text_config"], "model_type": full["text_config"]["model_type"]}, full["text_config"]
        return slice_model(raw, full, longest, window_active)
    if isinstance(raw.get("vision_config") or full.get("vision_config"), Mapping):
        return _slice_with_tower(raw, full, longest, window_active)
    full = architecture.normalise(full)
    missing = [
        name for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size") if not full.get(name)
    ]
    if missing or "text_config" in raw:
        raise CannotSliceError(f"config.json has no {', '.join(missing) or 'text model of its own, but a text_config'}")
    config = {name: value for name, value in raw.items() if name not in IRRELEVANT_SETTINGS}
    # The vocabulary shrinks below these ids, and torch's Embedding refuses a padding id beyond it. fp32, since
    # rounding to 16 bits would hide errors of the size that the check must detect.
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": "float32"}
    if raw.get("eos_token_id") is not None:
        config["eos_token_id"] = 1  # some models compute with it, and cannot be built without
    layers, not_shown = _layers(full)
    config |= _per_layer(raw, full["num_hidden_layers"], layers) | {"num_hidden_layers": layers}
    config |= _widths(raw, full) | architecture.selfcheck_settings(full, layers)
    positions, longest = _positions(raw, full, longest)
    config |= positions
    for name in WINDOWS if window_active else ():
        if isinstance(full.get(name), int) and full[name] > WINDOW:
            config[name] = WINDOW
    lengths = tuple(length for length in LENGTHS if length <= longest)
    return Slice(config, lengths if len(lengths) > 1 else (1, max(2, longest)), not_shown)


def _slice_with_tower(raw: Mapping[str, Any], full: Mapping[str, Any], longest: int, window_active: bool) -> Slice:
    """Return the slice of a model with a vision tower: that of its language model, with a small tower."""
    architecture = architecture_named(str(raw.get("model_type") or ""))
    if architecture.images is None or not isinstance(full.get("text_config"), Mapping):
        raise CannotSliceError(WITH_TOWER)
    kind = {"model_type": architecture.text_type or full["text_config"].get("model_type")}
    text = slice_model({**raw.get("text_config", {}), **kind}, {**full["text_config"], **kind}, longest, window_active)
    # The last tokens of the vocabulary are special; samples draw the others.
    special = [name for name, value in full.items() if name.endswith("_token_id") and isinstance(value, int)]
    last = text.config["vocab_size"] - 1
    tokens = {name: last - number for number, name in enumerate(sorted(special))}
    sizes = full["vision_config"]
    tower = dict(raw.get("vision_config") or {})
    inner = range(min(len(sizes.get("deepstack_visual_indexes") or ()), text.layers))
    heads = min(sizes["num_heads"], TOWER_HEADS)
    tower |= {
        "depth": max(2, len(inner)),
        "num_heads": heads,
        "hidden_size": heads * (sizes["hidden_size"] // sizes["num_heads"]),
        "intermediate_size": min(sizes["intermediate_size"], FFN),
        "out_hidden_size": text.config["hidden_size"],
    }
    if "deepstack_visual_indexes" in sizes:
        tower["deepstack_visual_indexes"] = [*inner]
    outer = {name: value for name, value in raw.items() if name not in IRRELEVANT_SETTINGS}
    config = outer | tokens | {"dtype": "float32", "text_config": text.config, "vision_config": tower}
    return Slice(config, text.lengths, text.not_shown)


def _layers(full: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many of the first layers include every kind of layer, and a description of kinds left out."""
    total: int = full["num_hidden_layers"]
    kinds = [_kind(full, layer) for layer in range(total)]
    # Layers are kept from the first on, not picked: settings such as first_k_dense_replace count from the model's first layer.
    required = max(kinds.index(kind) for kind in dict.fromkeys(kinds)) + 1
    if required <= MAX_LAYERS:
        return min(total, max(2, required)), ""
    return MAX_LAYERS, f"layers from {MAX_LAYERS} on are of other kinds than those before"


def _kind(full: Mapping[str, Any], layer: int) -> tuple[Any, ...]:
    """Return the kind of a layer: its entry in every list that has one a layer, and whether it is dense."""
    lists = [
        repr(value[layer])
        for name, value in sorted(full.items())
        if isinstance(value, list) and len(value) == full["num_hidden_layers"]
    ]
    dense = (
        layer < (full.get("first_k_dense_replace") or 0)
        or layer in (full.get("mlp_only_layers") or [])
        or (layer + 1) % (full.get("decoder_sparse_step") or 1) != 0
    )
    return (*lists, dense)


def _per_layer(raw: Mapping[str, Any], total: int, layers: int) -> dict[str, Any]:
    """Return the settings that are lists with an entry for each layer, cut to ``layers``."""
    cut: dict[str, Any] = {
        name: value[:layers] for name, value in raw.items() if isinstance(value, list) and len(value) == total
    }
    if raw.get("mlp_only_layers"):
        cut["mlp_only_layers"] = [layer for layer in raw["mlp_only_layers"] if layer < layers]
    return cut


def _widths(raw: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Return hidden and feed-forward sizes, heads and vocabulary of the slice."""
    widths: dict[str, Any] = {"vocab_size": min(full["vocab_size"], VOCABULARY)}
    for name, limit in (
        ("intermediate_size", FFN),
        ("moe_intermediate_size", EXPERT_FFN),
        ("shared_expert_intermediate_size", SHARED_FFN),
    ):
        if isinstance(full.get(name), int) and full[name]:
            widths[name] = min(full[name], limit)
    if full.get("vocab_size_per_layer_input"):
        widths["vocab_size_per_layer_input"] = widths["vocab_size"]
    heads, hidden = full["num_attention_heads"], full["hidden_size"]
    groups = full.get("num_key_value_heads") or heads
    if heads % groups:
        return widths  # an invalid configuration: transformers reports it when the slice is built
    latent = bool(full.get("kv_lora_rank"))
    # Several groups stay several and one stays one: how heads map to groups is what an engine can get wrong.
    head_counts = {"num_attention_heads": 4, "num_key_value_heads": 4 if groups == heads else min(groups, 2)}
    if heads < 4:
        head_counts = {"num_attention_heads": heads, "num_key_value_heads": groups}
    if "num_key_value_heads" not in full:
        del head_counts["num_key_value_heads"]
    widths |= head_counts
    if latent:
        return widths | {"hidden_size": HIDDEN}
    explicit = raw.get("head_dim")
    head_dim = explicit or hidden // heads
    # Where heads fill the hidden size they must do so in the slice, because the configuration may not state a head size.
    tied_to_heads = not explicit or heads * head_dim == hidden
    return widths | {"hidden_size": head_counts["num_attention_heads"] * head_dim if tied_to_heads else HIDDEN}


def _positions(raw: Mapping[str, Any], full: Mapping[str, Any], longest: int) -> tuple[dict[str, Any], int]:
    """Return the position settings and the longest sample, scaled so that RoPE's switch is within the samples."""
    limit: int | None = full.get("max_position_embeddings")
    if limit is None:
        return {}, longest
    sections = rope_settings(full)
    inner = [section.get("original_max_position_embeddings") for section in sections]
    original = full.get("original_max_position_embeddings") or next(filter(None, inner), None)
    if not original:
        plain = all((section.get("rope_type") or section.get("type") or "default") == "default" for section in sections)
        # Fewer positions make smaller tables, but scaled kinds of RoPE compute their angles from the number of positions.
        limit = min(limit, POSITIONS) if plain else limit
        return {"max_position_embeddings": limit}, min(longest, limit)
    changed: dict[str, Any] = {
        name: _rescaled(raw[name]) for name in ROPE_SECTIONS if isinstance(raw.get(name), Mapping)
    }
    changed["max_position_embeddings"] = max(2, limit * ORIGINAL_POSITIONS // original)
    if full.get("original_max_position_embeddings"):
        changed["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    if any((section.get("rope_type") or section.get("type") or "default") not in FIXED_ROPE for section in sections):
        # Samples shrink with the positions: a run whose samples are all shorter than the switch is not refused for longer ones.
        longest = longest * ORIGINAL_POSITIONS // original
    return changed, max(2, min(longest, changed["max_position_embeddings"]))


def rope_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return RoPE's parameters under either section name: one mapping, or one for each kind of layer."""
    settings: list[Mapping[str, Any]] = []
    for name in ROPE_SECTIONS:
        section = config.get(name)
        if isinstance(section, Mapping):
            inner = [value for value in section.values() if isinstance(value, Mapping)]
            settings += inner or [section]
    return settings


def _rescaled(section: Mapping[str, Any]) -> dict[str, Any]:
    changed = {name: _rescaled(value) if isinstance(value, Mapping) else value for name, value in section.items()}
    if changed.get("original_max_position_embeddings"):
        changed["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    return changed
