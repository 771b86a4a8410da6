"""Every metric that a run writes is declared with its unit and meaning."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from megascend.apps.rl.records import PANELS as RL_PANELS
from megascend.apps.rl.records import RlRecord
from megascend.apps.train.plot import PANELS
from megascend.apps.train.records import StepRecord
from megascend.apps.train.run_log import MetricsRecord
from megascend.training.batch.loss import LossInputs
from megascend.training.batch.losses import BUILT_IN, LOSS_METRICS
from megascend.training.batch.metrics import declared_metrics


@pytest.mark.parametrize("record", [StepRecord, RlRecord])
def test_fields_of_records_are_declared(record: type[MetricsRecord]) -> None:
    names = {field.name for field in fields(record)} - {"metrics"}  # those of the loss, which LOSS_METRICS declares
    assert declared_metrics(record).keys() == names


@pytest.mark.parametrize(("panels", "record"), [(PANELS, StepRecord), (RL_PANELS, RlRecord)])
def test_panels_draw_declared_metrics(panels: tuple, record: type[MetricsRecord]) -> None:
    keys = {panel.key for panel in panels} | {panel.second[0] for panel in panels if panel.second is not None}
    assert keys <= declared_metrics(record).keys()


def test_metrics_of_built_in_losses_are_declared() -> None:
    values = torch.zeros(2, requires_grad=True)
    inputs = LossInputs(
        targets=torch.zeros(2, dtype=torch.int64),
        weights=torch.ones(2),
        sample=torch.arange(2),
        sample_count=2,
        pairs=torch.tensor([[0, 1]]),
        reduce_context=lambda tensor: tensor,
        entropy=torch.zeros(2),
        advantages=torch.ones(2),
        old_logprobs=torch.zeros(2),
        ref_logprobs=torch.zeros(2),
        returns=torch.zeros(2),
        old_values=torch.zeros(2),
        candidate_ids=torch.tensor([[0], [1]]),
        teacher_logprobs=torch.full((2, 1), -1.0),
        candidate_logprobs=torch.full((2, 1), -1.0),
        last=torch.arange(2),
        labels=torch.tensor([1.0, 0.0]),
    )
    reported: set[str] = set()
    for loss in BUILT_IN.values():
        output = loss.function(values, inputs)
        reported |= output[1].keys() if isinstance(output, tuple) else set()
    reported.add("macro_f1")  # of all held-out samples together: apps/train/measurement.py
    assert reported == LOSS_METRICS.keys()
