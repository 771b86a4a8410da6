"""The declaration of an architecture: all that is particular about a family of models, in one place. Pure.

A plain decoder (Llama's layers and names) needs nothing but its ``model_type``. A family's file sets what differs, and the rest
of the package asks the declaration: the reader of ``config.json``, the builders of engines, adapters, the memory estimate, the
self-check, the sampler, tiny models for tests and the table of supported models. :mod:`megascend.models.registry` finds the
declaration of a ``model_type``; packages from outside add theirs with :func:`megascend.register_architecture`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from megascend.config.rules import Rule
from megascend.errors import ConfigError

Config = Mapping[str, Any]
"""A model's ``config.json``, or transformers' ``to_dict()`` of it; of a multimodal model its ``text_config``."""

OTHER_ENGINE = "use engine fsdp"
"""Remedy of refusals that no setting avoids: engine fsdp computes what transformers does."""
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ALIASES = {
    "num_experts_per_tok": ("num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
    "num_shared_experts": ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "routed_scaling_factor": ("router_scaling_factor",),
    "num_nextn_predict_layers": ("num_mtp_layers", "num_mtp_modules"),
}
"""Keys that this package reads, and the other spellings of them."""


@dataclass(frozen=True)
class Images:
    """Images as inputs of a family's models: a vision tower turns a grid of patches into features, each in place of one token.

    Attributes:
        tower: prefix of the tower's tensors, in checkpoints and in transformers' model.
        token: key of ``config.json`` with the id of the token that stands for a feature.
        merge: key of ``vision_config`` with the side of the square of patches that makes one feature.
        blocks: prefix within the tower of the layers that compute a row for each patch; its other linear layers compute one for
            each feature.
        not_linear: modules of the tower whose matrices are not those of linear layers.
        processor: transformers' classes of the image processor, video processor and processor, for new models.
        rotary_sections: transformers' default of ``rope_parameters.mrope_section``, rotary frequencies by time, height and width.
        special_tokens: the tokenizer's tokens for begin and end of an image, a feature of an image, a feature of a video.
    """

    tower: str = "model.visual."
    token: str = "image_token_id"
    merge: str = "spatial_merge_size"
    blocks: str = "blocks."
    not_linear: tuple[str, ...] = ("patch_embed.proj", "pos_embed")
    processor: tuple[str, str, str] = ("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor")
    rotary_sections: tuple[int, int, int] = (24, 20, 20)
    special_tokens: tuple[str, str, str, str] = (
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )


@dataclass(frozen=True)
class ImageLayout:
    """Sizes by which a model's images and tokens fit together.

    Attributes:
        token: id of the token that stands for one feature of an image.
        merge: side of the square of patches that makes one feature.
        patch_width: numbers of a patch: channels x frames x height x width.
    """

    token: int
    merge: int
    patch_width: int

    def features(self, frames: int, height: int, width: int) -> int:
        """Return the features, and tokens, of a grid of patches."""
        return frames * height * width // self.merge**2


@dataclass(frozen=True)
class Architecture:
    """A family of models. The defaults describe a plain decoder; subclasses override what differs.

    Modules are named, not imported: a declaration is read by processes that have neither torch nor Megatron.

    Attributes:
        model_types: ``model_type`` values of ``config.json``.
        transformers: module that makes the model known to transformers' Auto classes when it is imported; it needs neither
            Megatron nor a bootstrapped process. None: transformers knows it.
        megatron: module that registers the model with mcore-bridge when it is imported, after Megatron. None: mcore-bridge has
            the model.
        megatron_core: oldest Megatron-Core that has the model's layers, as ``0.19``; None: every one that is supported.
        unreleased: what the releases of Megatron-Core lack of the family, and the remedy; None: what it needs is released.
        lora_targets: ``module:function``, a map from one of Megatron's layers to its adapter targets
            (:data:`megascend.training.lora.target_maps.TargetMap`). None: the map of plain decoders.
        model_class: transformers' class of the causal language model, as in ``architectures`` of ``config.json``.
        router: scoring function of the experts; None for a dense model, or if ``config.json`` states it.
        layer_kinds: entries of ``layer_types`` that the Megatron engine computes.
        biases: linear layers that get a bias from ``attention_bias: true`` in transformers. ``qkv``: queries, keys and values, as
            in Megatron-Core; ``attention``: the output projection too, whose bias Megatron-Core lacks; ``all``: every linear
            layer, as in Megatron-Core.
        renamed: pairs of a part of a tensor's name in checkpoints and its replacement in transformers' model.
        interleaved_experts: fused experts are stored as [experts, in, out], and gate and up alternate.
        latent_norm_epsilon: epsilon of the norms of latent attention's queries, keys and values in transformers, where it is not
            ``rms_norm_eps``.
        prediction_head: the heads of its checkpoints for multi-token prediction are computed as DeepSeek-V3's (arXiv:2412.19437,
            section 2.2), each with a layer like the model's last one; the Megatron engine trains one.
        prediction_layers: name of the list of the heads' layers in a checkpoint: that of the model's layers, which the heads
            follow, or one of their own.
        context_core: oldest Megatron-Core that divides its samples over context parallel ranks; None: as ``megatron_core``.
        context_algorithms: values of ``parallel.context_algorithm`` that its attention has; None: all.
        without_gradient: parts of the names of weights that have no gradient: they choose, and the choice has none.
        without_adapters: ends of the names of linear layers that adapters cannot act on.
        packages: modules that the Megatron engine computes its layers with, beside its own packages; on the CPU megascend brings
            them.
        copied: beginnings of the names of tensors that no engine builds, and that exports copy from the checkpoint.
        images: declaration of the images that a sample may hold beside tokens; None: tokens only.
        text_type: ``model_type`` of ``text_config``, of a family whose ``config.json`` has one.
        fixed: settings that transformers, mcore-bridge or Megatron-Core has in its code, by the value that all compute with.
        passed: TransformerConfig's settings that mcore-bridge does not set, by the settings of ``config.json`` with their values.
        tiny: settings of the smallest model that shows all of the family, beside the sizes that all tiny models share.
        proven: the parity tests compare training in every layout with Hugging Face.
        proven_with_images: tests compare training with images in the layouts that take them (docs/images.md).
        rules, layout_rules, stage_rules: configurations, layouts and divisions into stages that the Megatron engine refuses.
    """

    model_types: tuple[str, ...]
    transformers: str | None = None
    megatron: str | None = None
    megatron_core: str | None = None
    unreleased: tuple[str, str] | None = None
    lora_targets: str | None = None
    model_class: str | None = None
    router: Literal["softmax", "sigmoid"] | None = None
    layer_kinds: tuple[str, ...] = ATTENTION_LAYERS
    biases: Literal["qkv", "attention", "all"] = "attention"
    renamed: tuple[tuple[str, str], ...] = ()
    interleaved_experts: bool = False
    latent_norm_epsilon: float | None = None
    prediction_head: bool = False
    prediction_layers: str = "model.layers"
    context_core: str | None = None
    context_algorithms: tuple[str, ...] | None = None
    without_gradient: tuple[str, ...] = ()
    without_adapters: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    images: Images | None = None
    text_type: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    passed: Mapping[str, str] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    proven: bool = False
    proven_with_images: bool = False

    @property
    def model_type(self) -> str:
        """Return the first of :attr:`model_types`."""
        return self.model_types[0]

    def normalise(self, config: Config) -> dict[str, Any]:
        """Return a configuration with the keys that this package reads, independent of the version of transformers or the author.

        Keys are added, never removed or replaced, except a number of experts of a model without experts.
        """
        aliases = {
            name: next((config[alias] for alias in spellings if config.get(alias) is not None), None)
            for name, spellings in ALIASES.items()
            if config.get(name) is None
        }
        return dict(config) | {name: value for name, value in aliases.items() if value is not None}

    def copies(self, name: str, config: Config) -> bool:
        """Check whether exports copy a tensor of a checkpoint, which no engine builds. ``config``: normalised."""
        return bool(self.copied) and name.startswith(self.copied)

    def full_config(self, text: Config) -> dict[str, Any]:
        """Return the ``config.json`` of a model with these settings of its language model; others may be among them."""
        return dict(text)

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        """Return settings of mcore-bridge's ``ModelConfig`` that replace what its parser reads from a full configuration.

        The parser reads keys of the authors' configurations. transformers 5 has their values in its code and does not write them.
        """
        settings: dict[str, Any] = {
            name: config[key] for name, key in self.passed.items() if config.get(key) is not None
        }
        if self.images is not None:  # transformers always interleaves them, whatever mrope_interleaved says
            sections = (config.get("rope_parameters") or {}).get("mrope_section", self.images.rotary_sections)
            settings |= {"position_embedding_type": "mrope", "mrope_section": [*sections], "mrope_interleaved": True}
        # A declaration knows the scoring function even where config.json does not name it; a sigmoid router's choice
        # is corrected by expert biases, which are tensors of the checkpoint.
        if self.router is not None and expert_count(config):
            settings["moe_router_score_function"] = self.router
            settings["moe_router_enable_expert_bias"] = self.router == "sigmoid"
        layers = expert_layers(config)
        if layers is not None and all(layers):
            settings["moe_layer_freq"] = 1  # whatever first_k_dense_replace is by default
        elif layers is not None:
            pattern = ",".join(str(int(has_experts)) for has_experts in layers)
            # With a pattern, ffn_hidden_size is the width of the dense layers; the experts' width is a setting of its own.
            settings |= {"moe_layer_freq": f"[{pattern}]", "ffn_hidden_size": config["intermediate_size"]}
        return settings

    def unsupported(self, config: Config) -> list[str]:
        """Return the reasons why the Megatron engine cannot train the model of a full configuration; empty if none is known.

        These are settings that would otherwise fail late and misleadingly: with a missing or unread tensor, with an assertion of
        Megatron-Core's, or by computing another function than transformers does. The self-check finds the rest.
        """
        ignored = [
            f"{name}: {config[name]} is ignored for {self.model_type}, which is computed with {value}; {OTHER_ENGINE}"
            for name, value in self.fixed.items()
            if config.get(name) not in (None, value)
        ]
        return _refusals(self.rules, ModelSetup(self, self.normalise(config))) + ignored

    def unsupported_layout(self, config: Config, *, tensor: int, context: int) -> list[str]:
        """Return why the Megatron engine cannot divide the model over tensor and context parallel ranks; empty if it can.

        Sizes that all models have are checked for all (:func:`megascend.runtime.topology.topology.check_model`).
        """
        return _refusals(self.layout_rules, ModelSetup(self, self.normalise(config), tensor, context))

    def unsupported_stages(self, config: Config, chunk_layers: Sequence[int]) -> list[str]:
        """Return why the Megatron engine cannot divide the layers into chunks of these sizes, in order; empty if it can."""
        return _refusals(self.stage_rules, ModelSetup(self, config, chunk_layers=tuple(chunk_layers)))

    def selfcheck_settings(self, config: Config, layers: int) -> dict[str, Any]:
        """Return settings of the self-check's small model that it does not find by their names.

        Args:
            config: normalised.
            layers: number of its layers, the first ones of the model.
        """
        return {}

    def transposes_experts(self, shapes: Mapping[str, tuple[int, ...]], config: Config) -> bool:
        """Check whether fused experts of a checkpoint are [experts, in, out].

        Args:
            shapes: shapes of the checkpoint's tensors, by name.
            config: normalised configuration.
        """
        return self.interleaved_experts

    def image_layout(self, config: Config) -> ImageLayout | None:
        """Return the sizes of the images of a complete ``config.json``; None for a model of text."""
        if self.images is None:
            return None
        tower, kind = config.get("vision_config"), config.get("model_type")
        if not isinstance(tower, Mapping) or not isinstance(config.get(self.images.token), int):
            raise ConfigError(f"the model config ({kind}) has no vision_config, or no {self.images.token}")
        missing = {self.images.merge, "temporal_patch_size", "patch_size"} - tower.keys()
        if missing:
            raise ConfigError(f"the model config ({kind}): vision_config has no {', '.join(sorted(missing))}")
        width, hidden = tower.get("out_hidden_size"), text_config(config).get("hidden_size")
        if width not in (None, hidden):
            raise ConfigError(f"vision_config.out_hidden_size: {width} is not text_config.hidden_size: {hidden}")
        channels = tower.get("in_channels", tower.get("in_chans", 3))
        width = channels * tower["temporal_patch_size"] * tower["patch_size"] ** 2
        return ImageLayout(config[self.images.token], tower[self.images.merge], width)

    def model_name(self, name: str) -> str:
        """Map the name of a checkpoint's tensor to its name in transformers' model, which peft uses."""
        for stored, renamed in self.renamed:
            name = name.replace(stored, renamed)
        return name

    def attention_width(self, config: Config) -> int:
        """Return the mean of the total query and value widths; attention's cost per pair of tokens is proportional to it."""
        heads = next(config[name] for name in ("num_attention_heads", "n_head", "num_heads") if config.get(name))
        latent = LatentAttention.from_config(config)
        if latent is not None:
            return heads * (latent.query_head_dim + latent.value_head_dim) // 2
        hidden = next(config[name] for name in ("hidden_size", "n_embd", "d_model") if config.get(name))
        return heads * (config.get("head_dim") or hidden // heads)

    def make_known_to_transformers(self) -> None:
        """Import the module that registers the model with transformers' Auto classes, if the declaration names one.

        Raises:
            ConfigError: the import fails, with the reason.
        """
        if self.transformers is not None:
            self.import_module(self.transformers)

    def code_digest(self) -> str:
        """Return a digest of the packages that hold its modules and its class, without importing them; a key for caches.

        Raises:
            ConfigError: a package is not installed.
        """
        names = [self.transformers, self.megatron, self.lora_targets, type(self).__module__]
        # Whole packages: a module that is named may import any other of its package.
        digest = hashlib.sha256()
        for package in sorted({name.partition(".")[0].partition(":")[0] for name in names if name}):
            if package == "megascend":
                continue  # caches also have megascend's own version in their keys
            spec = find_spec(package)
            if spec is None or spec.origin is None:
                raise ConfigError(f"architecture {self.model_type!r}: package {package!r} is not installed")
            origin = Path(spec.origin)
            files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
            for file in files:
                digest.update(f"{package} {file.relative_to(origin.parent)}\n".encode() + file.read_bytes())
        return digest.hexdigest()

    def import_module(self, name: str) -> Any:
        """Import one of the modules that the declaration names.

        Raises:
            ConfigError: the import fails, with the reason.
        """
        try:
            return import_module(name)
        except Exception as error:
            raise ConfigError(
                f"architecture {self.model_type!r}: importing {name!r} failed: {type(error).__name__}: {error}"
            ) from error

    # Of settings that would otherwise fail late, or make Megatron compute another function than transformers does.
    rules: ClassVar[tuple[Rule[ModelSetup], ...]] = (
        Rule(
            "model_type: mcore-bridge builds it on a development version of Megatron-Core, releases up to 0.19 lack {lacking}; "
            "{until}",
            lambda s: s.architecture.unreleased is not None,
        ),
        Rule(
            f"layer_types with {{model_type}}: no test covers {{unknown_layers}} on engine megatron; {OTHER_ENGINE}",
            lambda s: bool(s.unknown_layers),
        ),
        *(
            Rule(
                f"{name} with {{model_type}}: Megatron's attention has biases on q, k and v only, not on o_proj; "
                f"{OTHER_ENGINE}",
                lambda s, name=name: bool(s[name]) and s.architecture.biases == "attention",
            )
            for name in ("attention_bias", "use_bias")
        ),
        Rule(
            f"mlp_bias with {{model_type}}: mcore-bridge cannot load biases into Megatron's fused layers; {OTHER_ENGINE}",
            lambda s: bool(s["mlp_bias"]),
        ),
        Rule(
            "num_experts_per_tok with norm_topk_prob=true: the weight of each token's expert is 1, and Megatron-Core "
            f"takes its probability; {OTHER_ENGINE}",
            lambda s: (
                s.experts > 0
                and s["num_experts_per_tok"] == 1
                and bool(s.architecture.fixed.get("norm_topk_prob", s["norm_topk_prob"]))
            ),
        ),
        Rule(
            "sliding_window with sliding_attention in layer_types: they would see no token; correct config.json",
            lambda s: not s.config.get("sliding_window", 1) and "sliding_attention" in (s["layer_types"] or ()),
        ),
        Rule(
            "decoder_sparse_step with mlp_only_layers={mlp_only_layers}: no layer has experts, though there are "
            "{experts}; correct config.json",
            lambda s: (layers := expert_layers(s.config)) is not None and not any(layers),
        ),
        Rule(
            "norm_topk_prob with {model_type}: Megatron-Core always divides the chosen experts' sigmoid scores by "
            f"their sum; {OTHER_ENGINE}",
            # Megatron-Core does not divide the score of a single expert.
            lambda s: (
                s.architecture.router == "sigmoid" and s["num_experts_per_tok"] != 1 and s["norm_topk_prob"] is False
            ),
        ),
        Rule(
            "num_experts_per_tok with {experts} experts in a layer: a token has no more; correct config.json",
            lambda s: 0 < s.experts < (s["num_experts_per_tok"] or 1),
        ),
        Rule(
            "n_group with topk_group={topk_group} and {experts} experts: they do not fit; correct config.json",
            lambda s: s.architecture.router == "sigmoid" and not _groups_fit(s.config),
        ),
        Rule(
            "n_group with num_experts_per_tok={num_experts_per_tok} and topk_group={topk_group}: groups are ranked by two "
            f"experts, in Megatron-Core by the quotient; {OTHER_ENGINE}",
            lambda s: (
                s.architecture.router == "sigmoid"
                and s.experts > 0
                and _groups_fit(s.config)
                and (s["n_group"] or 1) > 1
                and s["num_experts_per_tok"] // (s["topk_group"] or 1) != 2
            ),
        ),
        Rule(
            "num_shared_experts with {model_type}: transformers' shared experts have no weights, which Megatron cannot "
            f"build; {OTHER_ENGINE}",
            lambda s: s.experts > 0 and s["num_shared_experts"] == 0,
        ),
    )
    layout_rules: ClassVar[tuple[Rule[ModelSetup], ...]] = ()
    stage_rules: ClassVar[tuple[Rule[ModelSetup], ...]] = ()


def _refusals(rules: Sequence[Rule[ModelSetup]], setup: ModelSetup) -> list[str]:
    refusals = [rule.message(setup) for rule in rules if rule.when(setup)]
    for name, spellings in ALIASES.items():  # a user looks for the key that config.json has
        spelling = next((other for other in spellings if other in setup.config), name)
        refusals = [text.replace(f"{name}:", f"{spelling}:", 1) for text in refusals]
    return refusals


@dataclass(frozen=True)
class ModelSetup:
    """A model's normalised configuration and the layout of its layers, on which the rules of its family are evaluated."""

    architecture: Architecture
    config: Config
    tensor: int = 1
    context: int = 1
    chunk_layers: tuple[int, ...] = ()

    def __getitem__(self, key: str) -> Any:
        """Return a size of the layout, an attribute or a setting of the configuration."""
        name = key.removeprefix("parallel.")
        return getattr(self, name) if hasattr(self, name) else self.config.get(name)

    @property
    def lacking(self) -> str:
        """Return what the releases of Megatron-Core lack."""
        return (self.architecture.unreleased or ("",))[0]

    @property
    def until(self) -> str:
        """Return the remedy for a family that needs what is not released."""
        return (self.architecture.unreleased or ("",))[-1]

    @property
    def unknown_layers(self) -> str:
        """Name the kinds of layers that the Megatron engine does not compute."""
        return ", ".join(sorted({*map(str, self["layer_types"] or ())} - {*self.architecture.layer_kinds}))

    @property
    def experts(self) -> int:
        """Return the number of routed experts of a layer."""
        return expert_count(self.config)


def _groups_fit(config: Config) -> bool:
    experts, groups, chosen = expert_count(config), config.get("n_group") or 1, config.get("topk_group") or 1
    half_set = bool(config.get("topk_group")) and config.get("n_group", groups) is None
    return not experts or (experts % groups == 0 and chosen <= groups <= max(1, experts // 2) and not half_set)


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        query_latent: width of the queries' latent; None: queries are projected from the hidden states.
        key_value_latent: width of the latent of keys and values.
        rotated: width of the part of a query or key head that is rotated; keys share it between heads.
        unrotated: width of the other part.
        value_head_dim: width of a value head.
    """

    query_latent: int | None
    key_value_latent: int
    rotated: int
    unrotated: int
    value_head_dim: int

    @classmethod
    def from_config(cls, config: Config) -> LatentAttention | None:
        """Read the sizes of a configuration; None for another kind of attention."""
        if config.get("kv_lora_rank") is None:
            return None
        names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return cls(*(config.get(name) for name in names))  # type: ignore[arg-type]

    @property
    def query_head_dim(self) -> int:
        """Return the width of a query or key head."""
        return self.rotated + self.unrotated


@dataclass(frozen=True)
class IndexedAttention:
    """Sizes of the indexer of sparse attention (DeepSeek-V3.2-Exp, section 2.1), which chooses a query's keys.

    Attributes:
        heads, head_dim: of the indexer's queries; it has one key a token.
        topk: keys that a query attends to.
        computing: True for each layer that has an indexer; the others use the choice of the last one before them.
    """

    heads: int
    head_dim: int
    topk: int
    computing: tuple[bool, ...]

    @classmethod
    def from_config(cls, config: Config) -> IndexedAttention | None:
        """Read the sizes of a configuration; None for attention to all keys."""
        if config.get("index_topk") is None:
            return None
        kinds = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
        computing = tuple(kind == "full" for kind in kinds)
        return cls(config["index_n_heads"], config["index_head_dim"], config["index_topk"], computing)


LINEAR = "linear_attention"
"""Entry of ``layer_types`` for a layer with linear attention."""


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of linear attention by the gated delta rule (Yang et al., arXiv:2412.06464).

    Attributes:
        layers: True for each layer that has it.
        key_heads, value_heads: heads of queries and keys, and of values; a key head serves consecutive value heads.
        key_head_dim, value_head_dim: widths of a head.
        taps: tokens that the convolution of queries, keys and values sums.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    taps: int

    @classmethod
    def from_config(cls, config: Config) -> LinearAttention | None:
        """Read the sizes of a configuration; None if no layer has linear attention."""
        if config.get("linear_num_key_heads") is None:
            return None
        if config.get("layer_types"):
            layers = [kind == LINEAR for kind in config["layer_types"]]
        else:
            interval = config.get("full_attention_interval") or 4
            layers = [(layer + 1) % interval > 0 for layer in range(config["num_hidden_layers"])]
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        return cls(tuple(layers), *(config[f"linear_{name}"] for name in names)) if any(layers) else None

    @property
    def key_width(self) -> int:
        """Return the width of all key heads."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Return the width of all value heads."""
        return self.value_heads * self.value_head_dim

    @property
    def state_size(self) -> int:
        """Return the elements of a layer's state: a [key width, value width] matrix for each value head."""
        return self.value_heads * self.key_head_dim * self.value_head_dim


@dataclass(frozen=True)
class StateSpace:
    """Sizes of Mamba-2's state spaces (Dao and Gu, arXiv:2405.21060).

    Attributes:
        heads, head_dim: heads of inputs and outputs, and the width of one.
        groups, state: groups of consecutive heads that share B and C, and the width of these.
        taps: tokens that the convolution of inputs, B and C sums.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int

    @classmethod
    def from_config(cls, config: Config) -> StateSpace | None:
        """Read the sizes of a normalised configuration; None if no layer is a state space."""
        if config.get("mamba_num_heads") is None or LINEAR not in (config.get("layer_types") or []):
            return None
        names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
        return cls(*(config[name] for name in names))

    @property
    def width(self) -> int:
        """Return the width of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: inputs, B and C."""
        return self.width + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Return the width of the input projection's output: the gate, the convolution's channels and the steps."""
        return self.width + self.channels + self.heads

    @property
    def state_size(self) -> int:
        """Return the elements of a layer's state."""
        return self.width * self.state


SINGLE_MIXERS = ("mlp", "moe")
"""Entries of ``layer_types`` of models whose layers have one thing each, that is attention or an MLP, not both."""


def single_mixers(config: Config) -> tuple[str, ...]:
    """Return the kind of each layer of a model whose layers have one thing each; empty for other models."""
    kinds = tuple(config.get("layer_types") or ())
    return kinds if set(kinds) & set(SINGLE_MIXERS) else ()


def text_config(config: Config) -> Config:
    """Return the configuration of the language model: ``text_config`` of a multimodal one, else ``config``."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def expert_count(config: Config) -> int:
    """Return the number of routed experts of a layer; 0 for a dense model."""
    return next((config[name] for name in EXPERT_COUNTS if config.get(name)), 0)


def expert_layers(config: Config) -> list[bool] | None:
    """Return True for each layer with experts; None for a dense model, or if no key states it.

    Four spellings: ``mlp_layer_types`` (transformers 5), ``first_k_dense_replace`` (DeepSeek), ``moe_layer_start_index`` with
    ``moe_layer_end_index`` and ``moe_layer_interval`` (ERNIE), and ``decoder_sparse_step`` with ``mlp_only_layers`` (Qwen).
    """
    if not expert_count(config):
        return None
    total = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types")
    if kinds:
        return [kind != "dense" for kind in kinds]
    first = config.get("first_k_dense_replace")
    if first is not None:
        return [layer >= first for layer in range(total)]
    start = config.get("moe_layer_start_index")
    if start is not None:
        end, interval = config.get("moe_layer_end_index"), config.get("moe_layer_interval") or 1
        last = total - 1 if end in (None, -1) else end
        return [start <= layer <= last and (layer + 1) % interval == 0 for layer in range(total)]
    step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers")
    if step is None and dense is None:
        return None
    return [layer not in (dense or []) and (layer + 1) % (step or 1) == 0 for layer in range(total)]
