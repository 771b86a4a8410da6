"""Sharded checkpoints: everything a run needs to go on, written and read by all ranks."""
