"""``.journal`` in the service's storage: the journal, and the models' saves. One server at a time uses it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascend.config.serve import ServeConfig
from megascend.errors import CheckpointError, ConfigError
from megascend.io.atomic import replacing, synchronise
from megascend.io.paths import make_directory
from megascend.serve.journal import Journal
from megascend.serve.journal_writer import JournalWriter, rewrite
from megascend.serve.journaled import Journaled
from megascend.serve.ledger import Kept, Ledger
from megascend.serve.recovery import Recovery
from megascend.serve.service import Service

NAME = ".journal"
"""No tenant has a name with a dot."""
LOCK_S = 30.0
"""How long a server that was killed may take to be gone."""
log = logging.getLogger("megascend.serve")


def keep_in_journal(service: Service) -> None:
    """Restore what the journal in the service's storage says, and keep from now on all that the service promises.

    Raises:
        ConfigError: another server uses it, or it belongs to another model or to other settings.
        CheckpointError: it is damaged, or what it says cannot be restored.
    """
    folder = service.settings.storage / NAME
    saves = folder / "saves"
    make_directory(saves)
    folder.chmod(0o700)
    lock = _lock(folder)
    _check_base(folder / "base.json", service.settings)
    start = time.monotonic()
    journal, ledger = Journal(folder / "journal"), Ledger()
    for entry, place in journal.read():
        ledger.add(entry, place)
    if journal.cut:
        log.warning("%s ended within an entry that nobody was promised: %d bytes cut off", journal.path, journal.cut)
    try:
        rewrite(journal, ledger)
    except OSError as error:
        log.warning("%s could not be made smaller: %s", journal.path, error)
    _check_saves(saves, ledger)

    def gone(directories: Sequence[str]) -> None:
        for directory in directories:
            shutil.rmtree(saves / directory, ignore_errors=True)

    found = ledger.copy()
    bodies = journal.reader()

    def body(kept: Kept) -> bytes:
        return os.pread(bodies, kept.place.length, kept.place.offset)

    writer = JournalWriter(journal, ledger, gone)
    service.durability = journaled = Journaled(service, writer, saves, service.settings.durable_steps, lock)
    try:
        count = Recovery(service, journaled, body).run(found)
    finally:
        os.close(bodies)
    if found.sessions:
        log.warning(
            "journal: %d sessions, %d models, %d requests to repeat", len(found.sessions), len(found.models), count
        )
        journaled.when_recovered = lambda: log.warning("journal: recovered in %.1f s", time.monotonic() - start)


def _lock(folder: Path) -> int:
    """A descriptor that holds the directory's lock until it is closed, or the process ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end:
                os.close(descriptor)
                raise ConfigError(f"another server uses {folder}; give each its own storage") from None
            time.sleep(0.1)
        else:
            return descriptor


def _check_saves(saves: Path, ledger: Ledger) -> None:
    """Remove what no entry names, and raise if something is missing."""
    for path in saves.iterdir():
        if path.name not in ledger.directories:
            shutil.rmtree(path, ignore_errors=True)
    missing = sorted(name for name in ledger.directories if not (saves / name).is_dir())
    if missing:
        raise CheckpointError(
            f"{saves / missing[0]} is missing, which the journal beside it needs; restore it from a copy"
        )


def _check_base(path: Path, settings: ServeConfig) -> None:
    """Raise if the journal was begun with another model, or with settings that change what repeated requests give."""
    now = {
        "model": _digest(settings.model), "precision": settings.precision, "alpha": settings.alpha,
        "unembed": settings.unembed, "engine": settings.engine,
    }  # fmt: skip
    if path.exists():
        before: dict[str, Any] = json.loads(path.read_text("utf-8"))
        changed = [name for name, value in now.items() if before.get(name) != value]
        if changed:
            was = ", ".join(f"{name} {before.get(name)!r} then, {now[name]!r} now" for name in changed)
            raise ConfigError(
                f"{path.parent} belongs to a server with other settings ({was}); use these again, or another storage"
            )
        return
    with replacing(path, durable=True) as temporary:
        temporary.write_text(json.dumps(now), "utf-8")
    synchronise(path.parent)


def _digest(model: Path) -> str:
    """Of a model's configuration, and of names and sizes of its weights: not of the weights, which would take minutes."""
    parts = [(model / "config.json").read_bytes()]
    parts += [f"{file.name} {file.stat().st_size}".encode() for file in sorted(model.glob("*.safetensors"))]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()
