"""Weights of a backend, on any number of ranks, to any number of inference engines: whole and verified, or not at all."""

from megascend.weightsync.sync import Pushed, WeightSync

__all__ = ["Pushed", "WeightSync"]
