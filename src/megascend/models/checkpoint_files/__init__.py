"""Hugging Face checkpoint directories, read without torch or Megatron."""
