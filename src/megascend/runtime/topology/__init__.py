"""Rank arithmetic and its constraints. Pure: no torch."""
