"""Clients of inference engines (``weightwire.engine.InferenceEngine``), one file each."""
