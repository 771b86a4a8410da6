"""Memory estimate of a rank, by formula, before anything is built. Pure: no torch, no Megatron."""
