"""``import megascend`` and ``megascend --help`` are quick, because neither imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time

HEAVY = ("torch", "megatron", "mcore_bridge", "transformers", "peft", "numpy", "datasets")


def run(code: str) -> tuple[str, float]:
    """Output of a fresh interpreter, and the seconds it took."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "NO_COLOR": "1"}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout, time.perf_counter() - start


def test_importing_megascend_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import megascend; seconds = time.perf_counter() - start\n"
        f"print(seconds, [name for name in {HEAVY} if name in sys.modules])"
    )
    outputs = [run(code)[0].split(maxsplit=1) for _ in range(5)]
    assert outputs[0][1].strip() == "[]"
    assert min(float(seconds) for seconds, _ in outputs) < 0.1


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules]))\n"
        "sys.argv = ['megascend', '--help']\n"
        "from megascend.cli.main import main; main()"
    )
    outputs = [run(code) for _ in range(5)]
    text = outputs[0][0]
    for command in ("train", "doctor", "show-config", "new-model", "export"):
        assert command in text
    assert text.strip().splitlines()[-1] == "[]"
    assert min(seconds for _, seconds in outputs) < 0.4


def test_reading_a_config_needs_no_torch() -> None:
    code = (
        "import sys; from megascend.config import load_config; import megascend.train.loop, megascend.train.data\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert run(code)[0].strip() == "[]"
