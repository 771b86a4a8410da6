"""The older way to declare arguments; mcore-bridge reads MindSpeed's defaults through it."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from mindspeed.features_manager import FEATURES_LIST

ONLY_HERE: dict[str, Any] = {
    # arguments that no feature declares
    "rope_scaling_beta_fast": 32,
    "rope_scaling_beta_slow": 1,
    "rope_scaling_mscale": 1.0,
    "rope_scaling_mscale_all_dim": 0.0,
    "rope_scaling_original_max_position_embeddings": None,
    "rope_scaling_type": None,
    "shape_order": "SBH",
    "yarn_scaling_factor": 1.0,
}


def process_args(parser: ArgumentParser) -> ArgumentParser:
    """Declare the older arguments, then those of every feature in ``FEATURES_LIST``, which win."""
    parser.conflict_handler = "resolve"
    for name, default in ONLY_HERE.items():
        kind = str if default is None else type(default)
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default)
    for feature in FEATURES_LIST:
        feature.register_args(parser)
    return parser
