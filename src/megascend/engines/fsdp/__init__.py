"""transformers' own model, sharded layer by layer with torch's ``fully_shard`` (FSDP2). No Megatron."""
