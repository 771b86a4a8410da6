"""Front door of the benchmarks: the suite, or one of them by name.

    python scripts/bench.py [--list] [--compare] ...     # the suite, with stored ratios
    python scripts/bench.py NAME --help                  # train, lora, engine ...: a module of scripts/bench
"""

from __future__ import annotations

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main())
