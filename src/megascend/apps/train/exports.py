"""Find a model, adapters and their chat template in the directories of runs and exports, or on the Hub."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from megascend.apps.train.run_directory import METRICS
from megascend.config import Classification, PlatformName
from megascend.config.data import default_labels
from megascend.config.documents import load_json, load_yaml
from megascend.config.registry import ENGINES
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.files import read_config, tensor_headers
from megascend.models.checkpoint_files.hub import repository_of, snapshot
from megascend.models.checkpoint_files.scalar_head import WEIGHT

if TYPE_CHECKING:
    from megascend.apps.train.inference import InferenceSettings

logger = logging.getLogger(__name__)
MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
RUN_FILE = "config.yaml"
"""File in a run's directory with its settings."""


def inference_settings(
    model: Path,
    adapters: list[str] | None,
    base: Path | None,
    engine: str,
    platform: PlatformName,
    precision: str,
    tensor: int = 1,
) -> InferenceSettings:
    """Find the model, its adapters and its tokenizer; adapters without a name are called by their directory's."""
    ENGINES.require(engine, setting="--engine")
    model = snapshot(model, setting="MODEL")
    paths: dict[str, Path] = {}
    trained = itself_or_in(model, "adapter", ADAPTER_CONFIG)
    if trained is not None and not (model / "hf" / MODEL_CONFIG).is_file():
        paths["default"] = trained
        recorded = load_json((trained / ADAPTER_CONFIG).read_bytes()).get("base_model_name_or_path")
        source = snapshot(base or Path(recorded or ""), setting=f"base model of {trained} (or --base)")
        if not (source / MODEL_CONFIG).is_file():
            raise CheckpointError(
                f"{trained} was trained on {recorded}, which is not a directory here: name it with --base"
            )
    else:
        source = find_checkpoint(model)
    for entry in adapters or []:
        name, separator, folder = entry.partition("=")
        path = find_adapter(Path(folder if separator else entry))
        name = name if separator else path.resolve().parent.name if path.name == "adapter" else path.resolve().name
        if not name or name in paths:
            raise ConfigError(
                f"--adapter {entry}: the name {name!r} is empty or taken; name it with --adapter NAME=DIR"
            )
        paths[name] = path
    for path in paths.values():
        warn_of_other_base(path, source)
    # A run's adapter has the tokenizer with the template that it was trained with.
    only = next(iter(paths.values())) if len(paths) == 1 else None
    tokenizer = only if only is not None and (only / "tokenizer_config.json").is_file() else None
    options = run_template_options(source if tokenizer is None else tokenizer)
    from megascend.apps.train.inference import InferenceSettings  # imports torch: after what is refused without it

    return InferenceSettings(source, paths, tokenizer, options, engine, platform, precision, tensor)  # type: ignore[arg-type]


def itself_or_in(path: Path, folder: str, file: str) -> Path | None:
    """Return the directory that holds ``file``: ``path`` itself, or a run's ``folder`` in it; None if neither does."""
    return next((directory for directory in (path, path / folder) if (directory / file).is_file()), None)


def find_checkpoint(path: Path) -> Path:
    """Return the Hugging Face checkpoint at ``path``: itself, a run's export, or downloaded from the Hub."""
    path = snapshot(path, setting="MODEL")
    if (checkpoint := itself_or_in(path, "hf", MODEL_CONFIG)) is not None:
        return checkpoint
    if (adapter := itself_or_in(path, "adapter", ADAPTER_CONFIG)) is not None:
        raise CheckpointError(
            f"{adapter} is a LoRA adapter, not a model. To merge it into its base model: megascend export BASE OUT "
            f"--adapter {adapter}"
        )
    if (path / METRICS).is_file():
        raise CheckpointError(
            f"{path} is a run directory without an exported model (no hf/), unfinished or with export: false; train it to its "
            "end with megascend train --resume auto"
        )
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: the directory does not exist")
    raise CheckpointError(f"{path} holds neither config.json nor hf/config.json: not a Hugging Face checkpoint")


def find_adapter(path: Path) -> Path:
    """Return the adapter in peft's format at ``path``: the directory itself, or that of a run."""
    path = snapshot(path, setting="--adapter")
    if (adapter := itself_or_in(path, "adapter", ADAPTER_CONFIG)) is not None:
        return adapter
    problem = "holds no adapter_config.json" if path.exists() else "does not exist"
    raise CheckpointError(
        f"--adapter {path} {problem}; expected what peft's save_pretrained writes, or the directory of a finished run with lora"
    )


def find_export(path: Path) -> Path:
    """Return the exported model or adapter at ``path``: the directory itself, or that of a run."""
    if (path / MODEL_CONFIG).is_file() or (path / ADAPTER_CONFIG).is_file():
        return path
    present = [
        path / folder
        for folder, file in (("hf", MODEL_CONFIG), ("adapter", ADAPTER_CONFIG))
        if (path / folder / file).is_file()
    ]
    if not present:
        problem = "holds no exported model or adapter" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {problem}; expected {MODEL_CONFIG} or {ADAPTER_CONFIG} in it, or the directory of a finished run with "
            "export: true"
        )
    if len(present) > 1:
        raise ConfigError(f"{path} holds both a model and an adapter: name one, {present[0]} or {present[1]}")
    return present[0]


def warn_of_other_base(adapter: Path, model: Path) -> None:
    """Warn if an adapter says that it was trained on another model; no error, as names and paths differ by machine."""
    if (recorded := other_base(adapter, model)) is not None:
        logger.warning(
            "%s was trained on %s, and is used on %s: make sure that these are one model", adapter, recorded, model
        )


def other_base(adapter: Path, model: Path) -> str | None:
    """Return the adapter's recorded base model if it differs from ``model`` in path or, if that is gone, in name."""
    try:
        base_name = load_json((adapter / ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(base_name, str) or not base_name:
        return None
    base = Path(base_name)
    name = (repository_of(model) or model.resolve().name).rpartition("/")[2]
    same = base.resolve() == model.resolve() if base.is_dir() else base.name == name
    return None if same else base_name


def run_template_options(export: Path) -> dict[str, Any]:
    """Return ``data.chat_template_options`` of the run that exported a model or adapter, if its directory is inside the run's."""
    if export.resolve().name not in ("hf", "adapter"):
        return {}
    run = export.resolve().parent
    options = setting(run_settings(run), "data.chat_template_options") or {}
    if options:
        variables = ", ".join(f"{name}: {value}" for name, value in options.items())
        logger.warning("chat template with %s (data.chat_template_options of %s)", variables, run / RUN_FILE)
    return options


def run_settings(run: Path) -> dict[str, Any]:
    """Return the settings that a run has written into its directory; empty without any that can be read."""
    try:
        settings = load_yaml((run / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError) as error:
        logger.warning("%s cannot be read: %s", run / RUN_FILE, error)
        return {}
    return settings if isinstance(settings, dict) else {}


def setting(run: Mapping[str, Any], key: str) -> Any:
    """Return a setting by its path (``data.path``); None where the run has none."""
    value: Any = run
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


# --- heads ---


def head_of(adapter: Path, rows: int, model: Path) -> Literal["reward_model"] | Classification:
    """Return the kind of an adapter's head of so many labels: as recorded with it, in its run, or with the model."""
    from megascend.training.lora.adapter_io import read_head  # torch

    recorded = read_head(adapter)
    if recorded is not None:
        labels, problem_type = recorded
        if len(labels) != rows:
            raise CheckpointError(
                f"{adapter} records {len(labels)} labels ({', '.join(labels)}), and its head has {rows} rows: copy it again"
            )
        if problem_type is None:
            return "reward_model"
        names: dict[str, Any] = {"num_labels": rows} if labels == default_labels(rows) else {"labels": labels}
        return Classification(problem_type=problem_type, **names)
    # A relative path may not name the run's directory.
    run = adapter.resolve().parent
    settings = run_settings(run)
    if classification := settings.get("classification"):
        head = Classification.model_validate(classification)
        if head.label_names is not None and len(head.label_names) != rows:
            raise CheckpointError(
                f"{run / RUN_FILE} names {len(head.label_names)} labels ({', '.join(head.label_names)}), and the head of "
                f"{adapter} has {rows} rows: does the adapter belong to this run?"
            )
        return head if head.label_names is not None else head.model_copy(update={"num_labels": rows})
    if settings and rows == 1:
        return "reward_model"
    problem_type = read_config(model).get("problem_type")
    unknown = f"neither {adapter} nor a run's directory above it tells what its head of {rows} label{'s' * (rows > 1)} learned"
    if rows == 1 and problem_type is None:
        logger.warning("%s: exported as a reward model, without problem_type", unknown)
        return "reward_model"
    problem_type = problem_type or "single_label_classification"
    defaults = " to ".join(dict.fromkeys(("LABEL_0", f"LABEL_{rows - 1}")))
    logger.warning(
        "%s: exported with the names of %s, or as %s, and problem_type: %s", unknown, model, defaults, problem_type
    )
    return Classification(num_labels=rows, problem_type=problem_type)


def stored_head(model: Path) -> Literal["scalar"] | Classification | None:
    """Return the kind of a checkpoint's scalar head by its configuration; None for a language model."""
    header, config = tensor_headers(model).get(WEIGHT), read_config(model)
    if header is None:
        return None
    rows, problem_type = header.shape[0], config.get("problem_type")
    if rows == 1 and problem_type in (None, "regression"):
        return "scalar"
    # transformers' pipelines read several labels without a problem type so, too.
    return Classification(num_labels=rows, problem_type=problem_type or "single_label_classification")
