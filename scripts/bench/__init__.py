"""Parts of ``scripts/bench.py``: lines to measure, their processes, and the comparison with stored ratios."""
