"""Classes of transformers' classifiers: which architectures have one, compared with transformers' own Auto classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from megascend.config import Classification
from megascend.engines.common.heads import model_class
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files import scalar_head
from megascend.models.checkpoint_files.architectures import ClassifierUnit, classifier_class
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.registry import proven
from megascend.testing import tiny_config

LM = {"model.embed_tokens.weight": TensorHeader("F32", (8, 4)), "lm_head.weight": TensorHeader("F32", (8, 4))}
LABELS = ("no", "yes")


@pytest.mark.parametrize("unit", get_args(ClassifierUnit))
def test_classifier_class_is_that_of_transformers(unit: ClassifierUnit) -> None:
    auto: Any = AutoModelForSequenceClassification if unit == "sequence" else AutoModelForTokenClassification
    names = {}
    for kind in (kind for architecture in proven() for kind in architecture.model_types):
        settings = {"model_type": kind, "architectures": ["DeepseekV3ForCausalLM"]}
        names[kind] = classifier_class(settings, unit)
        expected = auto._model_mapping._model_mapping.get(kind)
        if kind == "kimi_k2":  # which transformers does not have: it is DeepSeek-V3 under another name
            expected = f"DeepseekV3For{unit.capitalize()}Classification"
        assert names[kind] == expected
    assert names["llama"] is not None
    assert names["olmoe"] is None


@pytest.mark.parametrize("head", ["reward_model", Classification(num_labels=2), "new_token_classifier"])
def test_architecture_without_a_classifier_is_refused(head: Any) -> None:
    config = {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_size": 4}
    with pytest.raises(ConfigError, match=r"transformers has no \.\.\.For\w+Classification of model_type 'olmoe'"):
        scalar_head.find(head, config, LM, Path("olmoe"))
    # Nor is a checkpoint of such a class trained further.
    config["architectures"] = ["OlmoeForSequenceClassification"]
    with pytest.raises(ConfigError, match="'olmoe'"):
        scalar_head.find("scalar", config, {"score.weight": TensorHeader("F32", (1, 4))}, Path("olmoe"))


@pytest.mark.parametrize(
    "names",
    [
        {"0": "a", "1": "a"},
        {"0": "a"},
        {"0": "a", "1": "b", "2": "c"},
        {"0": "a", "1": ""},
        {"0": "a", "2": "b"},
        ["a", "b"],
    ],
)
def test_names_that_are_not_one_for_each_row_are_refused(names: Any) -> None:
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], "id2label": names}
    weight = {"score.weight": TensorHeader("F32", (2, 4))}
    with pytest.raises(CheckpointError, match=r"id2label is .*'a'.*, and score\.weight has 2 rows: name each row"):
        scalar_head.find(Classification(), config, weight, Path("model"))
    config["id2label"] = {"0": "a", "1": "b"}
    head = scalar_head.find(Classification(), config, weight, Path("model"))
    assert head is not None
    assert head.labels == ("a", "b")


def test_export_names_the_class_that_transformers_loads() -> None:
    config = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 4}
    head = scalar_head.find(Classification(labels=LABELS), config, LM, Path("model"))
    exported = scalar_head.exported_config(config, head, Path("model"))
    assert exported["architectures"] == ["Qwen3_5TextForSequenceClassification"]


def test_sequence_classifier_without_a_token_classifier_is_built_by_transformers_engines() -> None:
    """Compare its values at the last token with the sequence classifier's, with the same weights."""
    settings = tiny_config("deepseek_v2")
    config = AutoConfig.for_model(**settings)
    head = scalar_head.find(Classification(labels=LABELS), settings | {"model_type": "deepseek_v2"}, LM, Path("model"))
    model = model_class(config, head).from_config(config, dtype=torch.float32).eval()
    model.score.bias = None
    plain = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    plain.load_state_dict(model.state_dict())
    tokens = torch.tensor([[5, 7, 2, 9]])
    torch.testing.assert_close(model(tokens).logits[:, -1], plain(tokens).logits)
