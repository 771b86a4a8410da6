"""Parts of a batch: samples, losses, packing, micro batches, agreement of ranks, results."""
