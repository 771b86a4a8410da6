"""Every declared architecture resumes in another layout, as if transformers had trained it without a break."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from megascend.config import Parallel
from megascend.models import expert_count
from megascend.models.registry import proven
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    TrainingCurve,
    bounds,
    case_backend,
    case_checkpoint,
    causal_samples,
    differences,
    first_of_equals,
    hf_reference,
    relative_differences,
    token_lists,
)
from support.model_checks import assert_within
from support.parity_matrix import family_matrix
from support.stacks import family_params

pytestmark = pytest.mark.usefixtures("megatron_imported")

STEPS, SAVED_AFTER = 4, 2
WEIGHTS_BOUND = 1e-3
"""Of any exported tensor, relative: Adam moves a weight whose gradient is near 0 by up to a learning rate either way."""
DENSE = (("TP2 + SP", "single"), ("PP2", "TP2 + SP"))
WITH_EXPERTS = (("EP2", "single"), ("TP2 x EP2 + SP", "PP2"))


class Change(NamedTuple):
    """A layout that saves and one that resumes."""

    saved: Case
    resumed: Case

    @property
    def arch(self) -> str:
        return self.saved.arch

    @property
    def parallel(self) -> Parallel:
        return self.saved.parallel

    @property
    def name(self) -> str:
        return f"{self.saved.name} to {self.resumed.name.partition(': ')[2]}"


def changes() -> list[Change]:
    cases = {case.name: case for case in family_matrix()}
    return [
        Change(cases[f"{architecture.model_type}: {saved}"], cases[f"{architecture.model_type}: {resumed}"])
        for architecture in proven()
        for saved, resumed in (WITH_EXPERTS if expert_count(architecture.tiny) else DENSE)
    ]


def train(
    case: Case, checkpoint: Path, steps: int, load: Path | None = None, save: Path | None = None
) -> TrainingCurve:
    """Take steps in a layout, after a checkpoint or before one; return the figures and the exported weights."""

    def on_rank() -> TrainingCurve:
        with case_backend(case, checkpoint) as backend:
            if load is not None:
                backend.load(load)
            samples = backend.shard(causal_samples(token_lists()))
            losses, norms = [], []
            for _ in range(steps):
                losses.append(backend.forward_backward(samples).loss)
                norms.append(backend.optimizer_step().grad_norm)
            if save is not None:
                backend.save(save, wait=True)
            weights = {name: tensor.clone() for name, tensor in backend.named_weights(receivers="main")}
            return TrainingCurve(losses, norms, [], weights)

    return first_of_equals(case.name, run_distributed(on_rank, case.world_size, init=False, timeout_s=120))


@pytest.mark.parametrize("change", family_params(changes(), ()))  # covered: training/checkpoint/test_resharding.py
def test_resuming_in_another_layout_equals_uninterrupted_training(
    change: Change, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint, tokens = case_checkpoint(parity_folder, change.saved.arch), token_lists()
    first = train(change.saved, checkpoint, SAVED_AFTER, save=tmp_path / "saved")
    rest = train(change.resumed, checkpoint, STEPS - SAVED_AFTER, load=tmp_path / "saved")
    complete = TrainingCurve(first.losses + rest.losses, first.grad_norms + rest.grad_norms, [], rest.weights)
    reference = hf_reference(parity_folder, checkpoint, tokens, steps=STEPS, weights=True)
    difference, relative = differences(complete, reference), relative_differences(complete, reference)
    loss_bound, norm_bound = bounds(change.resumed, parity_folder, checkpoint, tokens, STEPS)
    assert_within(difference, loss=loss_bound, grad_norm=norm_bound)
    assert relative.weights is not None
    assert relative.weights <= WEIGHTS_BOUND, (difference, relative)
