"""One process, transformers' own model: laptops, examples, and a reference for users' tests. No Megatron."""
