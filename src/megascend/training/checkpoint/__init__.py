"""Sharded checkpoints: everything that a run needs to resume, written and read by all ranks."""
