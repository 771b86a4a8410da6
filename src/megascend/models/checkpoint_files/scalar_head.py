"""The scalar head of a reward model, classifier or critic: a number per label and token instead of logits.

transformers calls it ``score`` in its classes for sequence and token classification. Those of tokens have a bias and a dropout
before the layer, and their checkpoints are critics'; those of sequences are reward models' (one label) and classifiers'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megascend.config.data import Classification, ProblemType, default_labels
from megascend.config.rules import enforce
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.architectures import ClassifierUnit, classifier_class
from megascend.models.checkpoint_files.exported import OUTPUT, abbreviated
from megascend.models.checkpoint_files.files import TensorHeader

NamedHead = Literal["lm", "scalar", "new_sequence_classifier", "new_token_classifier", "reward_model"]
HeadKind = NamedHead | Classification
"""Output of a backend's model: logits; the checkpoint's scalar head; or a scalar head drawn at random in its place.

``reward_model`` is ``scalar`` where the checkpoint has such a head, else ``new_sequence_classifier``. A ``Classification`` is the
head of a sequence classifier with its labels: the checkpoint's where it has one, else a new one.
"""

WEIGHT, BIAS = "score.weight", "score.bias"
DEFAULT_DROPOUT = 0.1
"""transformers', where a token classifier's configuration names none."""

_CLASS = re.compile(r"^(?P<model>\w+)For(?P<task>\w+)$")
_TASKS: dict[str, ClassifierUnit] = {"SequenceClassification": "sequence", "TokenClassification": "token"}
_PURPOSES: dict[ClassifierUnit, str] = {"sequence": "classifiers and reward models", "token": "critics"}


@dataclass(frozen=True)
class ScalarHead:
    """The layer ``score`` with an output for each label.

    Attributes:
        unit: kind of transformers' classifier: of sequences or of tokens.
        bias: the layer has one.
        dropout: dropout probability before the layer in training.
        std: standard deviation of fresh weights; None: they come from the checkpoint.
        labels: names of the outputs, in their order.
        problem_type: transformers' name for what a classifier learns; None for reward models and critics.
    """

    unit: ClassifierUnit
    bias: bool
    dropout: float = 0.0
    std: float | None = None
    labels: tuple[str, ...] = default_labels(1)
    problem_type: ProblemType | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its weights in a checkpoint."""
        return (WEIGHT, BIAS) if self.bias else (WEIGHT,)

    @property
    def outputs(self) -> int:
        """Return the number of values per token."""
        return len(self.labels)

    @property
    def fresh(self) -> bool:
        """Check whether its weights are drawn at random, not read."""
        return self.std is not None


def find(
    head: HeadKind, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], model_dir: Path
) -> ScalarHead | None:
    """Return the scalar head of a backend's model; None for a causal language model. ``tensors``: of the checkpoint."""
    scalar_head = _find(head, config, tensors, model_dir)
    if scalar_head is not None and classifier_class(config, scalar_head.unit) is None:
        title = f"{scalar_head.unit.capitalize()}Classification"
        raise ConfigError(
            f"{model_dir}: transformers has no ...For{title} of model_type {config.get('model_type')!r}; "
            f"{_PURPOSES[scalar_head.unit]} need a model for which it has one, such as qwen3 or llama"
        )
    return scalar_head


def _find(
    head: HeadKind, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], model_dir: Path
) -> ScalarHead | None:
    # By the ending: some classes store the head under a prefix, which is reported below.
    weight_name = next((name for name in tensors if name.split(".")[-2:] == ["score", "weight"]), None)
    if head == "lm":
        if weight_name is not None:
            raise CheckpointError(
                f"{model_dir}: {weight_name} is the head of a classifier (a reward model, a critic): set head='scalar', or in a "
                "run file bradley_terry or classification"
            )
        return None
    if isinstance(head, Classification):
        return _classifier(head, weight_name, config, tensors, model_dir)
    if head == "reward_model":
        head = "new_sequence_classifier" if weight_name is None else "scalar"
    if head != "scalar":
        if weight_name is not None:
            raise CheckpointError(
                f"{model_dir} has a head already, {weight_name}: head={head!r} would drop it; set head='scalar'"
            )
        return _fresh(head, config)
    if weight_name is None:
        raise CheckpointError(
            f"{model_dir} has no {WEIGHT}; for a new head on a causal language model set head='new_sequence_classifier' (reward "
            "models) or head='new_token_classifier' (critics)"
        )
    stored = _stored(weight_name, config, tensors, model_dir)
    if stored.outputs != 1:
        raise CheckpointError(
            f"{model_dir}: {WEIGHT} has shape {list(tensors[WEIGHT].shape)}, not the one row (num_labels: 1) of a reward model "
            "or critic; set head=megascend.Classification(...)"
        )
    if config.get("problem_type") not in (None, "regression"):
        raise CheckpointError(f"{model_dir}: problem_type={config['problem_type']!r} is not that of one number a token")
    return stored


def _fresh(head: HeadKind, config: Mapping[str, Any]) -> ScalarHead:
    unit: ClassifierUnit = "token" if head == "new_token_classifier" else "sequence"
    return ScalarHead(unit, bias=unit == "token", std=float(config.get("initializer_range") or 0.02))


def _classifier(
    settings: Classification,
    name: str | None,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorHeader],
    model_dir: Path,
) -> ScalarHead:
    """Return the head of a sequence classifier; ``name``: of its weight in the checkpoint, None for a new one."""
    chosen, problem = settings.label_names, settings.problem_type
    if name is None:
        if chosen is None and problem == "regression":
            chosen = default_labels(1)
        if chosen is None:
            raise ConfigError(
                f"classification: {model_dir} has no {WEIGHT}, so the labels of its new head are not known: set "
                "classification.labels: [NAME, ...], or classification.num_labels"
            )
        return replace(_fresh("new_sequence_classifier", config), labels=chosen, problem_type=problem)
    head, rows = _stored(name, config, tensors, model_dir), tensors[WEIGHT].shape[0]
    if head.unit == "token":
        raise CheckpointError(
            f"{model_dir}: classification trains classifiers of sequences, and architectures={config['architectures']} is "
            "one of tokens"
        )
    if config.get("problem_type") not in (None, problem):
        raise ConfigError(
            f"classification.problem_type: {problem}, and {model_dir / 'config.json'} has {config['problem_type']!r}: set that"
        )
    if chosen is not None and len(chosen) != rows:
        raise ConfigError(
            f"classification: {len(chosen)} labels ({abbreviated([*chosen])}), and {WEIGHT} of {model_dir} has {rows} rows "
            f"({abbreviated([*head.labels])}): name as many, or train a model without such a head"
        )
    if settings.labels is not None and head.labels not in (chosen, default_labels(rows)):
        # Other names, or another order, would give the rows that were trained for one label to another.
        raise ConfigError(
            f"classification.labels: {abbreviated([*settings.labels])}, and id2label of {model_dir / 'config.json'} has "
            f"{abbreviated([*head.labels])}: leave classification.labels out, or rename them there"
        )
    enforce(Classification.rules, settings.model_copy(update={"labels": None, "num_labels": rows}))
    return replace(head, labels=settings.labels or head.labels, problem_type=problem)


def _label_names(config: Mapping[str, Any], rows: int, model_dir: Path) -> tuple[str, ...]:
    """Return the names of a stored head's rows: those of ``id2label``, or transformers' defaults without it."""
    names = config.get("id2label")
    if names is None:
        return default_labels(rows)
    by_row = {str(row): str(name) for row, name in names.items()} if isinstance(names, dict) else {}
    labels = tuple(by_row.get(str(row), "") for row in range(rows))
    if not len(by_row) == rows == len({*labels} - {""}):
        raise CheckpointError(
            f"{model_dir / 'config.json'}: id2label is {names!r:.200}, and {WEIGHT} has {rows} row{'s' * (rows > 1)}: name each "
            f"row, from 0 to {rows - 1}, once and unlike the others, or remove id2label"
        )
    return labels


def _stored(name: str, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], model_dir: Path) -> ScalarHead:
    """Return the head of a checkpoint of a sequence or token classifier."""
    classes = config.get("architectures") or []
    match = _CLASS.match(classes[0]) if len(classes) == 1 and isinstance(classes[0], str) else None
    unit = _TASKS.get(match["task"]) if match else None
    if unit is None or name != WEIGHT:
        raise CheckpointError(
            f"{model_dir}: head='scalar' takes a ...ForSequenceClassification or ...ForTokenClassification with a layer score; "
            f"architectures is {classes}, the head {name}"
        )
    shape, bias = tensors[WEIGHT].shape, BIAS in tensors
    if len(shape) != 2:
        raise CheckpointError(f"{model_dir}: {WEIGHT} has shape {list(shape)}; a head has a row for each label")
    # transformers would ignore the bias, and so give other scores than the model was trained for.
    if bias and unit == "sequence":
        raise CheckpointError(f"{model_dir} has {BIAS}, which transformers' {classes[0]} has no place for")
    labels = _label_names(config, shape[0], model_dir)
    return ScalarHead(unit, bias, _dropout(config) if unit == "token" else 0.0, labels=labels)


def _dropout(config: Mapping[str, Any]) -> float:
    # transformers' order of precedence in ...ForTokenClassification.
    settings = (config.get("classifier_dropout"), config.get("hidden_dropout"), DEFAULT_DROPOUT)
    return float(next(value for value in settings if value is not None))


def with_head(
    tensors: Mapping[str, TensorHeader], head: ScalarHead | None, config: Mapping[str, Any]
) -> dict[str, TensorHeader]:
    """Return the headers of the model's weights, with a fresh head in place of the output layer."""
    if head is None or not head.fresh:
        return dict(tensors)
    headers = {name: header for name, header in tensors.items() if name != OUTPUT}
    # A fresh head is exported in the checkpoint's dtype, like all other weights.
    dtype = next(iter(tensors.values())).dtype
    hidden = (config.get("text_config") or config)["hidden_size"]
    shapes = {WEIGHT: (head.outputs, hidden), BIAS: (head.outputs,)}
    return headers | {name: TensorHeader(dtype, shapes[name]) for name in head.names}


def padding_id(config: Mapping[str, Any], model_dir: Path) -> int | None:
    """Return the padding token of a sequence classifier: that of ``config.json``, else its tokenizer's; None without one.

    transformers reads the score at the last token that is another one.
    """
    for part in (config.get("text_config") or {}, config):
        if isinstance(part.get("pad_token_id"), int):
            return part["pad_token_id"]
    try:
        settings, tokenizer = (
            json.loads((model_dir / name).read_text(encoding="utf-8"))
            for name in ("tokenizer_config.json", "tokenizer.json")
        )
        token = settings.get("pad_token")
        name = token.get("content") if isinstance(token, dict) else token
        added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or []}
        vocabulary = tokenizer["model"]["vocab"]
        return added.get(name, vocabulary.get(name) if isinstance(vocabulary, dict) else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a tokenizer of another form, whose padding is unknown


def exported_config(config: Mapping[str, Any], head: ScalarHead | None, model_dir: Path) -> dict[str, Any]:
    """Return ``config.json`` of an export; with a fresh head, or of a classifier, as transformers writes it.

    A sequence classifier has a padding token, without which transformers scores no batch.

    Args:
        model_dir: directory of ``config`` and the tokenizer.
    """
    if head is not None and head.unit == "sequence" and (padding := padding_id(config, model_dir)) is not None:
        config = {**config, "pad_token_id": padding}
    if head is None or not (head.fresh or head.problem_type):
        return dict(config)
    changed: dict[str, Any] = {
        "id2label": {str(row): label for row, label in enumerate(head.labels)},
        "label2id": {label: row for row, label in enumerate(head.labels)},
    }
    if head.problem_type is not None:
        changed["problem_type"] = head.problem_type
    # transformers counts id2label; an entry of an older file would contradict it.
    config = {name: value for name, value in config.items() if name not in ("num_labels", "_num_labels")}
    if not head.fresh:
        return config | changed
    changed["architectures"] = [classifier_class(config, head.unit)]
    if head.unit == "token":
        changed |= {"classifier_dropout": head.dropout}
    return config | changed
