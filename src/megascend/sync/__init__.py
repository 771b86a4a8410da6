"""Send a backend's weights, from any number of ranks, to any number of inference engines: all of it and verified, or nothing."""

from megascend.sync.push import PushResult
from megascend.sync.sync import WeightSync

__all__ = ["PushResult", "WeightSync"]
