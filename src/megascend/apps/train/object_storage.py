"""Copies of a run's checkpoints and of its export in object storage (``checkpoint.remote``), through fsspec. Imports no torch.

REMOTE/checkpoints/step-00000100/    as in the run's directory; its manifest is written last and removed first
REMOTE/checkpoints/latest            the name of one of them
REMOTE/hf, REMOTE/adapter            the export
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.train.run_directory import CHECKPOINTS, EXPORTS
from megascend.errors import CheckpointError, ConfigError, MissingDependencyError, redacted
from megascend.runtime.io.atomic import replacing_directory
from megascend.surroundings import announce
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import LATEST, NAME, Retention, by_preference, superseded
from weightwire.background import BackgroundThread

if TYPE_CHECKING:
    from megascend.apps.train.event_log import EventLog
    from megascend.config import TrainerConfig
    from megascend.config.run import Checkpoint

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts for each directory, after those that the storage's own client makes for each request."""
RETRY_AFTER_S = 2.0
"""Seconds before the second attempt; twice as many before each further one."""


class ObjectStorage:
    """A folder in object storage. Methods raise whatever the storage's client raises; its exceptions share no class."""

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address = address.rstrip("/")
        try:
            # Listings are not cached: another run may have written since.
            self._files, self._root = url_to_fs(self.address, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = address.partition("://")[0]
            remedy = f": pip install 'megascend[{extra}]'" if extra in ("s3", "gs") else ""
            raise MissingDependencyError(f"checkpoint.remote: {redacted(address)}: {error}{remedy}") from None
        except ValueError as error:
            raise ConfigError(
                f"checkpoint.remote: {redacted(address)}: {error}; it is written s3://BUCKET/FOLDER"
            ) from None

    def put(self, directory: Path, name: str, mark: str) -> int:
        """Copy a directory to ``name``, the file ``mark`` last; return its size in bytes. Files of an earlier copy may remain."""
        target = f"{self._root}/{name}"
        if mark == manifest.NAME and self._holds(f"{target}/{mark}", (directory / mark).read_bytes()):
            return 0  # copied before: the manifest has the digests of all files
        sizes = {
            str(file.relative_to(directory)): file.stat().st_size for file in directory.rglob("*") if file.is_file()
        }
        if self._files.exists(f"{target}/{mark}"):
            self._files.rm_file(f"{target}/{mark}")
        for file in sorted(sizes, key=lambda file: (file == mark, file)):
            self._files.put_file(str(directory / file), f"{target}/{file}")
            stored = self._files.info(f"{target}/{file}")["size"]
            if stored != sizes[file]:
                raise OSError(f"{name}/{file} has {stored} bytes there, and {sizes[file]} here")
        return sum(sizes.values())

    def _holds(self, path: str, content: bytes) -> bool:
        return self._files.exists(path) and self._files.cat_file(path) == content

    def check(self) -> None:
        probe = f"{self._root}/.write-test"
        self._files.pipe_file(probe, b"megascend")
        self._files.rm_file(probe)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        folder = f"{self._root}/{CHECKPOINTS}"
        # Storage without folders lists a missing one as empty, others raise.
        entries = self._files.ls(folder, detail=False) if self._files.exists(folder) else []
        names = (NAME.fullmatch(entry.rstrip("/").rpartition("/")[2]) for entry in entries)
        return sorted(
            int(name[1]) for name in names if name and self._files.exists(f"{folder}/{name[0]}/{manifest.NAME}")
        )

    def candidates(self) -> list[int]:
        """Return the steps to resume from, the best first."""
        file = f"{self._root}/{CHECKPOINTS}/{LATEST}"
        name = NAME.fullmatch(self._files.cat_file(file).decode().strip()) if self._files.exists(file) else None
        complete = self.steps()
        latest = int(name[1]) if name else None
        return by_preference(complete, latest if latest in complete else None)

    def set_latest(self, name: str) -> None:
        self._files.pipe_file(f"{self._root}/{CHECKPOINTS}/{LATEST}", f"{name}\n".encode())

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first."""
        folder = f"{self._root}/{CHECKPOINTS}/step-{step:08d}"
        self._files.rm_file(f"{folder}/{manifest.NAME}")
        self._files.rm(folder, recursive=True)

    def fetch(self, name: str, directory: Path) -> None:
        """Copy a checkpoint to ``directory``, which appears when it is complete and all files are what was saved."""
        folder = f"{self._root}/{CHECKPOINTS}/{name}"
        text = self._files.cat_file(f"{folder}/{manifest.NAME}")
        files = manifest.parse(text.decode(), Path(name) / manifest.NAME).files
        with replacing_directory(directory) as fresh:
            for file in files:
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{folder}/{file}", str(fresh / file))
            if problems := manifest.problems(fresh, files, files):
                raise CheckpointError(f"{self.address}/{CHECKPOINTS}/{name}: {problems[0]}")
            (fresh / manifest.NAME).write_bytes(text)


def fetch_checkpoint(config: TrainerConfig, overwrite: bool, resume: str | Path | None) -> None:
    """Copy the best checkpoint in ``checkpoint.remote`` to a run that has none. On rank 0, before it decides where to start."""
    settings, here = config.checkpoint, Retention(config.output / CHECKPOINTS)
    if settings.remote is None or overwrite or here.steps() or resume not in (None, "auto"):
        return
    storage = ObjectStorage(settings.remote)
    try:
        steps = storage.candidates()
    except Exception as error:
        raise CheckpointError(f"checkpoint.remote: {settings.remote} cannot be read: {reason(error)}") from error
    if steps and resume is None:
        raise ConfigError(
            f"checkpoint.remote: {settings.remote} holds a run (step {steps[0]}): continue it with --resume auto, or start over "
            "with --overwrite"
        )
    problem = None
    for step in steps:
        path = here.path(step)
        announce(f"copying {path.name} from {settings.remote}")
        try:
            storage.fetch(path.name, path)
            return
        except Exception as error:  # noqa: BLE001  an earlier one may be good
            problem = f"{path.name}: {reason(error)}"
            logger.warning("%s of %s cannot be copied: %s", path.name, settings.remote, reason(error))
    if problem is not None:
        raise CheckpointError(
            f"checkpoint.remote: no checkpoint of {settings.remote} can be copied; the last problem: {problem}"
        )


class Uploads:
    """Copies checkpoints and the export on a thread of its own, while training continues. On rank 0.

    Only the newest checkpoint waits for the one that is being copied: storage that is slower than the saves gets fewer of them.
    Leaving the context waits for the last one, so it is entered before the process groups are created.
    """

    def __init__(self, settings: Checkpoint, event_log: EventLog) -> None:
        assert settings.remote is not None
        self._settings, self._event_log = settings, event_log
        self._storage = ObjectStorage(settings.remote)
        self._changed = threading.Condition()
        self._checkpoint: tuple[Path, Collection[int]] | None = None
        self._export: Path | None = None
        self._clears = self._closing = False
        self._copied: Path | None = None
        self._problems: dict[
            str, str
        ] = {}  # of the last attempt of each kind: a copied export does not replace a checkpoint
        self._thread = BackgroundThread(self._work, name="megascend-upload")
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if nothing can be written to the storage."""
        try:
            self._storage.check()
        except Exception as error:
            raise CheckpointError(
                f"checkpoint.remote: {self._settings.remote} cannot be written: {reason(error)}"
            ) from error

    @property
    def in_use(self) -> set[int]:
        """The step of the checkpoint that is being copied, whose directory must stay."""
        copied = self._copied
        return set() if copied is None else {step_of(copied)}

    def clear(self) -> None:
        """Remove the checkpoints of an earlier run that this one overwrites."""
        with self._changed:
            self._clears = True
            self._changed.notify_all()

    def add_checkpoint(self, path: Path, keep: Collection[int] = ()) -> None:
        """Copy a complete checkpoint, and then remove superseded ones but the steps ``keep``."""
        with self._changed:
            self._checkpoint = path, keep
            self._changed.notify_all()

    def add_export(self, path: Path) -> None:
        with self._changed:
            self._export = path
            self._changed.notify_all()

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last copies.

        Raises:
            CheckpointError: one failed, or takes longer than ``checkpoint.timeout_s``; after an exception it is only logged.
        """
        with self._changed:
            self._closing = True
            busy = self._copied is not None or self._checkpoint is not None or self._export is not None
            self._changed.notify_all()
        if busy:
            announce(f"copying to {self._settings.remote}")
        self._thread.join(self._settings.timeout_s)
        problems = list(self._problems.values())
        if self._thread.is_alive():
            problems.append(f"not complete after {self._settings.timeout_s:g} s (checkpoint.timeout_s)")
        if not problems:
            return
        text = f"checkpoint.remote: {self._settings.remote} is not up to date: {problems[0]}; --resume auto repeats it"
        if kind is None:
            raise CheckpointError(text)
        logger.error("%s", text)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._clears or self._checkpoint or self._export or self._closing)
                clears, checkpoint, export = self._clears, self._checkpoint, self._export
                if not (clears or checkpoint or export):
                    return
                self._clears, self._checkpoint, self._export = False, None, None
                self._copied = checkpoint[0] if checkpoint is not None else None
            if clears:
                self._try("removal", "an earlier run's checkpoints", self._remove_all)
            if checkpoint is not None:
                self._try("checkpoint", checkpoint[0].name, self._copy_checkpoint, *checkpoint)
                self._copied = None
            if export is not None:
                self._try("export", export.name, self._storage.put, export, export.name, EXPORTS[export.name])

    def _try(self, kind: str, name: str, work: Callable[..., int], *arguments: Any) -> None:
        start = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                size = work(*arguments)
                self._problems.pop(kind, None)
                self._event_log.event("uploaded", name=name, bytes=size, seconds=round(time.monotonic() - start, 3))
                return
            except Exception as error:  # noqa: BLE001  raised at the end of the run
                self._problems[kind] = f"{name}: {reason(error)}"
                logger.warning("checkpoint.remote: attempt %d of %d: %s", attempt, ATTEMPTS, self._problems[kind])
            if attempt < ATTEMPTS:
                time.sleep(RETRY_AFTER_S * 2 ** (attempt - 1))
        self._event_log.event("upload_failed", name=name, problem=self._problems[kind])

    def _remove_all(self) -> int:
        for step in self._storage.steps():
            self._storage.remove(step)
        return 0

    def _copy_checkpoint(self, path: Path, keep: Collection[int]) -> int:
        size = self._storage.put(path, f"{CHECKPOINTS}/{path.name}", manifest.NAME)
        self._storage.set_latest(path.name)
        old = [step for step in self._storage.steps() if step not in keep]
        for step in superseded(old, step_of(path), self._settings.keep_last, self._settings.keep_every):
            self._storage.remove(step)
        return size


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def reason(error: BaseException) -> str:
    return redacted(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
