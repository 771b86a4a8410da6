"""Whether Megatron computes what a model's configuration says: asked of a small slice of it, before any training."""
