"""Shape and weights of the model in a checkpoint directory, before anything is built. Imports neither torch nor Megatron."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.config.rules import Rule, enforce
from megascend.errors import CheckpointError, ConfigError
from megascend.models import (
    Architecture,
    ImageLayout,
    architecture_named,
    architecture_of,
    expert_layers,
    text_config,
)
from megascend.models.base import ATTENTION_LAYERS, LINEAR, LinearAttention, StateSpace, single_mixers
from megascend.models.checkpoint_files import scalar_head as scalar_heads
from megascend.models.checkpoint_files.exported import OUTPUT, derived_tensors, prediction_tensors
from megascend.models.checkpoint_files.files import FLOATS, TensorHeader, read_config, tensor_headers
from megascend.models.checkpoint_files.quantised import QuantisedHeader, dequantised_headers, read_tensor
from megascend.models.checkpoint_files.scalar_head import HeadKind, ScalarHead
from megascend.runtime.topology.model_shape import ModelShape
from weightwire.manifest import LAYER

if TYPE_CHECKING:
    from megascend.config import Mtp, Precision, VisionTower

EMBEDDINGS = ("embed_tokens.weight", "backbone.embeddings.weight")
"""Ends of names of embeddings."""
COMPARED_BYTES = 2**24
"""Bytes of two files that are compared at a time."""


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read a ``config.json``, or its ``text_config`` (names of Qwen2/3, Llama, Mixtral, Qwen3-MoE, DeepSeek and GPT-2)."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ConfigError(f"the model config's text_config must be an object, found {text!r:.60}")
    # Multimodal models: the decoder's sizes are in text_config, but tie_word_embeddings may be at the top level, where
    # transformers reads it; its own default in a text_config that it saves may differ (Qwen3-VL-MoE).
    if text is not None:
        outer = config.get("tie_word_embeddings")
        config = dict(text) if outer is None else {**text, "tie_word_embeddings": outer}
    architecture = architecture_of(config)
    config = architecture.normalise(config)
    num_heads = required_size(config, "num_attention_heads", "n_head", "num_heads")
    has_latent_attention = config.get("kv_lora_rank") is not None  # MLA: K and V are made per head
    num_experts = optional_size(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    ffn = optional_size(config, "intermediate_size", "ffn_hidden_size", "n_inner")
    hidden_size = required_size(config, "hidden_size", "n_embd", "d_model")
    moe_ffn = optional_size(config, "moe_intermediate_size", "expert_intermediate_size") or ffn
    shared = optional_size(config, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared_count = optional_size(config, "n_shared_experts", "num_shared_experts")
    # DeepSeek counts its shared experts, which are computed as one wide MLP; Qwen gives that MLP's width.
    if shared is None and shared_count and moe_ffn:
        shared = shared_count * moe_ffn
    if num_experts is None and ffn is None:
        if "n_embd" not in config:
            raise ConfigError(f"the model config ({config.get('model_type')}) has no intermediate_size")
        ffn = 4 * hidden_size  # GPT-2's default
    return ModelShape(
        hidden_size=hidden_size,
        num_layers=required_size(config, "num_hidden_layers", "n_layer", "num_layers"),
        num_heads=num_heads,
        # Latent attention has no groups: keys and values are expanded from the latent for every head.
        num_query_groups=num_heads
        if has_latent_attention
        else optional_size(config, "num_key_value_heads", "num_query_groups", "multi_query_group_num") or num_heads,
        vocab_size=required_size(config, "vocab_size", "padded_vocab_size"),
        # intermediate_size of a model whose layers all have experts is a left-over that no tensor has.
        ffn_hidden_size=ffn if num_experts is None or _has_dense_layers(config) else None,
        num_experts=num_experts,
        moe_ffn_hidden_size=moe_ffn if num_experts is not None else None,
        shared_expert_ffn_hidden_size=shared if num_experts is not None else None,
        max_position=optional_size(config, "max_position_embeddings", "n_positions", "seq_length"),
        tied=bool(config.get("tie_word_embeddings", False)),
        expert_bias=num_experts is not None and architecture.biases == "all",
    )


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """Check whether some layers of an MoE model have a dense MLP: DeepSeek's first layers, or Qwen's every other one."""
    layers = expert_layers(config)
    return layers is not None and not all(layers)


def optional_size(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these keys that is set; zero counts as not set (configs write ``num_experts: 0``)."""
    for name in names:
        value = config.get(name)
        if value is None or value == 0:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"the model config's {name} must be a positive whole number, found {value!r:.60}")
        return value
    return None


def required_size(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these keys that is set, as :func:`optional_size`; raise ConfigError if none is."""
    value = optional_size(config, *names)
    if value is None:
        kind = config.get("model_type", "unknown type")
        raise ConfigError(f"the model config ({kind}) has none of {', '.join(names)}")
    return value


@dataclass(frozen=True)
class ModelInfo:
    """Shape and weights of a checkpoint.

    Attributes:
        shape: sizes that the topology has to divide; ``shape.tied`` is what engines build, even if ``config.json`` differs.
        tensors: headers of all weights in the checkpoint that the model has; a head for multi-token prediction is one of its
            layers only if it is trained, and a tied model has no output layer of its own.
        parameter_count: elements of these weights.
        active_matmul_parameters: elements of the weights that multiply each token (embedding look-up excluded, the
            output projection included, of the experts only those a token is sent to).
        scalar_head: head that replaces the output layer; None for a causal language model.
        extra: headers of weights that the model does not have and an export copies.
        mtp: treatment of heads for multi-token prediction: ``train``, ``keep`` or ``drop``.
        copies: weights of the trained head that repeat one of :attr:`tensors`: the name of the repeated one by the head's. The
            model has one of the two, and an export writes it under both names.
        architecture: the declaration of its family.
        linear: sizes of linear attention; None if all layers have softmax attention.
        state_space: sizes of state spaces; None if no layer is one.
        mixers: kind of each layer of a model whose layers have one thing each; empty for other models.
        image_layout: sizes of its images; None for a model of text.
        transposed_experts: fused experts in the checkpoint are [experts, in, out].
    """

    shape: ModelShape
    tensors: Mapping[str, TensorHeader]
    parameter_count: int
    active_matmul_parameters: int
    attention_width: int
    scalar_head: ScalarHead | None = None
    extra: Mapping[str, TensorHeader] = field(default_factory=dict)
    mtp: Mtp = "keep"
    copies: Mapping[str, str] = field(default_factory=dict)
    architecture: Architecture = field(default_factory=lambda: architecture_named(""))
    linear: LinearAttention | None = None
    state_space: StateSpace | None = None
    mixers: tuple[str, ...] = ()
    image_layout: ImageLayout | None = None
    transposed_experts: bool = False

    @property
    def quantised(self) -> str | None:
        """Return how the checkpoint stores quantised weights, or None."""
        headers = (header for header in self.tensors.values() if isinstance(header, QuantisedHeader))
        return next((header.method for header in headers), None)

    def rounded_tensors(self, precision: Precision) -> set[str]:
        """Return the names of the weights that ``precision`` rounds: those whose main parameters are read from the files."""
        stored = {"bf16": "BF16", "fp16": "F16"}.get(precision)
        floats = {name: header.dtype for name, header in self.tensors.items() if header.dtype in FLOATS and header.file}
        return set() if stored is None else {name for name, dtype in floats.items() if dtype != stored}

    @property
    def tensor_names(self) -> list[str]:
        """Return the names of :attr:`tensors`."""
        return list(self.tensors)

    @property
    def export_tensors(self) -> dict[str, TensorHeader]:
        """Return the headers of all weights that an export writes from the model: :attr:`tensors` and :attr:`copies`."""
        return {**self.tensors, **{name: self.tensors[original] for name, original in self.copies.items()}}

    @property
    def attention_layers(self) -> int:
        """Return the number of layers that compute softmax attention, a trained head for multi-token prediction included."""
        if self.mixers:
            return sum(kind in ATTENTION_LAYERS for kind in self.mixers)
        linear = 0 if self.linear is None else sum(self.linear.layers)
        return self.shape.num_layers - linear + (self.mtp == "train")

    def flops_per_token(self, length: int, frozen: bool = False) -> float:
        """Return the model FLOPs of forward and backward for one token of a causal sequence of ``length`` tokens.

        6 per matmul parameter (Kaplan et al. 2020, section 2.1): 2 forward, 2 for the gradient of its input, 2 for its own, which
        ``frozen`` weights lack. For attention 12 * layers * heads * head dim * length / 2, the half because of the causal mask
        (PaLM, appendix B). For linear attention, whose cost does not depend on the length, 18 per element of the state: the key's
        product with it, the correction that is written, and the query's product; for a state space 12, it has no such correction.
        Recomputation and adapters are not counted.
        """
        # Frozen weights still pass the gradient on to their input.
        weight_flops = (4 if frozen else 6) * self.active_matmul_parameters
        state_flops = 0 if self.linear is None else 18 * sum(self.linear.layers) * self.linear.state_size
        if self.state_space is not None:
            state_flops += 12 * self.mixers.count(LINEAR) * self.state_space.state_size
        return weight_flops + state_flops + 6 * self.attention_layers * self.attention_width * length


NON_TARGET_ENDS = ("gate", "router", "_bias", "conv1d")
"""Ends of names in a layer that are no linear layers for an adapter: routers, biases of fused experts, and convolutions."""


def linear_layers(info: ModelInfo, tower: VisionTower = "frozen") -> list[str]:
    """Return names in transformers' model of the layers that a LoRA adapter may target, from the headers of its weights.

    Experts have the names under which transformers fuses them; routers are left out, tied embedding and output layer too.

    Args:
        tower: ``train`` if adapters may act on the vision tower of a model that takes images.
    """
    images = info.architecture.images
    untied, non_target_ends = OUTPUT in info.tensors, NON_TARGET_ENDS + info.architecture.without_adapters
    names: dict[str, None] = {}
    for weight, header in info.tensors.items():
        name = info.architecture.model_name(weight).removesuffix(".weight")
        # transformers 5 fuses experts into one tensor; adapters are named after it even if the files have separate ones.
        name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        name = re.sub(r"\.experts\.(gate|up)_proj$", ".experts.gate_up_proj", name)
        is_matrix = len(header.shape) > 1
        is_target = ".layers." in name and is_matrix and not name.endswith(non_target_ends)
        if images is not None and name.startswith(images.tower):
            is_target = tower == "train" and is_matrix and name.removeprefix(images.tower) not in images.not_linear
        if is_target or (untied and name.split(".")[-1] in ("embed_tokens", "lm_head")):
            names[name] = None
    return list(names)


def inspect_checkpoint(model_dir: Path, head: HeadKind = "lm", mtp: Mtp = "keep") -> ModelInfo:
    """Read ``config.json`` and the headers of the weight files: the model that every engine trains, with ``head`` at its end.

    Args:
        mtp: treatment of heads for multi-token prediction; those that are not trained are no part of the model.

    Raises:
        CheckpointError: a file is missing, damaged, or does not fit the others.
        ConfigError: ``mtp`` is ``train``, and the model has no head that can be trained.
    """
    config = read_config(model_dir)
    try:
        architecture = architecture_of(config)
        text = architecture.normalise(text_config(config))
        shape = shape_of(config)
        topk = optional_size(text, "num_experts_per_tok") or 0
        # Read for their errors alone: here a wrong value still has the name of the file.
        for name in ("head_dim", "num_nextn_predict_layers"):
            optional_size(text, name)
        image_layout = architecture.image_layout(config)
    except ConfigError as error:
        raise CheckpointError(f"{Path(model_dir) / 'config.json'}: {error}") from None
    tensors = dequantised_headers(tensor_headers(model_dir), config, Path(model_dir))
    check_vocabulary(shape, {name: header.shape for name, header in tensors.items()})
    copied = [name for name in tensors if architecture.copies(name, text)]
    extra = {name: tensors.pop(name) for name in (*derived_tensors(tensors), *copied)}
    heads = {name: tensors.pop(name) for name in prediction_tensors(config, tensors)}
    if mtp == "train":
        enforce(TRAINED_HEAD, PredictionHeads(architecture, text, shape.num_layers, head, tuple(heads)))
    if mtp == "keep":
        extra |= heads
    scalar_head = scalar_heads.find(head, config, tensors, model_dir)
    tied = scalar_head is None and is_tied(config, shape, tensors, Path(model_dir))
    if tied:
        tensors.pop(OUTPUT, None)
    tensors = scalar_heads.with_head(tensors, scalar_head, config)
    copies: dict[str, str] = {}
    if mtp == "train":
        # Left out of the tensors, or they would be counted, built and trained twice.
        copies = shared_weights(heads, tensors, shape.num_layers)
        tensors |= {name: header for name, header in heads.items() if name not in copies}
    shapes = {name: header.shape for name, header in tensors.items()}
    shape = replace(shape, tied=tied, prediction_head=mtp == "train")
    return ModelInfo(
        shape=shape,
        tensors=tensors,
        parameter_count=sum(math.prod(dims) for dims in shapes.values()),
        active_matmul_parameters=_active_matmul_parameters(architecture, shape, shapes, topk),
        attention_width=architecture.attention_width(text),
        scalar_head=scalar_head,
        extra=extra,
        mtp=mtp,
        linear=LinearAttention.from_config(text),
        state_space=StateSpace.from_config(text),
        mixers=single_mixers(text),
        copies=copies,
        architecture=architecture,
        image_layout=image_layout,
        transposed_experts=architecture.transposes_experts(shapes, text),
    )


def _active_matmul_parameters(
    architecture: Architecture, shape: ModelShape, shapes: Mapping[str, tuple[int, ...]], topk: int
) -> int:
    """Count the elements of the weights that multiply each token; see :class:`ModelInfo`.

    Args:
        shapes: shapes of the model's weights.
        topk: routed experts that a token is sent to.
    """
    active = 0.0
    for name, dims in shapes.items():
        size = math.prod(dims)
        # A tied embedding counts, since it is also the output projection.
        if len(dims) < 2 or (name.endswith(EMBEDDINGS) and not shape.tied):
            continue
        if architecture.images is not None and name.startswith(architecture.images.tower):
            continue  # multiplies patches, not tokens
        # A token passes through topk of the routed experts; shared experts have other names.
        active += size * topk / shape.num_experts if ".experts." in name and shape.num_experts else size
    if shape.prediction_head:  # the output layer projects the head's hidden states, too
        active += shape.vocab_size * shape.hidden_size
    return int(active)


@dataclass(frozen=True)
class PredictionHeads:
    """Names of a checkpoint's tensors of heads for multi-token prediction, and its normalised configuration and last layer."""

    architecture: Architecture
    config: Mapping[str, Any]
    layers: int
    head: HeadKind
    tensors: tuple[str, ...]
    mtp: str = "train"

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    @property
    def model(self) -> str:
        """Return the type of the model."""
        return self.architecture.model_type

    @property
    def is_one(self) -> bool:
        """Return True if there is one head, stored where the architecture has it."""
        numbers = {int(match[1]) for name in self.tensors if (match := LAYER.search(name))}
        if self.architecture.prediction_layers != "model.layers":
            # Counted by the tensors: config.json need not state the number of such heads.
            return len(numbers) == 1
        # In this form a head is stored as the layer after the model's last.
        return self.config.get("num_nextn_predict_layers") == 1 and numbers == {self.layers}


TRAINED_HEAD: tuple[Rule[PredictionHeads], ...] = (
    Rule("mtp with head={head}: a scalar head predicts no tokens; set keep", lambda s: s.head != "lm"),
    Rule("mtp with {model}: its checkpoint has no head for it; set keep", lambda s: not s.tensors),
    Rule("mtp with {model}: its heads are not built here; set keep", lambda s: not s.architecture.prediction_head),
    Rule("mtp with {model}: its checkpoint has another number of heads than one; set keep", lambda s: not s.is_one),
    Rule(
        "mtp with {model}: its head's own embedding or output layer cannot be trained; set keep",
        lambda s: (
            s.architecture.prediction_layers != "model.layers"
            and (
                bool(s.config.get("mtp_use_dedicated_embeddings"))
                or any(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in s.tensors)
            )
        ),
    ),
    Rule(
        "mtp with {model}: its head has softmax attention, and is built like the last layer, which has another; set keep",
        lambda s: (
            s.architecture.prediction_layers != "model.layers"
            and (s.config.get("layer_types") or ["full_attention"])[-1] != "full_attention"
        ),
    ),
)
"""Heads for multi-token prediction that are not trained."""


def shared_weights(heads: Iterable[str], tensors: Iterable[str], layer: int) -> dict[str, str]:
    """Return the weights of a head for multi-token prediction that repeat the model's embedding and output layer.

    Args:
        heads: names of the head's tensors.
        tensors: names of the model's.
        layer: index of the head among the layers.
    """
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    output = next((name for name in tensors if name == OUTPUT), embedding)
    ends = {
        f".layers.{layer}.embed_tokens.weight": embedding,
        f".layers.{layer}.shared_head.head.weight": output,
    }
    return {name: original for name in heads for end, original in ends.items() if name.endswith(end)}


def check_vocabulary(sizes: ModelShape, shapes: dict[str, tuple[int, ...]]) -> None:
    """Compare the vocabulary size with the configuration: mcore-bridge silently pads a short embedding with zeros."""
    expected = (sizes.vocab_size, sizes.hidden_size)
    for name, shape in shapes.items():
        if name.endswith((*EMBEDDINGS, "lm_head.weight")) and len(shape) == 2 and shape != expected:
            raise CheckpointError(
                f"{name} has shape {shape}, config.json says {expected}: they are of different models"
            )


def is_tied(config: Mapping[str, Any], shape: ModelShape, tensors: Mapping[str, TensorHeader], model_dir: Path) -> bool:
    """Decide whether a causal language model's output layer is its embedding, as transformers 5 decides it.

    An output layer in the files that differs from the embedding is a layer of its own, even where ``config.json`` says
    ``tie_word_embeddings: true``; one that is equal is tied if the configuration says so.
    """
    tables = [
        name
        for name, header in tensors.items()
        if header.shape == (shape.vocab_size, shape.hidden_size) and not LAYER.search(name)
    ]
    if OUTPUT not in tables:
        tied = _declares_tied(config, model_dir)
        if not tied and len(tables) == 1:
            raise CheckpointError(
                f"{model_dir}: config.json says tie_word_embeddings: false, and no file holds {OUTPUT}: set it to true if the "
                "embedding is the output layer, else fetch the tensor"
            )
        return tied
    embeddings = sorted(
        (name for name in tables if name != OUTPUT), key=lambda name: ".embed_tokens." not in f".{name}"
    )
    if not embeddings:
        raise CheckpointError(
            f"{model_dir} holds {OUTPUT} and no embedding (model.embed_tokens.weight): store the tensor under the name of the "
            "embedding, or fetch what is missing"
        )
    return _declares_tied(config, model_dir) and equal_tensors(
        tensors[embeddings[0]], tensors[OUTPUT], embeddings[0], OUTPUT
    )


def _declares_tied(config: Mapping[str, Any], model_dir: Path) -> bool:
    """Return ``tie_word_embeddings`` of a configuration, or its architecture's default."""
    for part in (config, config.get("text_config") or {}):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    from transformers import CONFIG_MAPPING, AutoConfig

    from megascend.models.checkpoint_files.architectures import make_known_to_transformers

    make_known_to_transformers(model_dir)
    if config.get("model_type") not in CONFIG_MAPPING and "auto_map" not in config:
        return False  # an architecture of a plug-in's engine: only its files describe it
    try:
        full = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # its validators raise classes without a common base
        raise CheckpointError(f"model: transformers cannot read {model_dir / 'config.json'}: {error}") from error
    return bool(getattr(full.get_text_config(), "tie_word_embeddings", False))


def equal_tensors(a: TensorHeader, b: TensorHeader, a_name: str, b_name: str) -> bool:
    """Compare two tensors of a checkpoint by their values; bytes are compared where dtypes are the same."""
    assert a.file is not None
    assert b.file is not None
    try:
        if a.shape != b.shape:
            return False
        # In float64, which holds every value of the smaller types exactly.
        if a.dtype != b.dtype:
            files: dict[Path, Any] = {}
            first, second = read_tensor(a_name, a, files), read_tensor(b_name, b, files)
            return bool((first.double() == second.double()).all())
        # Part of the cache key: a file that is written again has to be compared again.
        modified = tuple(path.stat().st_mtime_ns for path in (a.file, b.file))
        return _equal_bytes(a.file, a.span, b.file, b.span, modified)
    except OSError as error:
        raise CheckpointError(f"{a.file.parent}: {a_name} or {b_name} cannot be read: {error}") from None


@lru_cache(maxsize=8)  # a run reads its checkpoint's headers several times before it starts
def _equal_bytes(a: Path, a_span: tuple[int, int], b: Path, b_span: tuple[int, int], modified: tuple[int, ...]) -> bool:
    with a.open("rb") as first, b.open("rb") as second:
        first.seek(a_span[0])
        second.seek(b_span[0])
        remaining = a_span[1] - a_span[0]
        while remaining > 0:
            count = min(COMPARED_BYTES, remaining)
            if first.read(count) != second.read(count):
                return False
            remaining -= count
    return True
