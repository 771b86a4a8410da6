"""The settings of ``megascend rl`` that others are derived from."""

from __future__ import annotations

import pytest

from megascend.config.rl import Rollout


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"prompts_per_step": 64}, 640),
        ({"prompts_per_step": 1}, 100),  # a handful of groups proves nothing
        ({"prompts_per_step": 64, "max_groups_without_signal": 5}, 5),
        ({"max_groups_without_signal": 0}, 0),
    ],
)
def test_groups_without_signal_are_bounded_by_ten_batches_or_by_the_setting(settings, bound) -> None:
    assert Rollout(prompts="p.jsonl", reward="m:f", **settings).max_equal_groups == bound
