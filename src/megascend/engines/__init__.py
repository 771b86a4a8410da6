"""What runs micro batches: one package for each kind of engine."""
