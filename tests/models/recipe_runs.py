"""``python recipe_runs.py ENGINE JOBS.json``: run recipes of the cookbook one after the other, each on forked ranks.

A helper of ``test_by_name.py``: one process imports the engine for all recipes of a model. JOBS maps a name to the arguments of a
recipe, its script first. Prints a JSON object on the last line: for each name whether it ended, and what it printed or raised.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from importlib import import_module
from pathlib import Path

import megascend
from megascend.errors import DistributedTestError
from megascend.testing import run_distributed


def on_rank(arguments: list[str]) -> str:
    sys.argv, output = arguments, io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(arguments[0], run_name="__main__")
    return output.getvalue()


def main() -> None:
    engine, jobs = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    if engine == "megatron":
        megascend.bootstrap("cpu").load_megatron()
    import_module(f"megascend.engines.{engine}.engine")
    import_module("megascend.engines.step.step")
    results = {}
    for name, arguments in jobs.items():
        try:
            results[name] = True, run_distributed(on_rank, 2, arguments, init=False, timeout_s=120)[0]
        except DistributedTestError as error:
            results[name] = False, str(error)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
