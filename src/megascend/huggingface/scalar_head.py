"""The scalar head of a reward model or critic: one number per token instead of logits. Pure.

transformers calls it ``score`` in its classes for sequence and token classification. Those of tokens have a bias and a dropout
before the layer, and their checkpoints are critics'; those of sequences are reward models'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface.exported import OUTPUT
from megascend.huggingface.files import TensorHeader

HeadKind = Literal["lm", "scalar", "new_sequence_classifier", "new_token_classifier", "reward_model"]
"""Output of a backend's model: logits; the checkpoint's scalar head; or a scalar head drawn at random in its place.

``reward_model`` is ``scalar`` where the checkpoint has such a head, else ``new_sequence_classifier``.
"""

Unit = Literal["sequence", "token"]

WEIGHT, BIAS = "score.weight", "score.bias"
DEFAULT_DROPOUT = 0.1
"""transformers', where a token classifier's configuration names none."""

_CLASS = re.compile(r"^(?P<model>\w+)For(?P<task>\w+)$")
_TASKS: dict[str, Unit] = {"SequenceClassification": "sequence", "TokenClassification": "token"}


@dataclass(frozen=True)
class ScalarHead:
    """The layer ``score`` with one output.

    Attributes:
        of: kind of transformers' classifier: of sequences or of tokens.
        bias: the layer has one.
        dropout: dropout probability before the layer in training.
        std: standard deviation of fresh weights; None: they come from the checkpoint.
    """

    unit: Unit
    bias: bool
    dropout: float = 0.0
    std: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its weights in a checkpoint."""
        return (WEIGHT, BIAS) if self.bias else (WEIGHT,)

    @property
    def fresh(self) -> bool:
        """Check whether its weights are drawn at random, not read."""
        return self.std is not None


def find(
    head: HeadKind, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], model_dir: Path
) -> ScalarHead | None:
    """Return the scalar head of a backend's model; None for a causal language model. ``tensors``: of the checkpoint."""
    if head not in get_args(HeadKind):
        raise ConfigError(f"head must be one of {', '.join(get_args(HeadKind))}, got {head!r}")
    # By the ending: some classes store the head under a prefix, which is reported below.
    weight_name = next((name for name in tensors if name.split(".")[-2:] == ["score", "weight"]), None)
    if head == "lm":
        if weight_name is not None:
            raise CheckpointError(
                f"{model_dir}: {weight_name} is the head of a sequence or token classifier (a reward model, a critic): give the "
                "backend head='scalar', or train a checkpoint of a ...ForCausalLM class. A run file trains it with the loss "
                'bradley_terry; docs/data.md, "Reward models and critics"'
            )
        return None
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
    return _stored(weight_name, config, tensors, model_dir)


def _fresh(head: HeadKind, config: Mapping[str, Any]) -> ScalarHead:
    unit: Unit = "token" if head == "new_token_classifier" else "sequence"
    return ScalarHead(unit, bias=unit == "token", std=float(config.get("initializer_range") or 0.02))


def _stored(name: str, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], model_dir: Path) -> ScalarHead:
    classes = config.get("architectures") or []
    match = _CLASS.match(classes[0]) if len(classes) == 1 and isinstance(classes[0], str) else None
    unit = _TASKS.get(match["task"]) if match else None
    if unit is None or name != WEIGHT:
        raise CheckpointError(
            f"{model_dir}: head='scalar' takes transformers' ...ForSequenceClassification and ...ForTokenClassification with a "
            f"layer called score; config.json has architectures={classes}, and the head is {name}"
        )
    shape, bias = tensors[WEIGHT].shape, BIAS in tensors
    if len(shape) != 2 or shape[0] != 1:
        raise CheckpointError(
            f"{model_dir}: {WEIGHT} has shape {list(shape)}; a scalar head has one row (num_labels: 1), and classifiers "
            "with more labels are not trained"
        )
    # transformers would ignore the bias, and so give other scores than the model was trained for.
    if bias and unit == "sequence":
        raise CheckpointError(f"{model_dir} has {BIAS}, which transformers' {classes[0]} has no place for")
    if config.get("problem_type") not in (None, "regression"):
        raise CheckpointError(f"{model_dir}: problem_type={config['problem_type']!r} is not that of one number a token")
    return ScalarHead(unit, bias, _dropout(config) if unit == "token" else 0.0)


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
    shapes = {WEIGHT: (1, hidden), BIAS: (1,)}
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
        return None  # a tokenizer of another form, which says nothing about padding here


def exported_config(config: Mapping[str, Any], head: ScalarHead | None, model_dir: Path) -> dict[str, Any]:
    """Return ``config.json`` of an export; with a fresh head, as transformers writes a classifier with one label.

    A sequence classifier has a padding token, without which transformers scores no batch.

    Args:
        model_dir: directory of ``config`` and the tokenizer.
    """
    if head is not None and head.unit == "sequence" and (padding := padding_id(config, model_dir)) is not None:
        config = {**config, "pad_token_id": padding}
    if head is None or not head.fresh:
        return dict(config)
    classes: Collection[Any] = config.get("architectures") or []
    match = _CLASS.match(str(next(iter(classes), "")))
    if match is None:
        raise CheckpointError(f"export: architectures={list(classes)} in config.json do not tell the model's class")
    task = {unit: task for task, unit in _TASKS.items()}[head.unit]
    changed: dict[str, Any] = {
        "architectures": [f"{match['model']}For{task}"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    if head.unit == "token":
        changed |= {"classifier_dropout": head.dropout}
    return dict(config) | changed
