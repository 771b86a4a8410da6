"""Experiment trackers (TensorBoard, W&B, ...), selected by name in a run file."""

from megascend.config.trackers import TrackedRun, Tracker, register_tracker

__all__ = ["TrackedRun", "Tracker", "register_tracker"]
