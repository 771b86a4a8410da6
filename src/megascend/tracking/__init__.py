"""Trackers: TensorBoard, W&B and the like, by their names in a run file."""

from megascend.tracking.registry import TrackedRun, Tracker, register_tracker

__all__ = ["TrackedRun", "Tracker", "register_tracker"]
