"""Publish what every rank is doing and identify the ranks that block a collective."""
