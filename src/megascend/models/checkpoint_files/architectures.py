"""The architecture of a checkpoint directory, and how transformers learns of it in each process."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megascend.models import Architecture, architecture_of
from megascend.models.checkpoint_files.files import read_config

RETURNED = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}
"""What transformers' models return is chosen by engines, not by ``config.json``."""


def architecture_in(model_dir: Path) -> Architecture:
    """Return the declaration of the model in a directory."""
    return architecture_of(read_config(model_dir))


def transformers_config(model_dir: Path) -> Any:
    """Return transformers' configuration of the model in a directory, without what engines choose.

    That is its quantisation, as weights are read dequantised, and what models return (:data:`RETURNED`).
    """
    from transformers import AutoConfig

    make_known_to_transformers(model_dir)
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    for part in (config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))):
        part.__dict__.pop("quantization_config", None)
        for name, value in RETURNED.items():
            if hasattr(part, name):
                setattr(part, name, value)
    return config


def make_known_to_transformers(model_dir: Path) -> None:
    """Import what transformers needs to read the model in a directory, if its declaration names a module for it."""
    architecture = architecture_in(model_dir)
    architecture.make_known_to_transformers()


ClassifierUnit = Literal["sequence", "token"]
"""What transformers' classifiers give labels to."""


def classifier_class(config: Mapping[str, Any], unit: ClassifierUnit) -> str | None:
    """Return the name of transformers' class for a classifier of this architecture; None if it has none.

    Args:
        config: ``config.json`` of a checkpoint.
    """
    kind = str(config.get("model_type"))
    if (name := _classifier_names(unit).get(kind)) is not None:
        return name
    architecture = architecture_of(config)
    if architecture.transformers is None:
        return None
    # A module from outside may register one.
    architecture.make_known_to_transformers()
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    )

    mapping = (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if unit == "sequence" else MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    )
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in mapping:
        return None
    classifier: Any = mapping[CONFIG_MAPPING[kind]]
    # Named like the language model, which may be another architecture's: Kimi-K2 is a DeepseekV3ForCausalLM.
    language_model = next(iter(config.get("architectures") or []), classifier.__name__)
    return f"{str(language_model).rpartition('For')[0]}For{unit.capitalize()}Classification"


@cache
def _classifier_names(unit: ClassifierUnit) -> dict[str, str]:
    """Return transformers' classes of classifiers by model type."""
    table, module = f"MODEL_FOR_{unit.upper()}_CLASSIFICATION_MAPPING_NAMES", "models/auto/modeling_auto.py"
    spec = find_spec("transformers")
    # From the source: the import would load torch, which the checks before a run avoid.
    if spec is not None and spec.origin is not None and (path := Path(spec.origin).parent / module).is_file():
        for statement in ast.parse(path.read_bytes()).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == table:
                call = statement.value
                if isinstance(call, ast.Call) and len(call.args) == 1:
                    return dict(ast.literal_eval(call.args[0]))
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, table))
