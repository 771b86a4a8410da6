"""Inference engines behind one interface (``base``), one file each."""
