"""Whether transformers can read a checkpoint's configuration and mcore-bridge can build it: asked before ranks meet."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from mcore_bridge.model import get_mcore_model_type, get_model_meta
from transformers import AutoConfig

from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface.unsupported import unsupported_settings


def check_architecture(model_dir: Path) -> None:
    """Is the model of ``config.json`` one that can be built here?

    Raises:
        CheckpointError: transformers cannot read it, or mcore-bridge has no such architecture.
        ConfigError: it has settings that the Megatron model has not; the message names each.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:  # its validators raise classes without a common base
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise CheckpointError(
            f"{model_dir}/config.json: transformers {metadata.version('transformers')} cannot read it: {reason}"
        ) from error
    if get_model_meta(get_mcore_model_type(config.model_type)) is None:  # type: ignore[reportArgumentType]
        raise CheckpointError(
            f"{model_dir}/config.json: mcore-bridge {metadata.version('mcore-bridge')} has no model for "
            f"model_type {config.model_type!r}"
        )
    if found := unsupported_settings(config.to_dict()):
        raise ConfigError(f"{model_dir}/config.json: {'; '.join(found)}")
