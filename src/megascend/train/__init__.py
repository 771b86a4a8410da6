"""The training step: samples, micro batches, losses, optimizer, and the loop of ``megascend train``."""
