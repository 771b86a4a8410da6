"""Assertions of shared prefixes, for every engine. ``run`` calls a function of :mod:`support.prefix_runs` on ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.prefix_runs import GROUP, SEPARATE, SHARED, common_tokens

Run = Callable[..., Any]


def assert_fields_stay_their_own(run: Run, engine: str, checkpoint: Path, experts: int = 0) -> None:
    (shared, values), (unshared, expected) = (
        run("outcomes", engine, checkpoint, batching, experts) for batching in (SHARED, SEPARATE)
    )
    assert set(unshared.values()) == {0}
    assert min(shared.values()) > 0
    assert values.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            values[name], tensor, rtol=1e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_others_keep_every_bit(run: Run, engine: str, checkpoint: Path) -> None:
    before, after = run("branches_before_and_after_one_changes", engine, checkpoint)
    assert all(torch.equal(one, other) for one, other in zip(before[:-1], after[:-1], strict=True))
    assert not torch.equal(before[-1], after[-1])


def assert_tenants_share_alone(run: Run, engine: str, checkpoint: Path) -> None:
    shared, losses = run("tenants", engine, checkpoint, SHARED, 0.0)
    _, expected = run("tenants", engine, checkpoint, SEPARATE, 0.0)
    assert shared == common_tokens(GROUP) + common_tokens(GROUP[:2])
    assert losses == pytest.approx(expected, rel=1e-5)
    # With dropout a prefix has other activations in each sample.
    assert run("tenants", engine, checkpoint, SHARED, 0.5)[0] == 0


def assert_texts_share_beside_images(run: Run, engine: str, checkpoint: Path) -> None:
    shared, figures = run("beside_images", engine, checkpoint, SHARED)
    _, expected = run("beside_images", engine, checkpoint, SEPARATE)
    assert shared == common_tokens(GROUP)
    torch.testing.assert_close(figures, expected, rtol=1e-5, atol=2e-5)
