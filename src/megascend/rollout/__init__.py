"""Rollouts: inference engines behind one interface, and what becomes of their answers before a trainer learns from them."""
