"""``scripts/test_release.sh``: the wheel, the source distribution and the container's steps, in empty environments."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly  # covered: test_wheel.py builds the wheel
def test_distributions_install_alone() -> None:
    """Build, check with twine, install and train; needs a package index and 2 GB of disk for each environment."""
    command = ["bash", "scripts/test_release.sh", "sdist", "none", "stack-0-16", "container"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200, check=False)
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-2000:]
    assert completed.stdout.count("worked, in") == 4
