"""What the memory of a rank will hold, by formula, before anything is built. Pure: no torch, no Megatron."""
