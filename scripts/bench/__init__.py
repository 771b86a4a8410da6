"""The benchmarks of ``scripts/bench.py``: a module each, the suite of their lines, and what they share."""
