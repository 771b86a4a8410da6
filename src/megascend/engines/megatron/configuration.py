"""Configure Megatron for an engine's settings, and check these against the model before its layers are built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mcore_bridge import ModelConfig

from megascend.engines.base import longest_sample
from megascend.engines.context import EngineSpec
from megascend.engines.megatron import graph_support, grouped_experts, mtp, quantised_base, routers, vision
from megascend.engines.megatron.build import build_config, check_packing, check_rotary, check_window
from megascend.engines.megatron.groups import fake_groups
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import ModelInfo, linear_layers
from megascend.runtime.platforms.base import Platform
from megascend.runtime.topology.topology import Topology
from megascend.training.lora.registry import check_limits
from megascend.training.lora.target_modules import matches, refused_tower_targets

if TYPE_CHECKING:
    from megascend.runtime.bootstrap import Runtime


def check_model(spec: EngineSpec, runtime: Runtime, topology: Topology, info: ModelInfo) -> list[str]:
    """Raise the errors that the constructor would raise before it builds layers; return the names of adapter targets.

    The names are read from the checkpoint's headers, as the layers do not exist yet.
    """
    # First, because the provider's settings determine fields of mcore-bridge's configuration.
    runtime.configure_topology(topology, spec.timeout_s)
    with fake_groups(topology):
        config, _ = configure(spec, runtime.platform, topology, info, torch.device(runtime.platform.device_type))
        runtime.configure_model(config, spec.provider_options)
    if spec.adapters is None:
        return []
    names, images = linear_layers(info, spec.vision_tower), info.architecture.images
    if images is not None:
        linear = [name for name in linear_layers(info, "train") if name.startswith(images.tower)]
        check_limits(spec.adapters, names, refused_tower_targets(linear, images, spec.vision_tower))
    if spec.batching.cuda_graphs is not None:
        targets = [name for name in names if matches(name, spec.adapters.targets)]
        graph_support.raise_unsupported(graph_support.unsupported_targets_reason(targets))
    return names


def configure(
    spec: EngineSpec, platform: Platform, topology: Topology, info: ModelInfo, device: torch.device
) -> tuple[ModelConfig, bool]:
    """Build mcore-bridge's configuration and check the settings against it; also return whether experts are to be grouped."""
    mtp.check(spec)
    config = build_config(
        spec.model,
        topology,
        spec.precision,
        spec.recompute,
        platform,
        info.scalar_head,
        tied=info.shape.tied,
        prediction_head=spec.mtp == "train",
    )
    routers.check(config, spec.moe, topology.pipeline, frozen=spec.adapters is not None)
    grouped = grouped_experts.is_enabled(spec.moe, config, spec.precision, device, overlapped=overlaps_reduction(spec))
    if spec.base_weights != "unquantised":
        _check_quantised_base(spec, platform, topology, info, config)
    if spec.batching.cuda_graphs is not None:
        _check_cuda_graphs(spec, topology, info, device, config, grouped=grouped)
    if info.image_layout is not None:
        vision.check(config, topology, spec.adapters, trains_head=spec.mtp == "train")
    check_window(config, longest_sample(spec, info))
    check_rotary(config, longest_sample(spec, info))
    check_packing(config, platform, packing=spec.batching.packing)
    return config, grouped


def overlaps_reduction(spec: EngineSpec) -> bool:
    """Check whether gradients are reduced during the backward pass. Those of adapters are reduced once a step."""
    return spec.optimizer.overlap_grad_reduce and spec.adapters is None


def _check_quantised_base(
    spec: EngineSpec, platform: Platform, topology: Topology, info: ModelInfo, config: ModelConfig
) -> None:
    """Raise ConfigError if the frozen model cannot have quantised weights."""
    method = spec.base_weights
    if platform.name == "npu":
        raise ConfigError(f"base_weights: {method} is not supported on NPUs: leave it out, or set unquantised")
    if info.linear is not None or info.state_space is not None:
        raise ConfigError(
            f"base_weights: {method} is not supported for {info.architecture.model_type}, which has linear attention or "
            "state spaces: leave it out, or set unquantised"
        )
    if spec.batching.cuda_graphs is not None:
        raise ConfigError(f"base_weights: {method} with batching.cuda_graphs is not supported: leave one of them out")
    quantised_base.check(method, config, topology)


def _check_cuda_graphs(
    spec: EngineSpec, topology: Topology, info: ModelInfo, device: torch.device, config: ModelConfig, *, grouped: bool
) -> None:
    """Raise ConfigError if micro batches cannot run as CUDA graphs."""
    graph_support.raise_unsupported("does not support scalar heads" if info.scalar_head else None)
    graph_support.raise_unsupported("does not support images" if info.image_layout else None)
    adam = None if spec.adapters is not None else spec.optimizer
    graph_support.raise_unsupported(
        graph_support.unsupported_reason(
            device.type, topology, spec.precision, spec.recompute, config, adam, grouped=grouped
        )
    )
