"""Configure Megatron for an engine's settings, and check these against the model before its layers are built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mcore_bridge import ModelConfig

from megascend.config.rules import enforce
from megascend.engines.context import EngineSpec
from megascend.engines.megatron import grouped_experts
from megascend.engines.megatron.build import build_config, check_rotary
from megascend.engines.megatron.groups import fake_groups
from megascend.engines.rules import MEGATRON_MODEL, MegatronSetup
from megascend.models.checkpoint_files.info import ModelInfo, linear_layers
from megascend.runtime.platforms.base import Platform
from megascend.runtime.topology.topology import Topology
from megascend.training.lora.registry import check_limits
from megascend.training.lora.target_modules import refused_tower_targets

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
    return names


def configure(
    spec: EngineSpec, platform: Platform, topology: Topology, info: ModelInfo, device: torch.device
) -> tuple[ModelConfig, bool]:
    """Build mcore-bridge's configuration and check the settings against it; also return whether experts are to be grouped."""
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
    grouped = grouped_experts.is_enabled(spec.moe, config, spec.precision, device, overlapped=overlaps_reduction(spec))
    enforce(MEGATRON_MODEL, MegatronSetup("megatron", spec, platform, topology, info, config, grouped))
    check_rotary(config)
    return config, grouped


def overlaps_reduction(spec: EngineSpec) -> bool:
    """Check whether gradients are reduced during the backward pass. Those of adapters are reduced once a step."""
    return spec.optimizer.overlap_grad_reduce and spec.adapters is None
