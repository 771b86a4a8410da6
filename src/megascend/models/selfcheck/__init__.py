"""Self-check: compare a small slice of a model in the engine with transformers, before training starts."""
