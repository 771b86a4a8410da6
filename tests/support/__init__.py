"""Helpers of megascend's own tests, of ``scripts/parity.py`` and of measurements; users' tests have :mod:`megascend.testing`."""
