"""Settings that an engine does not support, as rules: one table each. Imports neither Megatron-Core nor mcore-bridge.

They are evaluated before ranks communicate, except for :data:`MEGATRON_MODEL`: it reads mcore-bridge's configuration, which needs
process groups (a dry run has fake ones), before layers are built. Rules of every engine are in ``context.py``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import Version

from megascend.config import Recompute
from megascend.config.rules import Rule
from megascend.engines.base import longest_sample
from megascend.engines.context import UNQUANTISED, Setup
from megascend.training.lora.quantised_weights import BLOCKS
from megascend.training.lora.target_modules import EMBEDDING, OUTPUT, matches

MIN_MTP_MEGATRON = Version("0.16")
"""Oldest megatron-core on which a trained head for multi-token prediction is compared with a plain one."""
ROPE_OF_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding that depend on the sequence length, which padding to a captured shape changes."""


def _trains_head(setup: Setup) -> bool:
    return setup.spec.mtp == "train"


def _is_captured(setup: Setup) -> bool:
    return setup.spec.batching.cuda_graphs is not None


def _is_quantised(setup: Setup) -> bool:
    return setup.spec.base_weights != "unquantised"


def _recomputes(setup: Setup, *modules: str) -> bool:
    return setup.spec.recompute.granularity == "selective" and not {*modules}.isdisjoint(setup.spec.recompute.modules)


def _targets(setup: Setup, *names: str) -> bool:
    adapters = setup.spec.adapters
    return adapters is not None and any(matches(name, adapters.targets) for name in names)


MEGATRON: tuple[Rule[Setup], ...] = (
    # --- heads for multi-token prediction ---
    Rule(
        "mtp with adapters: the head belongs to the base model, which is frozen; set keep",
        lambda s: _trains_head(s) and s.frozen,
    ),
    Rule(
        "mtp with batching.cuda_graphs: captured steps have one output layer and no head; leave cuda_graphs out, "
        "or set keep",
        lambda s: _trains_head(s) and _is_captured(s),
    ),
    Rule(
        f"mtp with a megatron-core older than {MIN_MTP_MEGATRON}: its head is not compared with a plain one; "
        "install a later one, or set keep",
        lambda s: _trains_head(s) and Version(metadata.version("megatron-core")) < MIN_MTP_MEGATRON,
    ),
    Rule(
        "mtp with {model}: heads of models that take images are not tested; set keep",
        lambda s: _trains_head(s) and s.info.image_layout is not None,
    ),
    # --- experts ---
    Rule(
        "moe.aux_loss with adapters: an adapter's gradients would depend on the others' samples; set none",
        lambda s: s.spec.moe.aux_loss != "none" and s.frozen,
    ),
    Rule(
        "moe.aux_loss with {model}: it has no experts to balance; set none",
        lambda s: s.spec.moe.aux_loss != "none" and not s.info.shape.is_moe,
    ),
    Rule(
        "moe.aux_loss with parallel.pipeline={topology.pipeline}: the formula pools the routers of all layers, "
        "and a stage has only its own; set megatron",
        lambda s: s.spec.moe.aux_loss == "transformers" and s.topology.pipeline > 1,
    ),
    Rule(
        "moe.bias_update_rate with adapters: the base model, routers included, is frozen; set 0",
        lambda s: s.spec.moe.bias_update_rate > 0 and s.frozen,
    ),
    Rule(
        "recompute.modules with {model}: it has no such modules; leave out those of experts or latent attention "
        "that it lacks",
        lambda s: (
            (_recomputes(s, "moe", "moe_act") and not s.info.shape.is_moe)
            or (_recomputes(s, "shared_experts") and not s.info.shape.shared_expert_ffn_hidden_size)
            or (_recomputes(s, "mla_up_proj") and not any("kv_b_proj" in name for name in s.info.tensors))
        ),
    ),
    Rule(
        "parallel.context with {model}: its images are not divided over context parallel ranks; set 1",
        lambda s: s.info.image_layout is not None and s.topology.context > 1,
    ),
    Rule(
        f"adapters.targets with {{model}}: features of images replace those of {EMBEDDING}; leave it out, or use "
        "engine fsdp",
        lambda s: s.info.image_layout is not None and _targets(s, EMBEDDING),
    ),
    Rule(
        "base_weights with {platform.name}: quantised weights are not supported on NPUs; set unquantised",
        lambda s: _is_quantised(s) and s.platform.name == "npu",
    ),
    Rule(
        "base_weights with {model}: linear attention and state spaces do not support it; set unquantised",
        lambda s: _is_quantised(s) and bool(s.info.linear or s.info.state_space),
    ),
    Rule(
        "base_weights with batching.cuda_graphs: they are not supported together; leave one of them out",
        lambda s: _is_quantised(s) and _is_captured(s),
    ),
    # --- CUDA graphs ---
    Rule(
        "batching.cuda_graphs with {platform.name}: graphs need a CUDA device; leave it out",
        lambda s: _is_captured(s) and s.platform.device_type != "cuda",
    ),
    Rule(
        "batching.cuda_graphs with {model}: captured steps do not support scalar heads and images; leave it out",
        lambda s: _is_captured(s) and bool(s.info.scalar_head or s.info.image_layout),
    ),
    Rule(
        "batching.cuda_graphs with a model on several GPUs: graphs need the whole model on every GPU; leave it "
        "out, or set all sizes of parallel to 1",
        lambda s: (
            _is_captured(s) and max(s.topology.tensor, s.topology.pipeline, s.topology.context, s.topology.expert) > 1
        ),
    ),
    Rule(
        "precision with batching.cuda_graphs: captured steps do not support it; set bf16, or leave cuda_graphs out",
        lambda s: _is_captured(s) and s.spec.precision == "fp16",
    ),
    Rule(
        "recompute.granularity with batching.cuda_graphs: captured steps do not recompute; set none, or leave "
        "cuda_graphs out",
        lambda s: _is_captured(s) and s.spec.recompute.granularity != "none",
    ),
    Rule(
        "batching.cuda_graphs with {model}: loads of trained experts would count padding (adapters on them are "
        "supported); leave it out",
        lambda s: _is_captured(s) and s.info.shape.is_moe and not s.frozen,
    ),
    Rule(
        "optimizer.overlap_grad_reduce with batching.cuda_graphs: the host starts the reductions; set false, or "
        "leave cuda_graphs out",
        lambda s: _is_captured(s) and not s.frozen and s.spec.optimizer.overlap_grad_reduce,
    ),
    Rule(
        f"adapters.targets with batching.cuda_graphs: captured steps do not support adapters on {OUTPUT} and "
        f"{EMBEDDING}; leave these or cuda_graphs out",
        lambda s: _is_captured(s) and _targets(s, EMBEDDING, OUTPUT),
    ),
)


@dataclass(frozen=True)
class MegatronSetup(Setup):
    """A setup with the model as Megatron will build it.

    Attributes:
        config: mcore-bridge's ModelConfig.
        grouped: experts, if any, are computed without the host.
    """

    config: Any
    grouped: bool

    @property
    def tower_layers(self) -> int:
        """Return the number of layers that vision features are added to, beside the embedding."""
        return len(getattr(self.config.hf_config.vision_config, "deepstack_visual_indexes", None) or [])

    @property
    def rope_type(self) -> str | None:
        """Return the kind of scaling of rotary embeddings."""
        rope = self.config.rope_scaling or {}
        return rope.get("rope_type", rope.get("type"))

    @property
    def rope_limit(self) -> int:
        """Return the tokens up to which rotary frequencies do not depend on the longest sample of a micro batch."""
        if self.rope_type == "longrope":
            limit = self.config.original_max_position_embeddings
        else:
            limit = self.config.max_position_embeddings if self.rope_type == "dynamic" else None
        return limit or sys.maxsize

    @property
    def rotates_by_kind(self) -> bool:
        """Check whether kinds of layers have rotary embeddings of their own, as Gemma 4's."""
        return any(isinstance(section, dict) for section in (self.config.rope_scaling or {}).values())

    @property
    def dropped_window(self) -> int:
        """Return the model's sliding window if mcore-bridge leaves it out, so that the model would attend to all tokens."""
        text = self.config.hf_config.get_text_config()
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"]
        slides = getattr(text, "use_sliding_window", True) and "sliding_attention" in kinds
        window = getattr(text, "sliding_window", None)
        if window is None or not slides or getattr(self.config, "window_size", None) is not None:
            return sys.maxsize
        return window

    @property
    def cut_blocks(self) -> list[str]:
        """Describe the layers of which tensor parallel ranks cut a block of values that share a scale."""
        config, topology, block = self.config, self.topology, BLOCKS[self.spec.base_weights]
        head = config.v_head_dim if config.multi_latent_attention else config.kv_channels
        inputs = [("attention's output", config.num_attention_heads * head, "tensor")]
        if config.ffn_hidden_size:
            inputs.append(("an MLP", config.ffn_hidden_size, "tensor"))
        if config.num_moe_experts:
            inputs.append(("an expert", config.moe_ffn_hidden_size, "expert_tensor"))
            if shared := config.moe_shared_expert_intermediate_size:
                inputs.append(("shared experts", shared, "tensor"))
        sizes = [(name, size, axis, getattr(topology, axis)) for name, size, axis in inputs]
        return [
            f"parallel.{axis}={ranks} and {size} features of {name}"
            for name, size, axis, ranks in sizes
            if ranks > 1 and size // ranks % block
        ]


MEGATRON_MODEL: tuple[Rule[MegatronSetup], ...] = (
    Rule(
        "moe.aux_loss with {model}: transformers computes none for it (its configuration has no "
        "router_aux_loss_coef); set megatron or none",
        lambda s: s.spec.moe.aux_loss == "transformers" and not hasattr(s.config.hf_config, "router_aux_loss_coef"),
    ),
    Rule(
        "moe.bias_update_rate with {model}: its routers have no correction bias; set 0",
        lambda s: s.spec.moe.bias_update_rate > 0 and not s.config.moe_router_enable_expert_bias,
    ),
    Rule(
        "parallel.pipeline with {model}: it adds vision features to {tower_layers} layers, and the first stage "
        "has {topology.chunk_layers[0]}; lower parallel.pipeline or parallel.virtual_pipeline",
        # Pipeline stages pass on hidden states only: these features have to be added on the stage that has the tower.
        lambda s: s.info.image_layout is not None and s.tower_layers > s.topology.chunk_layers[0],
    ),
    Rule(
        "base_weights with {cut_blocks[0]}: ranks would cut blocks of values that share a scale; lower it",
        lambda s: _is_quantised(s) and bool(s.cut_blocks),
    ),
    Rule(
        "batching.cuda_graphs with moe.experts={spec.moe.experts}: upstream's experts wait for their loads; set "
        "moe.experts: grouped",
        lambda s: _is_captured(s) and bool(s.config.num_moe_experts) and not s.grouped,
    ),
    Rule(
        "batching.cuda_graphs with {model}: captured steps do not support the model's own dropout; leave it out",
        lambda s: _is_captured(s) and max(s.config.hidden_dropout, s.config.attention_dropout) > 0,
    ),
    Rule(
        "batching.cuda_graphs with {model}: attention with sinks was not tested in captured steps; leave it out",
        lambda s: _is_captured(s) and s.config.softmax_type != "vanilla",
    ),
    Rule(
        "batching.cuda_graphs with rope_type {rope_type}: its frequencies depend on the length, which graphs "
        "pad; leave it out",
        lambda s: _is_captured(s) and s.rope_type in ROPE_OF_LENGTH,
    ),
    *(
        Rule(
            f"{setting} with {what}: kinds of layers that have heads of their own are not tested; {remedy}",
            lambda s, when=when: s.rotates_by_kind and when(s),
        )
        for setting, what, when, remedy in (
            ("batching.cuda_graphs", "{model}", _is_captured, "leave it out"),
            ("engine", "{platform.name}", lambda s: s.platform.name == "npu", "use fsdp"),
        )
    ),
    Rule(
        "batching.max_length with {model}: mcore-bridge leaves out its sliding_window of {dropped_window} "
        "tokens; set {dropped_window} or less",
        lambda s: longest_sample(s.spec, s.info) > s.dropped_window,
    ),
    Rule(
        "batching.max_length with rope_type {rope_type}: above {rope_limit} tokens positions depend on the micro "
        "batch, not on the sample; set {rope_limit}",
        lambda s: longest_sample(s.spec, s.info) > s.rope_limit,
    ),
    Rule(
        "batching.packing with {model}: packed samples with attention sinks have a kernel in 16 bits, without "
        "parallel.context and dropout; set false",
        lambda s: (
            s.spec.batching.packing
            and s.platform.has_transformer_engine_kernels
            and s.config.softmax_type != "vanilla"
            and (s.spec.precision == "fp32" or s.topology.context > 1 or s.config.attention_dropout > 0)
        ),
    ),
    Rule(
        "batching.packing with {model}: a pipeline loses its choice of keys (indexer_types: shared) in "
        "recomputing padded batches; set true",
        # The choice is stored with the boundaries of packed samples, an object of each micro batch. Padded ones have none.
        lambda s: (
            not s.spec.batching.packing
            and getattr(s.config, "dsa_indexer_topk_freq", 1) > 1
            and s.config.pipeline_model_parallel_size > 1
            and s.config.recompute_granularity is not None
        ),
    ),
    Rule(
        "recompute.granularity with {model}: layers that share keys (num_kv_shared_layers) would lose their gradients; set none",
        # They are stored by a pass without a graph.
        lambda s: (
            s.config.recompute_granularity == "full"
            and bool(getattr(s.config.hf_config.get_text_config(), "num_kv_shared_layers", 0))
        ),
    ),
    Rule(
        "recompute.granularity with sequence parallelism and dropout: recomputation draws other dropout masks; "
        "set none",
        # Of megatron-core 0.16.1, with both dropouts.
        lambda s: (
            s.config.sequence_parallel
            and s.config.tensor_model_parallel_size > 1
            and s.config.recompute_granularity is not None
            and min(s.config.hidden_dropout, s.config.attention_dropout) > 0
        ),
    ),
)


ON_TRANSFORMERS: tuple[Rule[Setup], ...] = (
    UNQUANTISED,
    *(
        Rule(
            f"{setting} with engine {{engine}}: it is a setting of engine megatron; {remedy}",
            lambda s, setting=setting, possible=possible: s[setting] not in possible,
        )
        for setting, possible, remedy in (
            ("mtp", ("keep", "drop"), "set keep"),
            ("optimizer.offload", (False,), "leave it out, or use fsdp.offload of engine fsdp"),
            ("batching.cuda_graphs", (None,), "leave it out"),
            ("moe.bias_update_rate", (0.0,), "set 0"),
            ("moe.experts", ("auto", "upstream"), "leave it out"),
        )
    ),
    Rule(
        "recompute.layers with engine {engine}: it recomputes single layers; set 1",
        lambda s: s.spec.recompute.granularity == "full" and s.spec.recompute.layers != 1,
    ),
    Rule(
        "recompute.modules with engine {engine}: they are Megatron's modules, and it chooses operators "
        "(docs/fsdp.md); leave modules out",
        lambda s: s.spec.recompute.granularity == "selective" and s.spec.recompute.modules != Recompute().modules,
    ),
    *(
        Rule(
            f"fsdp.compile with {what}: {because}; set false",
            lambda s, when=when: s.spec.fsdp.compile and when(s),
        )
        for what, when, because in (
            ("npu", lambda s: s.platform.name == "npu", "torch's inductor has no compiler for NPUs"),
            (
                "parallel.context={topology.context}",
                lambda s: s.topology.context > 1,
                "it is not supported (docs/fsdp.md)",
            ),
            ("adapters", lambda s: s.frozen, "it is not supported (docs/fsdp.md)"),
            (
                "TORCHDYNAMO_DISABLE=1",
                lambda s: os.environ.get("TORCHDYNAMO_DISABLE") == "1",
                "this disables torch.compile",
            ),
        )
    ),
)
"""Of engines fsdp and single, which run transformers' own models."""
