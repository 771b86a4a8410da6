"""Tasks of lm-eval-harness in files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml


def write_task(folder: Path, documents: Sequence[Mapping[str, str]], metric: str, **settings: object) -> str:
    """Write the task ``small``, whose documents have a question ``q`` and an answer ``a``; return its file.

    Args:
        metric: metric, aggregation and whether higher is better, separated by spaces (``acc mean true``).
        settings: further settings of the task, or others than here.
    """
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    name, aggregation, higher_is_better = metric.split()
    task = {
        "task": "small",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "metric_list": [
            {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better == "true"},
        ],
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(task | settings))
    return str(path)
