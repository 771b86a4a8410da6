"""Samples of chat records, and the text of their tokens that carry loss."""

from __future__ import annotations

from typing import Any

from megascend.apps.data.columns import parse_record
from megascend.apps.data.findings import Findings
from megascend.apps.data.samples import Encoder, SampleLimits
from megascend.training.batch.sample import Sample


def encode(record: dict[str, Any], tokenizer: Any, **settings: Any) -> tuple[Sample, list[str]]:
    """Return the sample of a record, and the remarks about it."""
    findings = Findings()
    [sample] = Encoder(tokenizer, SampleLimits(4096), findings, **settings).encode(parse_record(record, "f:1"))
    return sample, findings.lines()


def learned(sample: Sample, tokenizer: Any) -> list[str]:
    """Return the runs of tokens that carry loss, as text."""
    runs, before = [], 0.0
    for token, weight in zip(sample.target_ids.tolist(), sample.weights.tolist(), strict=True):
        if weight:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = weight
    return [tokenizer.decode(run) for run in runs]
