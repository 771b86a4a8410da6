"""Settings of an engine, declared once for run files, the service and the constructors of backends."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megascend.config.section import Section, Seed
from megascend.config.training import (
    Adam,
    AnyPrecision,
    Batching,
    Fsdp,
    Moe,
    Mtp,
    Parallel,
    PlatformName,
    ProviderOptions,
    Recompute,
    Schedule,
    VisionTower,
)


class ModelSettings(Section):
    """Settings of a model on its ranks, whether it is trained or served."""

    model: Path = Field(
        description="Hugging Face checkpoint directory (safetensors), or a name on the Hub: owner/name@revision"
    )
    platform: PlatformName = Field("auto", description="device type; auto: the first of npu, cuda, cpu that works")
    parallel: Parallel = Parallel()
    precision: AnyPrecision = Field(
        "bf16",
        description="type of parameters, compute and exported weights; main parameters, gradients and moments are fp32",
    )
    batching: Batching = Batching()
    vision_tower: VisionTower = Field(
        "frozen",
        description="the vision tower of a model that takes images, with the layers that turn its features into those of the "
        "language model: keep its weights, or train them with the model; with LoRA: adapt only the language model, or the "
        "tower's linear layers too",
    )
    seed: Seed = Field(1234, description="seed of dropout, new parameters, the data order and sampling")
    timeout_s: float = Field(
        600, ge=1, le=366 * 24 * 3600, description="seconds after which a missing rank is an error on all others"
    )


class EngineSettings(ModelSettings):
    """Settings of a model in training that run files and the constructors of backends have."""

    fsdp: Fsdp = Fsdp()
    optimizer: Adam = Adam()
    schedule: Schedule = Schedule()
    recompute: Recompute = Recompute()
    moe: Moe = Moe()
    mtp: Mtp = Field(
        "keep",
        description="heads for multi-token prediction: train one with the model (engine megatron), keep them as they are (an "
        "export copies their tensors), or drop them (an export has none)",
    )
    mtp_loss_weight: float = Field(
        0.1, gt=0, description="weight of the loss of a head for multi-token prediction, with mtp: train"
    )
    provider: str | None = Field(
        None,
        description="provider that patches Megatron-Core for the platform: a registered name, or package.module:attribute; "
        "default: chosen by platform",
    )
    provider_options: ProviderOptions = Field(
        {},
        description="options of the provider; of provider mindspeed, MindSpeed's command-line arguments with underscores",
    )
    self_check: bool = Field(
        True,
        description="compare a small slice of the model with transformers before training; off: train what the engine computes",
    )
