"""Tests against a real vLLM, which CI does not run, can be collected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tests_against_a_real_vllm_import_existing_modules() -> None:
    # Importing them needs no vLLM; the variable only says that they are wanted.
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", "tests/real_vllm"],
        env=os.environ | {"MEGASCEND_VLLM_PYTHON": sys.executable},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
