"""Engines run micro batches: one package for each kind."""
