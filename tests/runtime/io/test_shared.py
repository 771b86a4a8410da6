"""A lock has one holder, and ends with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascend.runtime.io.shared import hold

HOLDER = """
import sys, time
from pathlib import Path
from megascend.runtime.io.shared import hold
lock = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_hold_has_one_holder_until_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=f"{path} is locked by another process"):
        hold(path)
    assert time.monotonic() - start < 5.0, "without a timeout it does not wait"
    with pytest.raises(TimeoutError):
        hold(path, timeout_s=0.3)
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    lock = hold(path, timeout_s=10.0)
    with pytest.raises(TimeoutError):  # by another object of the same process, too
        hold(path)
    lock.release()
    hold(path).release()
