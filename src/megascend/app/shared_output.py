"""Whether the output directory is the same one on all hosts of a run, found out before the first step."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.errors import ConfigError
from megascend.io.paths import make_directory

if TYPE_CHECKING:
    from megascend.backend import Backend

WAIT_S = 10.0
"""How long a file of another host may take to be seen here, in seconds: network file systems remember what was not there."""


def check_shared(backend: Backend, output: Path) -> None:
    """Refuse an output directory that the hosts of a run do not share. Collective; on one host it does nothing.

    Every rank writes its part of a checkpoint there, and rank 0 puts the manifest beside them.

    Raises:
        ConfigError: rank 0's directory is not what some ranks see under the same path; the message names hosts and ranks.
    """
    if not backend.groups.launch.several_hosts:
        return
    from megascend.distributed.objects import gather_objects  # imports torch, which reading a run file does not need

    def mark() -> str:
        make_directory(output)
        name = f".shared-{secrets.token_hex(4)}"
        (output / name).touch()
        return name

    name = backend.from_rank_0(mark)
    try:
        seen = gather_objects(
            (socket.gethostname(), _appears(output / name)), "world", backend.groups, "check_shared()"
        )
    finally:
        if backend.rank == 0:
            (output / name).unlink(missing_ok=True)
    if problem := not_shared(output, seen):
        raise ConfigError(problem)


def not_shared(output: Path, seen: list[tuple[str, bool]]) -> str | None:
    """What is wrong, if a rank does not see the file of rank 0's; its host and whether it does, by rank. Pure."""
    blind: dict[str, list[int]] = {}
    for rank, (host, found) in enumerate(seen):
        if not found:
            blind.setdefault(host, []).append(rank)
    if not blind:
        return None
    hosts = ", ".join(
        f"{host} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})" for host, ranks in blind.items()
    )
    return (
        f"output: {output.absolute()} on {seen[0][0]} (rank 0) is another directory than on {hosts}. Every rank writes its "
        "part of a checkpoint there: set output to a directory that all hosts share (NFS, Lustre...), at the same path on each"
    )


def _appears(path: Path) -> bool:
    until = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)
    return True
