"""What a batch is made of: samples, losses, packing, micro batches, agreement of ranks, results."""
