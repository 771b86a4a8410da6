"""The FSDP2 engine: transformers' own model, sharded layer by layer with torch's ``fully_shard``. No Megatron."""
