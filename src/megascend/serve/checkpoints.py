"""Checkpoints of all tenants on disk: an adapter's directory each, and beside it a file that makes it count.

A save writes the directory first, whole or not at all, and the file when it is there; what has no file was never promised.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megascend.io.atomic import replacing
from megascend.io.paths import make_directory
from megascend.serve.errors import RequestRefusedError
from megascend.serve.names import KINDS, CheckpointPath, model_of_run, run_directory


@dataclass(frozen=True)
class Record:
    """What is known of a checkpoint.

    Attributes:
        path: as clients name it.
        base_model: that the adapter is for.
        rank, attention, mlp, output: of the adapter, as the client asked for it.
        saved: seconds since 1970.
        expires: likewise, or None.
        size: bytes on disk.
        public: whether other tenants may load it.
        optimizer: whether the optimizer's state is there.
        request: number of the request that saved it, in its model's order.
    """

    path: CheckpointPath
    base_model: str
    rank: int
    attention: bool
    mlp: bool
    output: bool
    saved: float
    expires: float | None = None
    size: int = 0
    public: bool = False
    optimizer: bool = True
    user_metadata: Mapping[str, str] | None = None
    request: int | None = None


class Checkpoints:
    """The checkpoints under a directory.

    Args:
        root: of all tenants.
        clock: seconds since 1970.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.root, self._clock = root, clock
        make_directory(root)

    def commit(self, tenant: str, record: Record) -> Record:
        """Make a checkpoint count whose directory is complete; with its size."""
        directory = record.path.directory(self.root, tenant)
        sized = replace(record, size=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()))
        self._write(tenant, sized)
        return sized

    def find(self, tenant: str, path: CheckpointPath, *, public: bool = False) -> tuple[Record, Path]:
        """A tenant's checkpoint and its directory.

        Args:
            public: another tenant's is found, too, if it was published.

        Raises:
            RequestRefusedError: 404; there is none, it has expired, or it is another's.
        """
        owners = [tenant]
        if public:
            owners += sorted(d.name for d in self.root.iterdir() if d.is_dir() and d.name != tenant)
        for owner in owners:
            try:
                record = self._read(owner, path)
            except RequestRefusedError:
                if owner == tenant:
                    raise
                continue
            if record is not None and (owner == tenant or record.public):
                return record, path.directory(self.root, owner)
        raise RequestRefusedError(f"there is no checkpoint {path}", 404)

    def of_tenant(self, tenant: str, model: str | None = None) -> list[Record]:
        """A tenant's checkpoints, or those of one model of it, the newest first."""
        return sorted(self._all(tenant, model), key=lambda record: -record.saved)

    def bytes_of(self, tenant: str) -> int:
        """Bytes of a tenant's checkpoints."""
        return sum(record.size for record in self._all(tenant, None))

    def change(self, tenant: str, path: CheckpointPath, **values: Any) -> Record:
        """Change what is known of a tenant's checkpoint: ``public``, ``expires``.

        Raises:
            RequestRefusedError: 404; there is none.
        """
        record = replace(self.find(tenant, path)[0], **values)
        self._write(tenant, record)
        return record

    def delete(self, tenant: str, path: CheckpointPath) -> None:
        """Remove a tenant's checkpoint.

        Raises:
            RequestRefusedError: 404; there is none.
        """
        _, directory = self.find(tenant, path)
        self._remove(directory)

    def remove_expired(self) -> int:
        """Remove what has expired; how many."""
        count = 0
        for tenant in [directory for directory in self.root.iterdir() if directory.is_dir()]:
            for record in list(self._all(tenant.name, None, expired=True)):
                if record.expires is not None and record.expires < self._clock():
                    self._remove(record.path.directory(self.root, tenant.name))
                    count += 1
        return count

    def exists(self, tenant: str, path: CheckpointPath) -> bool:
        """Whether a tenant has such a checkpoint."""
        return self._read(tenant, path) is not None

    def _remove(self, directory: Path) -> None:
        _record_file(directory).unlink(missing_ok=True)  # first: without it the rest does not count
        shutil.rmtree(directory, ignore_errors=True)

    def _all(self, tenant: str, model: str | None, *, expired: bool = False) -> Iterator[Record]:
        runs = [run_directory(self.root, tenant, model)] if model is not None else (self.root / tenant).glob("s-*")
        for run in runs:
            name = model_of_run(run)
            for kind in KINDS if name is not None else ():
                for file in (run / kind).glob("*.json"):
                    try:
                        record = self._read(tenant, CheckpointPath(name or "", kind, file.stem), expired=expired)
                    except RequestRefusedError:
                        continue  # not written by us
                    if record is not None:
                        yield record

    def _read(self, tenant: str, path: CheckpointPath, *, expired: bool = False) -> Record | None:
        directory = path.directory(self.root, tenant)
        try:
            values = json.loads(_record_file(directory).read_text("utf-8"))
            record = Record(**{**values, "path": path})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError) as error:
            raise RequestRefusedError(f"the record of checkpoint {path} is damaged: {error}", 500) from None
        over = record.expires is not None and record.expires < self._clock()
        return None if (over and not expired) or not directory.is_dir() else record

    def _write(self, tenant: str, record: Record) -> None:
        file = _record_file(record.path.directory(self.root, tenant))
        with replacing(file, durable=True) as temporary:
            temporary.write_text(json.dumps({**asdict(record), "path": str(record.path)}, indent=1), "utf-8")


def _record_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.json")
