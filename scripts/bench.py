"""Front door of the benchmarks: the suite (``--help``), or one of them by name (``NAME --help``)."""

from __future__ import annotations

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main())
