"""Sampling from the model in training, on the ranks that train it."""
