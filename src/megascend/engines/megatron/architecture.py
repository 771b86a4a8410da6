"""Whether transformers can read a checkpoint's configuration and mcore-bridge can build it: asked before ranks meet."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from mcore_bridge.model import get_mcore_model_type, get_model_meta, register
from transformers import AutoConfig

from megascend.changes import patch
from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface.architectures import import_part, make_known_to_transformers, registered
from megascend.huggingface.unsupported import unsupported_settings


def check_architecture(model_dir: Path) -> None:
    """Is the model of ``config.json`` one that can be built here? Modules that it is registered with are imported.

    Raises:
        CheckpointError: transformers cannot read it, or mcore-bridge has no such architecture.
        ConfigError: it has settings that the Megatron model has not, and the message names each; or a module that it is
            registered with cannot be imported.
    """
    make_known_to_transformers(model_dir)
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:  # its validators raise classes without a common base
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise CheckpointError(
            f"{model_dir}/config.json: transformers {metadata.version('transformers')} cannot read it: {reason}"
        ) from error
    _make_known_to_mcore_bridge(config.model_type)
    if get_model_meta(get_mcore_model_type(config.model_type)) is None:  # type: ignore[reportArgumentType]
        raise CheckpointError(
            f"{model_dir}/config.json: mcore-bridge {metadata.version('mcore-bridge')} has no model for "
            f"model_type {config.model_type!r}; a package of your own can bring it (megascend.register_architecture)"
        )
    if found := unsupported_settings(config.to_dict()):
        raise ConfigError(f"{model_dir}/config.json: {'; '.join(found)}")


def _make_known_to_mcore_bridge(model_type: str) -> None:
    architecture = registered(model_type)
    if architecture is None or architecture.megatron is None:
        return
    import_part(model_type, architecture.megatron)
    if register.get_mcore_model_type(model_type) is None:
        # mcore-bridge makes the table when it is first asked for a type, and does not look again.
        patch(register, "model_type_mapping", None, f"is made again, so that {model_type} is in it")
    if get_model_meta(get_mcore_model_type(model_type)) is None:  # type: ignore[reportArgumentType]
        raise ConfigError(
            f"architecture {model_type!r}: importing {architecture.megatron!r} has registered no model of that type with "
            "mcore-bridge (mcore_bridge.model.register.register_model)"
        )
