"""Build a model through mcore-bridge: check its architecture, translate its configuration, build its chunks."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
from mcore_bridge.model import GPTModel, get_mcore_model_type, get_model_meta, gpt_model, register
from mcore_bridge.model.rope import get_rope_inv_freq
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from packaging.version import Version
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from megascend.changes import changed, patch
from megascend.config import Precision, Recompute
from megascend.engines.base import DTYPES
from megascend.engines.megatron import scalar_head
from megascend.engines.megatron.quantised_base import QuantisedBase
from megascend.errors import (
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    PlatformError,
    TopologyError,
    VersionError,
)
from megascend.models import Architecture, architecture_named, architecture_of, text_config
from megascend.models.base import OTHER_ENGINE
from megascend.models.checkpoint_files.architectures import transformers_config
from megascend.models.checkpoint_files.files import read_config
from megascend.models.checkpoint_files.scalar_head import ScalarHead
from megascend.models.families.qwen3_vl import undeclared
from megascend.runtime.platforms.base import Platform
from megascend.runtime.topology.topology import Topology
from megascend.surroundings import is_installed

CONTEXT_COMMUNICATION = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
"""Transformer Engine's names for ``Parallel.context_algorithm``; MindSpeed's differ."""

ROUTING = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
}
"""Switches Megatron's own load balancing off for every model; see :mod:`megascend.engines.megatron.routers`."""

_tanh_gelu = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
}
"""Activation functions of gated MLPs by transformers' names (``transformers.activations.ACT2FN``)."""
KERNEL_PACKAGES = {
    "fla": ("flash-linear-attention, versions 0.4 and 0.5,", "megascend[linear-attention]"),
    "mamba_ssm": ("mamba-ssm, from version 2.0 on,", "megascend[state-spaces]"),
    "causal_conv1d": ("causal-conv1d, from version 1.4 on,", "megascend[state-spaces]"),
}
"""Distributions of kernels and extras that install them, by module."""
SILU = ("silu", "swish")
"""The activation that mcore-bridge uses in all gated MLPs, regardless of ``hidden_act``."""


def check_architecture(model_dir: Path) -> None:
    """Check that the model of ``config.json`` can be built, before ranks communicate. Imports its registered modules."""
    raw = read_config(model_dir)
    declared = architecture_of(raw)
    if declared.unreleased is not None:  # transformers may not know it either
        problems = declared.unsupported({**raw, "model_type": declared.model_type})
        raise ConfigError(f"{model_dir}/config.json: {problems[0]}")
    try:
        config = transformers_config(model_dir)
    except ConfigError:
        raise
    except Exception as error:  # its validators raise classes without a common base
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise CheckpointError(
            f"{model_dir}/config.json: transformers {metadata.version('transformers')} cannot read it: {reason}"
        ) from error
    architecture = architecture_named(config.model_type)
    check_megatron_core(architecture)
    _register_with_mcore_bridge(architecture, config.model_type)
    if get_model_meta(get_mcore_model_type(config.model_type)) is None:  # type: ignore[reportArgumentType]
        raise CheckpointError(
            f"{model_dir}/config.json: mcore-bridge {metadata.version('mcore-bridge')} has no model for model_type "
            f"{config.model_type!r}; use engine fsdp, or megascend.register_architecture"
        )
    if problems := architecture.unsupported(text_config(config.to_dict())):
        raise ConfigError(f"{model_dir}/config.json: {problems[0]}")


def check_megatron_core(architecture: Architecture) -> None:
    """Raise VersionError if the installed Megatron-Core is older than the family's layers."""
    oldest, installed = architecture.megatron_core, metadata.version("megatron-core")
    if oldest is None or Version(installed) >= Version(oldest):
        return
    raise VersionError(
        f"{architecture.model_type}: Megatron-Core has its layers from {oldest} on, and {installed} is installed; use Python "
        f"3.12 and pip install 'megascend[stack-{oldest.replace('.', '-')}]'"
    )


def _register_with_mcore_bridge(architecture: Architecture, model_type: str) -> None:
    if architecture.megatron is None:
        return
    is_new = architecture.megatron not in sys.modules
    architecture.import_module(architecture.megatron)
    if is_new or register.get_mcore_model_type(model_type) is None:
        # mcore-bridge builds this table on first use and never updates it; None makes it build the table again.
        patch(register, "model_type_mapping", None, f"rebuilt on next use, to include {model_type}")
    if get_model_meta(get_mcore_model_type(model_type)) is None:  # type: ignore[reportArgumentType]
        raise ConfigError(
            f"architecture {model_type!r}: importing {architecture.megatron!r} has registered no model of that type with "
            "mcore-bridge (mcore_bridge.model.register.register_model)"
        )


def build_config(
    model_dir: Path,
    topology: Topology,
    precision: Precision,
    recompute: Recompute,
    platform: Platform,
    head: ScalarHead | None = None,
    *,
    tied: bool | None = None,
    prediction_head: bool = False,
) -> ModelConfig:
    """Return mcore-bridge's ModelConfig for a Hugging Face checkpoint on a topology. Needs Megatron's process groups.

    Args:
        tied: the output layer is the embedding, overriding ``config.json``; None: as ``config.json`` has it.
        prediction_head: build the head for multi-token prediction.
    """
    hf_config = transformers_config(model_dir)
    listed = listed_settings(hf_config)
    full = text_config(listed.to_dict())
    # transformers refuses to read settings of which single layers have values of their own; families read those.
    listed.get_text_config().per_layer_config = None
    arguments = hf_to_mcore_config(listed) | {"hf_config": hf_config}
    if not arguments.get("hf_model_type"):
        raise CheckpointError(f"{model_dir}/config.json names no model_type")
    text = hf_config.get_text_config()
    arguments.update(activation_arguments(getattr(text, "hidden_act", None), arguments))
    # Gemma's name of it, which mcore-bridge does not read.
    if getattr(text, "hidden_activation", None) is not None:
        arguments |= {"swiglu": True, "gated_linear_unit": False, "activation_func": F.silu}
        arguments |= activation_arguments(text.hidden_activation, {}, "hidden_activation")
    arguments.update(parallel_arguments(topology))
    arguments.update(precision_arguments(precision))
    arguments.update(recompute_arguments(recompute))
    architecture = architecture_of(hf_config.to_dict())
    rope = arguments.get("rope_scaling") or {}
    if original := rope.get("original_max_position_embeddings"):
        arguments["original_max_position_embeddings"] = original
    check_divisible(architecture, full, topology)
    if platform.name != "npu":  # NPUs have other kernels, and their providers refuse such models
        check_packages(architecture)
    arguments.update(architecture.megatron_settings(full))
    # After the checkpoint's own settings, which these override.
    arguments.update(ROUTING)
    if tied is not None:
        arguments["untie_embeddings_and_output_weights"] = not tied
    arguments.update(scalar_head.bridge_arguments(head))
    arguments["mtp_num_layers"] = 1 if prediction_head else None
    if topology.is_uneven:
        arguments["pipeline_model_parallel_layout"] = pipeline_layout(topology, prediction_head=prediction_head)
    if platform.has_transformer_engine_kernels:
        arguments["apply_rope_fusion"] = fuses_rotary(arguments)
    # Megatron frees a stage's output once its send is posted. On a device stream that is safe; a Gloo thread may read the
    # freed memory later (seen with PP2 x VPP2: one run in twenty had other losses).
    arguments["deallocate_pipeline_outputs"] = platform.backend != "gloo"
    # Megatron refuses the fusion for most activations other than SwiGLU.
    arguments["bias_activation_fusion"] = platform.fuses_activations and bool(arguments.get("swiglu", True))
    if arguments.get("multi_latent_attention"):
        if rope:
            # mcore-bridge reads both from every YaRN; without them transformers leaves the scale of scores as it is.
            arguments["rope_scaling"] = {"mscale": 0.0, "mscale_all_dim": 0.0} | rope
        # MindSpeed reads it while the configuration is created, before it can refuse the model by name; mcore-bridge sets this
        # value only when it builds the model.
        ModelConfig.rope_type = "rope"  # type: ignore[attr-defined]
    if not arguments.get("num_moe_experts"):
        # Without experts mcore-bridge's default, True, has no effect, but MindSpeed core_r0.18.0 refuses it.
        arguments["moe_grouped_gemm"] = False
    try:
        with _refusing(hf_config):
            config = ModelConfig(**arguments)
    except NotImplementedError as error:  # MindSpeed's, for features that it does not support with this Megatron-Core
        raise ConfigError(
            f"{model_dir}/config.json: a package that patches Megatron-Core refuses this model: {error}"
        ) from error
    if config.cuda_graph_scope is None:
        # From 0.18 on Megatron-Core moves the setting to cuda_graph_modules; mcore-bridge looks for names in it.
        config.cuda_graph_scope = []
    check_output_layer(config)
    return config


@contextlib.contextmanager
def _refusing(hf_config: Any) -> Iterator[None]:
    """Turn Megatron-Core's and mcore-bridge's errors about a model's sizes and settings into ConfigError."""
    try:
        yield
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"{hf_config.name_or_path}/config.json: Megatron cannot build this model ({reason:.400}); {OTHER_ENGINE}"
        ) from error


READ_UNLISTED = ("head_dim",)
"""Settings that transformers' models read although not all of their configurations' classes list them."""


def listed_settings(config: Any) -> Any:
    """Return a copy of transformers' configuration with the settings that its class lists.

    transformers ignores the others, of which mcore-bridge and this package would read some: for other families they are settings.
    """
    listed = copy.deepcopy(config)
    text = listed.get_text_config()
    for part in (listed, text) if text is not listed else (listed,):
        for name in vars(part).keys() - vars(type(part)()).keys() - {*READ_UNLISTED}:
            delattr(part, name)
    return listed


def rotary_frequencies(config: ModelConfig, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
    """Return a model's rotary frequencies, and the factor of sines and cosines, from transformers' module for its configuration.

    mcore-bridge takes them from some of the settings, by rules that are not every family's: most ignore partial_rotary_factor.
    """
    text = config.hf_config.get_text_config()  # type: ignore[reportOptionalMemberAccess]
    for kind in type(text).__mro__:  # Kimi-K2's is a subclass of DeepSeek-V3's
        # Of the model's module: a family may have a configuration of its own and another's model (InternLM3 has Llama's).
        models: Any = MODEL_FOR_CAUSAL_LM_MAPPING if kind in MODEL_FOR_CAUSAL_LM_MAPPING else MODEL_MAPPING
        module_name = models[kind].__module__ if kind in models else ""
        rotary = [
            value
            for name, value in vars(sys.modules.get(module_name, object)).items()
            if name.endswith("RotaryEmbedding") and "Vision" not in name and value.__module__ == module_name
        ]
        if len(rotary) == 1:
            module = rotary[0](text)
            return module.inv_freq.data, module.attention_scaling
    return get_rope_inv_freq(config, *args, **kwargs)


patch(gpt_model, "get_rope_inv_freq", rotary_frequencies, "rotary frequencies are those of transformers")


def check_rotary(config: ModelConfig) -> None:
    """Raise ConfigError if rotary frequencies do not fit a head."""
    if not config.multi_latent_attention:
        return
    width, rotated = 2 * len(rotary_frequencies(config)[0]), config.qk_pos_emb_head_dim
    if width != rotated:
        raise ConfigError(
            f"head_dim and partial_rotary_factor rotate {width} features of a head, qk_rope_head_dim {rotated}; correct "
            "config.json"
        )


def fuses_rotary(arguments: Mapping[str, Any]) -> bool:
    """Check whether Transformer Engine's fused rotary embedding, which mcore-bridge leaves off, computes the model's."""
    # Latent attention supports it with YaRN only. Where neighbouring features are pairs (GLM-4, ERNIE 4.5), Megatron-Core tells
    # the kernel so for plain batches, and not for packed ones, which would be rotated as halves. Angles by time, height and width
    # differ between the samples of a batch.
    return not (
        arguments.get("multi_latent_attention")
        or arguments.get("rotary_interleaved")
        or arguments.get("position_embedding_type") == "mrope"
    )


def check_divisible(architecture: Architecture, config: Mapping[str, Any], topology: Topology) -> None:
    """Raise TopologyError for parallel sizes that cannot divide the family's layers."""
    problems = architecture.unsupported_layout(config, tensor=topology.tensor, context=topology.context)
    problems += architecture.unsupported_stages(config, topology.chunk_layers)
    oldest, installed = architecture.context_core, metadata.version("megatron-core")
    if topology.context > 1 and oldest is not None and Version(installed) < Version(oldest):
        problems.append(
            f"parallel.context={topology.context}: Megatron-Core divides its linear attention from {oldest} on, and {installed} "
            "is installed; set 1, or install stack 0.19"
        )
    algorithms = architecture.context_algorithms
    if topology.context > 1 and algorithms is not None and topology.context_algorithm not in algorithms:
        problems.append(
            f"parallel.context_algorithm={topology.context_algorithm} with parallel.context={topology.context}: its attention "
            f"has {' and '.join(algorithms)} only; set parallel.context_algorithm: {algorithms[0]}"
        )
    if problems:
        raise TopologyError(f"{architecture.model_type}: {problems[0]}")


def check_packages(architecture: Architecture) -> None:
    """Raise MissingDependencyError if a module that the family's layers need is not installed."""
    for module in architecture.packages:
        package = module.partition(".")[0]
        if not is_installed(package) or not is_installed(module):
            source, requirement = KERNEL_PACKAGES.get(package, (package, package))
            raise MissingDependencyError(
                f"{architecture.model_type}: engine megatron computes its layers with {module}, which is not installed here "
                f"({source} has it): pip install '{requirement}'"
            )


def activation_arguments(
    hidden_act: str | None, arguments: Mapping[str, Any], name: str = "hidden_act"
) -> dict[str, Any]:
    """Return TransformerConfig's settings for a gated MLP with ``hidden_act``.

    Args:
        hidden_act: activation function named in ``config.json``, or None.
        arguments: mcore-bridge's; if they already set the activation, nothing is added.
        name: of the setting, for messages.
    """
    if hidden_act is None or hidden_act in SILU or "swiglu" in arguments or "activation_func" in arguments:
        return {}
    if hidden_act not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: {name} {hidden_act!r} is not supported by engine megatron; supported: "
            f"{', '.join([*SILU, *ACTIVATIONS])}"
        )
    return {"swiglu": False, "gated_linear_unit": True, "activation_func": ACTIVATIONS[hidden_act]}


def parallel_arguments(topology: Topology) -> dict[str, Any]:
    """Return TransformerConfig's parallel settings for ``topology``."""
    return {
        "tensor_model_parallel_size": topology.tensor,
        "pipeline_model_parallel_size": topology.pipeline,
        "virtual_pipeline_model_parallel_size": topology.virtual_pipeline if topology.virtual_pipeline > 1 else None,
        "context_parallel_size": topology.context,
        "cp_comm_type": CONTEXT_COMMUNICATION[topology.context_algorithm],
        "expert_model_parallel_size": topology.expert,
        "expert_tensor_parallel_size": topology.expert_tensor,
        "sequence_parallel": topology.sequence_parallel,
        # Interleaved at PP 2, the schedule without overlap is silently wrong; not interleaved, Megatron refuses overlap.
        "overlap_p2p_comm": topology.virtual_pipeline > 1,
        # Micro batches differ in length; without it stages would receive into buffers of one fixed length.
        "variable_seq_lengths": True,
        "cuda_graph_scope": [],  # mcore-bridge cannot handle 0.15's default, "full", when norms are recomputed
        "moe_token_dispatcher_type": "alltoall",  # allgather does not support micro batches of different length
    }


def pipeline_layout(topology: Topology, *, prediction_head: bool) -> list[list[str]]:
    """Return TransformerConfig's ``pipeline_model_parallel_layout``: what each chunk has, in the order of the model."""
    chunks = [["decoder"] * size for size in topology.chunk_layers]
    chunks[0].insert(0, "embedding")
    chunks[-1] += ["mtp", "loss"] if prediction_head else ["loss"]
    return chunks


def precision_arguments(precision: Precision) -> dict[str, Any]:
    """Return TransformerConfig's dtype settings, consistent for parameters, pipeline messages and flags."""
    dtype = DTYPES[precision]
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "fp16": precision == "fp16",
        "bf16": precision == "bf16",
        # Megatron scales q by the layer number in fp16 by default, which changes the model that was loaded.
        "apply_query_key_layer_scaling": False,
    }


def recompute_arguments(recompute: Recompute) -> dict[str, Any]:
    """Return TransformerConfig's activation recomputation settings."""
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "full":
        return {
            "recompute_granularity": "full",
            # "block" would recompute the first layers of a stage only.
            "recompute_method": "uniform",
            "recompute_num_layers": recompute.layers,
        }
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}


def check_output_layer(config: ModelConfig) -> None:
    """Raise ConfigError, on every rank, for models whose logits are more than a product with the output weight."""
    kind: Any = config.model_meta.loader(config).model_cls  # type: ignore[reportOptionalCall]
    if config.is_multimodal:
        if architecture_named(str(config.hf_model_type)).images is None:
            raise ConfigError(undeclared(str(config.hf_model_type)))
        kind = kind.language_model_cls
    plain: list[Any] = [GPTModel]
    with contextlib.suppress(ImportError):  # Megatron-Core has it from 0.18 on
        from mcore_bridge.model.hybrid_model import HybridModel

        plain.append(HybridModel)
    # HybridModel has neither: its forward pass ends with the output layer.
    base = next((base for base in plain if issubclass(kind, base)), GPTModel)
    for name in ("_forward_output_layer", "_postprocess"):
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise ConfigError(
                f"architecture {kind.__name__} computes its logits in its own way ({name}); megascend's chunked output "
                "head would leave that out"
            )


@contextlib.contextmanager
def preserved_rope_functions() -> Iterator[None]:
    """Undo mcore-bridge's change to transformers' table of RoPE initialisers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Building any of its models replaces the "default" entry with a function that fails for transformers' own
    # configurations, so that every Hugging Face model built later in the process would fail.
    before = dict(ROPE_INIT_FUNCTIONS)
    changed("transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS", "restored after mcore-bridge has built a model")
    try:
        yield
    finally:
        ROPE_INIT_FUNCTIONS.clear()
        ROPE_INIT_FUNCTIONS.update(before)


def build_chunks(
    config: ModelConfig,
    device: torch.device,
    head: ScalarHead | None = None,
    quantised: QuantisedBase | None = None,
) -> list[Any]:
    """Build this rank's model chunks (one, or one per virtual pipeline stage) on ``device``; weights are not loaded yet.

    Args:
        quantised: takes the weights of layers that it will quantise.
    """
    quantising = contextlib.nullcontext() if quantised is None else quantised.building()
    with _refusing(config.hf_config), preserved_rope_functions(), quantising:
        chunks = get_mcore_model(config)
    if head is not None:
        scalar_head.install(chunks, config, head, device)
    for chunk in chunks:
        set_latent_norm_epsilon(chunk, config)
        move(chunk, device)
        mark_tensor_parallel(chunk)
    return chunks


def set_latent_norm_epsilon(chunk: torch.nn.Module, config: ModelConfig) -> None:
    """Give the norms of latent attention the epsilon that they have in transformers; Megatron-Core has one for all norms."""
    hf: Any = config.hf_config
    epsilon = architecture_of(hf.to_dict()).latent_norm_epsilon
    if epsilon is None or config.layernorm_epsilon == epsilon:
        return
    changed("norms of latent attention", f"epsilon {epsilon} as in transformers, not {config.layernorm_epsilon}")
    for module in chunk.modules():
        if hasattr(module, "kv_layernorm"):  # by name: attention with an indexer (0.19) is of a class of its own
            # Transformer Engine may compute a norm in the projection that follows it.
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                norm: Any = getattr(module, name, None)
                if hasattr(norm, "eps"):
                    norm.eps = epsilon


def move(chunk: torch.nn.Module, device: torch.device) -> None:
    """Move parameters that were created elsewhere to ``device``, and check that they keep Megatron's attributes."""
    # MindSpeed creates the parameters of norms on the CPU. A move that lost sequence_parallel would leave their gradients
    # unreduced, without an error.
    before = {name: dict(vars(parameter)) for name, parameter in chunk.named_parameters()}
    chunk.to(device)
    for name, parameter in chunk.named_parameters():
        if vars(parameter) != before[name]:
            raise PlatformError(
                f"parameter {name} lost attributes on its way to {device}: {sorted(before[name])} became "
                f"{sorted(vars(parameter))}; this torch_npu replaces parameters where it should move them"
            )


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Set the attributes by which Megatron's gradient norm distinguishes shards from replicas."""
    # Megatron sets them while it initialises weights, which mcore-bridge skips (perform_initialization=False); without
    # them the norm would leave out every rank's embedding and output shard but the first's. MindSpeed's grouped linear
    # layers never set them, so that all ranks' experts but the first's would be missing.
    # No library sets them for attention sinks, which are sharded by heads. Transformer Engine sets them for every weight,
    # including the replicas of duplicated layers (latent attention's down projections), which the norm would count on every rank.
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    from megatron.core.extensions import transformer_engine as te  # here: a platform may have replaced its classes

    dims = {
        VocabParallelEmbedding: 0,
        ColumnParallelLinear: 0,
        RowParallelLinear: 1,
        te.TEColumnParallelGroupedLinear: 0,
        te.TERowParallelGroupedLinear: 1,
    }
    divided = (te.TEColumnParallelLinear, te.TERowParallelLinear)
    divided_experts = (parallel_state.get_expert_tensor_parallel_world_size() or 1) > 1
    changed("parameters of tensor parallel layers", "marked as sharded, and replicas as such, for the norm")
    for module in model.modules():
        sinks = getattr(module, "softmax_offset", None)
        if isinstance(sinks, torch.nn.Parameter):
            sinks.tensor_model_parallel = True  # type: ignore[attr-defined]
            sinks.partition_dim, sinks.partition_stride = 0, 1  # type: ignore[attr-defined]
        if isinstance(module, te.TELinear) and not isinstance(module, divided):
            module.weight.tensor_model_parallel = False  # type: ignore[attr-defined]
        dim = next((dim for kind, dim in dims.items() if isinstance(module, kind)), None)
        if dim is None:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # Grouped layers have weight0, weight1...; a row parallel bias is replicated on every rank. But with an expert tensor
            # parallel size of 1, tensor parallel ranks have different experts, not replicas.
            whole_experts = isinstance(module, te.TERowParallelGroupedLinear) and not divided_experts
            sharded = name.startswith("weight") or (name.startswith("bias") and (dim == 0 or whole_experts))
            if sharded and not getattr(parameter, "tensor_model_parallel", False):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim = dim  # type: ignore[attr-defined]
                parameter.partition_stride = 1  # type: ignore[attr-defined]
