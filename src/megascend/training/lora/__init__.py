"""LoRA adapters: one, or many tenants on one base model at once."""
