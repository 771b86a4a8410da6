"""Published objectives of reinforcement learning, as settings of ``objective``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CLIP_OPTIONS = ("clip_low", "clip_high", "dual_clip")
"""Settings of ``objective`` that are arguments of the loss function, and bound its ratio to the old policy."""


@dataclass(frozen=True)
class Preset:
    """A published objective.

    Attributes:
        paper: first author, year and number in arXiv.
        settings: settings of ``objective``.
        remark: remark on what the paper leaves open, or has beside these settings.
    """

    paper: str
    settings: Mapping[str, Any]
    remark: str = ""


# Engine's log-probabilities as the old ones: with the trainer's own, the ratio is 1 and nothing would be clipped.
_CLIPPED = {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "correction": "none"}

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "Shao et al. 2024, arXiv:2402.03300, eq. 3",
        _CLIPPED | {"advantages": "grpo", "average": "responses"},
    ),
    "dr_grpo": Preset(
        "Liu et al. 2025, arXiv:2503.20783, section 3.2",
        _CLIPPED | {"advantages": "centered", "average": "fixed"},
    ),
    "dapo": Preset(
        "Yu et al. 2025, arXiv:2503.14476, eq. 8 to 13",
        _CLIPPED | {"clip_high": 0.28, "advantages": "grpo", "average": "tokens", "overlong_share": 0.2},
        "with `rollout.drop_equal`; its overlong filtering is `drop_truncated`",
    ),
    "gspo": Preset(
        "Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7",
        {
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "correction": "none",
            "advantages": "grpo",
            "average": "responses",
        },
    ),
    "cispo": Preset(
        "MiniMax 2025, arXiv:2506.13585, eq. 4",
        {
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "correction": "none",
            "advantages": "grpo",
            "average": "tokens",
        },
        "no lower bound of the ratio; the upper one, which the paper does not state, is 5",
    ),
    "reinforce++": Preset(
        "Hu et al. 2025, arXiv:2501.03262",
        _CLIPPED | {"advantages": "reinforce++", "average": "responses"},
        "its variant with a baseline: `advantages: reinforce++_baseline`",
    ),
    "rloo": Preset(
        "Ahmadian et al. 2024, arXiv:2402.14740, eq. 7",
        {"loss": "importance_sampling", "advantages": "rloo", "average": "sums", "correction": "truncated"},
    ),
}
