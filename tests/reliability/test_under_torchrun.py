"""Errors under a real torchrun when a rank dies, and a restart whose store still has the first attempt's keys."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megascend.testing import faults

PROGRAM = """
import os, signal, sys, time
from megascend.runtime.bootstrap.runtime import bootstrap
runtime = bootstrap("cpu")
from megascend.config import Parallel
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.distributed.process_groups import initialize
from megascend.runtime.topology.topology import plan

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and os.environ["RANK"] == "1":
    time.sleep(1)
    sys.exit(3)  # before this rank uses the store, which rank 0 has used
if attempt == 1 and os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's signal may arrive before this rank has logged its error
groups = initialize(plan(Parallel(), 2), runtime.platform, 60)
for groups.monitor.step in (1, 2):
    line = f"attempt {attempt} gathered {gather_objects(groups.rank, 'world', groups)}\\n"
    os.write(1, line.encode())  # one write: the other rank writes to the same pipe
"""


@pytest.mark.nightly  # covered: test_hang_and_death.py; cli/test_cli_launch.py
@pytest.mark.torchrun
def test_rank_deaths_before_and_after_a_restart_are_reported(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    # torchrun polls every three seconds, then sends SIGTERM to the survivor, and SIGKILL after another thirty.
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=3"]
    completed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | faults.environment(faults.Fault("die", rank=1, phase="object gather", step=2, attempt=1)),
    )
    assert completed.returncode == 1
    assert completed.stdout.count("attempt 1 gathered [0, 1]") == 2, completed.stdout + completed.stderr[-4000:]
    assert "FAULTS ARE ARMED" in completed.stderr
    message = "PeerLostError: rank 0: 1 of 2 ranks did not arrive"
    (line,) = (line for line in completed.stderr.splitlines() if message in line)
    assert "Rank 1 is gone: its process has ended, last heard of" in line
    assert "in gather_objects of step 2" in line
