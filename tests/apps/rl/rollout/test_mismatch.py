"""Mismatch figures and truncated weights for distributions of known divergence."""

from __future__ import annotations

import math

import pytest
import torch

from megascend.apps.rl.rollout.mismatch import Mismatch, measure, total, truncated_weights

ENGINE = torch.tensor([0.5, 0.25, 0.25])
TRAINER = torch.tensor([0.4, 0.4, 0.2])


def test_mismatch_gives_the_divergence_of_known_distributions() -> None:
    # Every token as often as the engine samples it: the mean over them is the expectation.
    tokens = torch.tensor([0, 0, 1, 2])
    mismatch = measure(ENGINE.log()[tokens], TRAINER.log()[tokens])
    divergence = torch.nn.functional.kl_div(TRAINER.log(), ENGINE, reduction="sum").item()
    assert mismatch.kl_k3 == pytest.approx(divergence, abs=1e-6)
    assert mismatch.max_abs == pytest.approx(math.log(0.4 / 0.25), abs=1e-6)
    assert mismatch.mean_abs == pytest.approx((2 * math.log(0.5 / 0.4) + math.log(1.6) + math.log(1.25)) / 4, abs=1e-6)


def test_totals_of_parts_match_one_measurement() -> None:
    generator = torch.Generator().manual_seed(0)
    engine, trainer = -torch.rand(50, generator=generator), -torch.rand(50, generator=generator)
    expected = measure(engine, trainer, cap=1.5)
    parts = total(
        measure(engine[part], trainer[part], cap=1.5) for part in (slice(0, 20), slice(20, 20), slice(20, 50))
    )
    for name, value in vars(expected).items():
        assert getattr(parts, name) == pytest.approx(value, rel=1e-12), name
    ratios = (trainer - engine).exp()
    assert expected.truncated == int((ratios > 1.5).sum()) > 0
    assert expected.truncated_share == expected.truncated / 50


def test_weights_are_ratios_up_to_the_cap() -> None:
    engine, trainer = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -1.0, -4.0])
    assert truncated_weights(engine, trainer, 2.0).tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])
    assert truncated_weights(engine, trainer, 100.0).tolist() == pytest.approx([1.0, math.e, math.exp(-1)])
    # Weighted by ratios below the cap, the engine's samples have the trainer's expectation.
    weights = truncated_weights(ENGINE.log(), TRAINER.log(), 100.0)
    values = torch.tensor([1.0, 10.0, 100.0])
    assert float((ENGINE * weights * values).sum()) == pytest.approx(float((TRAINER * values).sum()), rel=1e-6)


def test_empty_and_mismatched_inputs() -> None:
    assert measure(torch.zeros(0), torch.zeros(0)) == Mismatch()
    assert math.isnan(Mismatch().mean_abs)
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        measure(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="above 0"):
        truncated_weights(torch.zeros(2), torch.zeros(2), 0.0)
