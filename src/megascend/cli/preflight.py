"""What can be checked about a run in milliseconds, before any process is started or torch is imported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from megascend.errors import CheckpointError

if TYPE_CHECKING:
    from megascend.config import RunConfig
    from megascend.parallel.topology import Topology


def check_topology(config: RunConfig, world_size: int) -> Topology | None:
    """The layout of ``world_size`` ranks for this run's model; None if the model is not there (yet) to be checked.

    Raises:
        TopologyError: the layout fits neither the world size nor the model.
        CheckpointError: the model's config.json is not JSON.
    """
    from megascend.parallel.topology import ModelShape, plan

    path = config.model / "config.json"
    if not path.is_file():
        return None
    try:
        hf_config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): the checkpoint is damaged or incomplete") from None
    return plan(config.parallel, world_size, ModelShape.from_hf_config(hf_config))
