"""Experiment trackers (TensorBoard, W&B, ...), selected by name in a run file."""

from megascend.apps.tracking.tracker import TrackedRun, Tracker, register_tracker

__all__ = ["TrackedRun", "Tracker", "register_tracker"]
