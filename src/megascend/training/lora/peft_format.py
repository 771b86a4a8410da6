"""Adapters on disk in Hugging Face PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT has no dropout for parameters, so an adapter of experts has ``lora_dropout`` 0.0 in its PEFT files; the value that it was
trained with is in ``megascend_adapter.json``.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megascend.config import Lora
from megascend.config.documents import load_json
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.exported import abbreviated
from megascend.training.lora.factors import Factors
from megascend.training.lora.peft_tensors import (
    CONFIG,
    EXPERT_PARAMETERS,
    WEIGHTS,
    is_expert_parameter,
    to_factors,
    to_tensors,
)
from megascend.training.lora.target_modules import HEAD, matches


def write(
    folder: Path,
    lora: Lora,
    factors: Mapping[str, Factors],
    base_model: str,
    adaptable: Collection[str] | None = None,
) -> None:
    """Write both files into ``folder``, which exists; ``peft.PeftModel.from_pretrained(model, folder)`` loads them.

    Args:
        folder: files of the same names are overwritten. The caller makes the write atomic.
        lora: rank, alpha, rslora and dropout are written, dropout as 0.0 with fused experts (see the module).
        factors: factors of every adapted projection by its Hugging Face name; fused experts as ``....mlp.experts.down_proj``.
        base_model: name or path of the base model, for information.
        adaptable: every projection of the base model that PEFT could adapt. With it the configuration names layers by their
            last component (``q_proj``) if all with that component are adapted; without it, by their full names. It also
            shows whether a model has fused experts if ``factors`` are only of its other MLPs.
    """
    try:
        tensors = to_tensors(factors, lora.rank)
        config = to_config(lora, factors, base_model, adaptable)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (CheckpointError, OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter {folder} could not be written: {error}") from None


def read(folder: Path) -> tuple[Lora, dict[str, Factors]]:
    """Read an adapter that PEFT or :func:`write` saved.

    Returns:
        The settings (``targets`` as the configuration lists them if that has the same meaning here, else the adapted layers'
        full names; no seed, optimizer or schedule) and the factors by Hugging Face name, in float32.
    """
    try:
        config = _load_config(folder / CONFIG)
        check_plain(config)
        factors = to_factors(_load_tensors(folder), config["r"], config.get("target_parameters") or [])
        return to_lora(config, factors.keys() - {HEAD}), factors
    except CheckpointError as error:
        raise CheckpointError(f"adapter {folder}: {error}") from None


def check_complete(folder: Path, names: Collection[str], adaptable: Collection[str]) -> None:
    """Raise CheckpointError if the file lacks factors (``names``) of a targeted layer, which peft would fill with random ones."""
    targets = targeted(_load_config(folder / CONFIG), adaptable)
    missing = [name for name in adaptable if name in targets and name not in names]
    if missing:
        raise CheckpointError(
            f"adapter {folder}: {WEIGHTS} has no factors of {abbreviated(missing)}, which {CONFIG} targets: copy the file "
            f"again, or leave these layers out of {CONFIG}"
        )


def _load_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing; expected a folder that peft's save_pretrained wrote")
    try:
        config = load_json(path.read_bytes())
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path.name} must hold an object, found {type(config).__name__}")
    return config


def _load_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / "adapter_model.bin").is_file():
            raise CheckpointError(
                "the weights are in adapter_model.bin, a pickle, which can run code; if you trust it, load it with peft and "
                "save_pretrained(..., safe_serialization=True)"
            )
        raise CheckpointError(f"{WEIGHTS} is missing")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{WEIGHTS} cannot be read: {error}") from None
    if not tensors:
        raise CheckpointError(f"{WEIGHTS} holds no tensor")
    return tensors


_RENAMED_BY_PEFT = ("gate_proj", "up_proj", "down_proj", "gate")
"""Modules that PEFT converts as experts of an old checkpoint, at any depth, if the model has fused experts."""

_PLAIN_INIT = ("true", "false", "none", "gaussian", "orthogonal", "eva", "mica")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "target_modules": (list, str),
    "exclude_modules": (list, str),
    "target_parameters": list,
    "layers_pattern": (list, str),
    "rank_pattern": dict,
    "alpha_pattern": dict,
    "use_rslora": bool,
}
_HEADS = (HEAD, "classifier")
"""Names of classifiers' heads, which peft adds to ``modules_to_save``; only :data:`HEAD` can be read, as a tensor."""
_NOT_PLAIN = {
    "use_dora": "DoRA also learns the length of every row",
    "lora_bias": "its B has a bias",
    "fan_in_fan_out": "it adapts layers that store their weight transposed",
    "modules_to_save": "it has full layers in addition to the factors",
    "trainable_token_indices": "it has rows of the embedding in addition to the factors",
    "layer_replication": "it repeats layers of the base model",
    "megatron_config": "it adapts PEFT's own Megatron layers",
    "alora_invocation_tokens": "Activated LoRA adapts only part of a sequence",
    "use_qalora": "QALoRA pools the input of A",
    "use_bdlora": "BD-LoRA's factors are block-diagonal",
    "monteclora_config": "MonteCLoRA samples around the factors",
    "arrow_config": "Arrow routes tokens between adapters",
}


def to_config(
    lora: Lora, names: Collection[str], base_model: str, adaptable: Collection[str] | None = None
) -> dict[str, Any]:
    """Build the content of ``adapter_config.json`` for an adapter of the projections ``names``; see :func:`write`."""
    if not names:
        raise CheckpointError("cannot save an adapter without layers")
    heads = [name for name in names if name == HEAD]
    names = [name for name in names if name != HEAD]
    universe = {*names, *(adaptable or ())} - {HEAD}
    # Also if no expert is adapted: PEFT's renaming depends only on the model.
    fused = any(is_expert_parameter(name) for name in universe)
    parameters = [name for name in names if is_expert_parameter(name)]
    weights = [name for name in names if fused and name.split(".")[-1] in _RENAMED_BY_PEFT]
    # As target_modules PEFT would take them for experts; as target_parameters it does not rename them.
    weights = [name for name in weights if name not in parameters]
    modules = [name for name in names if name not in parameters and name not in weights]
    # Without all adaptable names no short name is safe: it might match a layer that is not adapted.
    shorten = universe if adaptable is not None else set()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if heads else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        # An int in peft's LoraConfig.
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0 if parameters or weights else lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": _ends_of(modules, 1, shorten),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": heads or None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
    }
    if parameters or weights:  # omitted otherwise, for versions of PEFT without the field
        config["target_parameters"] = _ends_of(parameters, 2, shorten)
        config["target_parameters"] += [f"{name}.weight" for name in _ends_of(weights, 2, shorten)]
    return config


def check_plain(config: Mapping[str, Any]) -> None:
    """Refuse settings of PEFT beyond ``W + scaling * B A`` with one rank and one scaling everywhere.

    ``velora_config`` and settings of initialisations may have any value: they do not change what the factors compute.
    """
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{CONFIG}: peft_type is {config.get('peft_type')!r}; only LORA can be read")
    for field, types in _TYPES.items():
        value = config.get(field)
        if value is not None and not isinstance(value, types):
            raise CheckpointError(f"{CONFIG}: {field} is {value!r}, which peft does not write there")
        if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
            raise CheckpointError(f"{CONFIG}: {field} is {value!r}; expected names")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{CONFIG}: r is {rank!r}; expected a rank of at least 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise CheckpointError(f"{CONFIG}: lora_alpha is {alpha!r}; expected a number above 0")
    dropout = config.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise CheckpointError(f"{CONFIG}: lora_dropout is {dropout!r}; expected a number from 0 to below 1")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{CONFIG}: bias is {config['bias']!r}; it must be 'none': biases are not adapted")
    for field, reason in _NOT_PLAIN.items():
        value = config.get(field)
        if field == "modules_to_save" and isinstance(value, list) and all(name in _HEADS for name in value):
            continue
        # peft writes all fields: None, False and empty values mean plain LoRA.
        if value:
            raise CheckpointError(f"{CONFIG}: {field} is {value!r}; this is not plain LoRA: {reason}")
    for field, default, value in (("rank_pattern", "r", rank), ("alpha_pattern", "lora_alpha", alpha)):
        for pattern, pattern_value in (config.get(field) or {}).items():
            if pattern_value != value:
                raise CheckpointError(
                    f"{CONFIG}: {field} sets {pattern_value!r} for {pattern!r}, but {default} is {value}; one adapter has one "
                    "rank and one alpha"
                )
    initialisation = config.get("init_lora_weights", True)
    if str(initialisation).lower() not in _PLAIN_INIT:
        raise CheckpointError(
            f"{CONFIG}: init_lora_weights is {initialisation!r}, which changes the base model "
            f"{config.get('base_model_name_or_path')!r} too; save it as plain LoRA (path_initial_model_for_weight_conversion)"
        )


def to_lora(config: Mapping[str, Any], names: Collection[str]) -> Lora:
    """Build the settings of an adapter of the projections ``names`` from a configuration that :func:`check_plain` accepted."""
    return Lora(
        rank=config["r"],
        alpha=config["lora_alpha"],
        rslora=bool(config.get("use_rslora")),
        dropout=config.get("lora_dropout") or 0.0,
        targets=_targets(config, names),
    )


def targeted(config: Mapping[str, Any], adaptable: Iterable[str]) -> set[str]:
    """Return the base model's projections that peft would adapt with a configuration that :func:`check_plain` accepted."""
    adaptable = list(adaptable)
    modules = [name for name in adaptable if not is_expert_parameter(name)]
    names = _matching(config, "target_modules", modules) - _matching(config, "exclude_modules", modules)
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern") or r"[^.]+"
    if layers is not None:
        numbers = {str(number) for number in ([layers] if isinstance(layers, int) else layers)}
        layer_pattern = rf".*?\.(?:{'|'.join([pattern] if isinstance(pattern, str) else pattern)})\.(\d+)\..*"
        found = _matches_of("layers_pattern", layer_pattern, [f".{name}" for name in modules])
        names = {name for name in names if (layer := found.get(f".{name}")) and str(int(layer[-1])) in numbers}
    return names | {name for name in adaptable if matches(name, _parameters(config))}


def _matching(config: Mapping[str, Any], field: str, names: Sequence[str]) -> set[str]:
    """Return the modules that a field (suffixes, a pattern or ``all-linear``) matches."""
    targets = config.get(field) or ()
    if isinstance(targets, str) and targets != "all-linear":
        return set(_matches_of(field, targets, names))
    return {name for name in names if matches(name, targets)}


MATCH_S = 5
# A pattern can take years (the time doubles with each character of a name), and re cannot be interrupted.
_MATCHER = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MATCH_S}, {MATCH_S}))
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
pattern, names = json.load(sys.stdin)
found = {{name: re.fullmatch(pattern, name) for name in names}}
json.dump({{name: match.groups() for name, match in found.items() if match}}, sys.stdout)
"""


def _matches_of(field: str, pattern: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the groups of each name that ``pattern`` matches, from another process with a limit of its processor time."""
    command = [sys.executable, "-I", "-S", "-c", _MATCHER]
    content = json.dumps([pattern, names])
    child = subprocess.run(command, input=content, capture_output=True, encoding="utf-8", check=False)
    if child.returncode:
        reason = child.stderr.strip().rpartition("\n")[2][:80] or f"it takes more than {MATCH_S} s"
        raise CheckpointError(
            f"{CONFIG}: {field} cannot be matched: {reason}; write the names of the modules as a list"
        )
    return json.loads(child.stdout)


def _parameters(config: Mapping[str, Any]) -> list[str]:
    """Return ``target_parameters`` under megascend's names."""
    return [
        f"experts.{target}" if target in EXPERT_PARAMETERS else target.removesuffix(".weight")
        for target in config.get("target_parameters") or []
    ]


def _targets(config: Mapping[str, Any], names: Collection[str]) -> tuple[str, ...]:
    """Return the configuration's targets if they match exactly ``names`` here too; else ``names``."""
    modules = config.get("target_modules") or []
    parameters = _parameters(config)
    narrowed = any(config.get(f) is not None for f in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    # These choose layers in ways that ``targets`` cannot express.
    if isinstance(modules, str) or narrowed:
        return tuple(sorted(names))
    module_names = sorted({*modules, *parameters})
    # Parameters of the same experts that are not adapted: the listed targets must not match them.
    siblings = {
        f"{name.rpartition('.')[0]}.{parameter}"
        for name in names
        if is_expert_parameter(name)
        for parameter in EXPERT_PARAMETERS
    }
    selected = {name for name in {*names, *siblings} if matches(name, module_names)}
    # A target that matches nothing would be refused when the adapter is added.
    used = [target for target in module_names if any(matches(name, [target]) for name in names)]
    return tuple(module_names if selected == set(names) and used == module_names else sorted(names))


def _ends_of(names: Iterable[str], parts: int, universe: Collection[str]) -> list[str]:
    """Shorten ``names`` to their last ``parts`` components if they include all names of ``universe`` that end so."""
    names = set(names)

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    complete = {end(name) for name in universe if name in names}
    complete -= {end(name) for name in universe if name not in names}
    return sorted({end(name) if end(name) in complete else name for name in names})
