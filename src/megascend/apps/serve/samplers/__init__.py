"""Requests to sample: saved adapters that are loaded for them, what is remembered of responses, and vLLM servers."""
