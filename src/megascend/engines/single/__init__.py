"""The single-process engine on transformers' own model, for laptops, examples and as a reference in users' tests."""
