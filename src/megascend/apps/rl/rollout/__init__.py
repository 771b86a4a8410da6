"""Rollouts: inference engines behind one interface, rewards, advantages, and the buffer that feeds the trainer."""
