"""Checkpoints of all tenants on disk: their names, the only mapping from a client's string to a path, and their records.

A save writes the adapter's directory atomically, then the record beside it. A directory without a record is an unfinished save
and is ignored.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from megascend.apps.serve.api.bodies import LoraSettings
from megascend.apps.serve.errors import RequestRefusedError
from megascend.errors import CheckpointError, ConfigError
from megascend.runtime.io.atomic import replacing
from megascend.runtime.io.paths import make_directory

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
SCHEME = "tinker://"
RECORD_SUFFIX = ".json"
"""End of the name of a checkpoint's record, a file beside its directory."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODEL = re.compile(r"(s-[0-9a-f]{32}):train:(0|[1-9][0-9]{0,8})")


def new_session() -> str:
    return f"s-{secrets.token_hex(16)}"


def model_name(session: str, number: int) -> str:
    """Return the name of a session's model; clients derive the same name."""
    return f"{session}:train:{number}"


def sampler_name(session: str, number: int) -> str:
    """Return the name of a session's sampler."""
    return f"{session}:sample:{number}"


@dataclass(frozen=True)
class CheckpointPath:
    """A checkpoint's name in the protocol, ``tinker://MODEL/KIND/NAME``.

    Attributes:
        model: name of the model it was saved from.
        kind: ``weights`` for training, ``sampler_weights`` for sampling only.
    """

    model: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        # The parts become directory names: accept nothing that could leave the tenant's directory.
        if not _MODEL.fullmatch(self.model) or self.kind not in KINDS:
            raise RequestRefusedError(f"no such checkpoint: {str(self)[:200]!r}", 404)
        if not _NAME.fullmatch(self.name) or ".." in self.name or self.name.endswith("."):
            raise RequestRefusedError(
                f"{self.name[:120]!r} cannot be a checkpoint's name: up to 100 letters, digits, '.', '_' and '-', beginning with "
                "a letter or digit, without '..'"
            )

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        """Parse a checkpoint path sent by a client.

        Raises:
            RequestRefusedError: 400, not such a path; 404, no such model.
        """
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3:
            raise RequestRefusedError(f"{text[:200]!r} is not a checkpoint path: expected {SCHEME}MODEL/weights/NAME")
        return cls(parts[0], cast("Kind", parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """Identifier within its model, as used in listings."""
        return f"{self.kind}/{self.name}"

    def directory(self, root: Path, tenant: str) -> Path:
        return run_directory(root, tenant, self.model) / self.kind / self.name


def run_directory(root: Path, tenant: str, model: str) -> Path:
    """Return the directory of a model's checkpoints."""
    match = _MODEL.fullmatch(model)
    if match is None:
        raise RequestRefusedError(f"no such model: {model[:200]!r}", 404)
    return root / tenant / f"{match[1]}.{match[2]}"


def model_of_run(directory: Path) -> str | None:
    """Invert :func:`run_directory`: the model's name; None for other directories."""
    session, _, number = directory.name.rpartition(".")
    name = f"{session}:train:{number}"
    return name if _MODEL.fullmatch(name) else None


@dataclass(frozen=True)
class CheckpointRecord:
    """Metadata of a checkpoint, stored as JSON beside its directory.

    Attributes:
        path: its name in the protocol.
        base_model: model that the adapter was trained on.
        rank, attention, mlp, output: the adapter's LoRA settings.
        saved: seconds since the epoch.
        expires: seconds since the epoch, or None.
        size: bytes on disk.
        public: True if other tenants may load it.
        optimizer: True if it has optimizer state.
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

    @property
    def lora(self) -> LoraSettings:
        return LoraSettings(rank=self.rank, train_attn=self.attention, train_mlp=self.mlp, train_unembed=self.output)


class Checkpoints:
    """The checkpoints below a directory. Methods that read or write several files are for threads.

    Args:
        root: directory with one subdirectory per tenant.
        quota: most bytes of one tenant's checkpoints.
    """

    def __init__(self, root: Path, quota: int = 2**62) -> None:
        self.root, self._quota = root, quota
        self._saving: Counter[CheckpointPath] = Counter()
        self._reserved: Counter[str] = Counter()  # bytes of saves in progress, by tenant
        self._sizes: Counter[tuple[LoraSettings, bool]] = Counter()  # largest, of saves with these layers and this rank
        # Held for a moment, as the event loop takes it; and one for what waits for the disk.
        self._lock, self._changing = threading.Lock(), threading.Lock()
        make_directory(root)
        for trash in root.glob("*/*/*/.*-????????"):  # of removals that the end of a process interrupted
            shutil.rmtree(trash, ignore_errors=True)
        self._bytes: Counter[str] = Counter()
        for tenant in [directory for directory in root.iterdir() if directory.is_dir()]:
            for record in self._records(tenant.name, None, expired=True):
                self._count(tenant.name, record, record.size)

    def _count(self, tenant: str, record: CheckpointRecord, added: int) -> None:
        self._bytes[tenant] += added
        key = (record.lora, record.optimizer)
        self._sizes[key] = max(self._sizes[key], record.size)

    def begin_save(self, tenant: str, record: CheckpointRecord) -> int:
        """Protect a checkpoint's directory from removal until :meth:`end_save`, and reserve the bytes of an earlier save like it.

        Without it, the removal of an earlier checkpoint of that name would take the new files before their record is written.

        Returns:
            The reserved bytes: none for a checkpoint that replaces one, and for the first of its kind.

        Raises:
            ConfigError: the bytes exceed the tenant's quota.
        """
        with self._lock:
            earlier = self._size(tenant, record.path)
            size = self._sizes[record.lora, record.optimizer] if earlier is None else 0
            used = self._bytes[tenant] + self._reserved[tenant]
            if used + size > self._quota:
                raise self._quota_error(used, size)
            self._reserved[tenant] += size
            self._saving[record.path] += 1
        return size

    def end_save(self, tenant: str, path: CheckpointPath, reserved: int) -> None:
        with self._lock:
            self._reserved[tenant] -= reserved
            self._saving[path] -= 1
            self._saving = +self._saving

    def _quota_error(self, used: int, size: int) -> ConfigError:
        return ConfigError(
            f"your checkpoints take {used} bytes, and this one {size}; {self._quota} are allowed (limits.storage_bytes)"
        )

    def commit(self, tenant: str, record: CheckpointRecord) -> CheckpointRecord:
        """Write the record of a complete checkpoint directory, which publishes it; fill in its size.

        Raises:
            ConfigError: it exceeds the tenant's quota, and was removed.
        """
        directory = record.path.directory(self.root, tenant)
        if not directory.is_dir():
            raise CheckpointError(f"{record.path} was saved, and its files are missing")
        # The size is stored, since quotas and listings ask for it often, and a checkpoint does not change once it is published.
        sized = replace(record, size=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()))
        with self._changing:
            earlier = self._size(tenant, record.path)
            added = sized.size - (earlier or 0)
            # Here, where its size is known: the first of its kind reserved nothing, and another rank may have been loaded.
            if added > 0 and self._bytes[tenant] + added > self._quota:
                self._bytes[tenant] -= earlier or 0
                _record_file(directory).unlink(missing_ok=True)
                shutil.rmtree(directory, ignore_errors=True)
                raise self._quota_error(self._bytes[tenant], sized.size)
            self._write(tenant, sized)
            self._count(tenant, sized, added)
        return sized

    def find(self, tenant: str, path: CheckpointPath, *, public: bool = False) -> tuple[CheckpointRecord, Path]:
        """Find a tenant's checkpoint and its directory.

        Args:
            public: also look among the published checkpoints of other tenants.

        Raises:
            RequestRefusedError: 404, missing, expired, or another tenant's.
        """
        owners = [tenant]
        # The path does not name its owner; model names are unguessable, so at most one tenant has it.
        if public:
            owners += sorted(d.name for d in self.root.iterdir() if d.is_dir() and d.name != tenant)
        for owner in owners:
            try:
                record = self._read(owner, path)
            except RequestRefusedError:
                if owner == tenant:
                    raise
                continue  # another tenant's damaged record is not this one's problem
            if record is not None and (owner == tenant or record.public):
                return record, path.directory(self.root, owner)
        raise RequestRefusedError(f"no such checkpoint: {path}", 404)

    def list_records(self, tenant: str, model: str | None = None) -> list[CheckpointRecord]:
        """List a tenant's checkpoints, optionally of one model, newest first."""
        return sorted(self._records(tenant, model), key=lambda record: -record.saved)

    def total_bytes(self, tenant: str) -> int:
        return self._bytes[tenant]

    def problem(self) -> str | None:
        """Return why no file can be written, or None."""
        try:
            with tempfile.TemporaryFile(dir=self.root, buffering=0) as file:
                return None if file.write(bytes(2**16)) == 2**16 else "no space left"
        except OSError as error:
            return error.strerror

    def change(self, tenant: str, path: CheckpointPath, **values: Any) -> CheckpointRecord:
        """Update fields of a checkpoint's record: ``public``, ``expires``."""
        with self._changing:
            record = replace(self.find(tenant, path)[0], **values)
            self._write(tenant, record)
        return record

    def delete(self, tenant: str, path: CheckpointPath) -> None:
        """Delete a tenant's checkpoint.

        Raises:
            RequestRefusedError: 404 as :meth:`find`; 409, it is being saved again.
        """
        with self._changing:
            record, _ = self.find(tenant, path)
            with self._lock:
                if path in self._saving:
                    raise RequestRefusedError(f"{path} is being saved; delete it afterwards", 409)
                trash = self._take_away(tenant, record)
        shutil.rmtree(trash, ignore_errors=True)

    def remove_expired(self) -> int:
        """Delete expired checkpoints; return their number."""
        count = 0
        for tenant in [directory for directory in self.root.iterdir() if directory.is_dir()]:
            for record in list(self._records(tenant.name, None, expired=True)):
                with self._changing:
                    current = self._read(tenant.name, record.path, expired=True)
                    if current is None or current.expires is None or current.expires >= time.time():
                        continue
                    with self._lock:
                        if record.path in self._saving:
                            continue
                        trash = self._take_away(tenant.name, current)
                shutil.rmtree(trash, ignore_errors=True)
                count += 1
        return count

    def exists(self, tenant: str, path: CheckpointPath) -> bool:
        return self._read(tenant, path) is not None

    def _take_away(self, tenant: str, record: CheckpointRecord) -> Path:
        """Remove a checkpoint's record and rename its directory, for a removal that takes long; return the new path."""
        directory = record.path.directory(self.root, tenant)
        # The record first: without it, an interrupted removal leaves a directory that is ignored.
        _record_file(directory).unlink(missing_ok=True)
        self._bytes[tenant] -= record.size
        # Renamed, as another save under this name may begin while its files are removed.
        trash = directory.with_name(f".{directory.name}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            directory.rename(trash)
        return trash

    def _size(self, tenant: str, path: CheckpointPath) -> int | None:
        """Return the size of a checkpoint; None if there is none, 0 if its record cannot be read."""
        try:
            record = self._read(tenant, path, expired=True)
        except RequestRefusedError:
            return 0
        return None if record is None else record.size

    def _records(self, tenant: str, model: str | None, *, expired: bool = False) -> Iterator[CheckpointRecord]:
        runs = [run_directory(self.root, tenant, model)] if model is not None else (self.root / tenant).glob("s-*")
        for run in runs:
            name = model_of_run(run)
            for kind in KINDS if name is not None else ():
                for file in (run / kind).glob(f"*{RECORD_SUFFIX}"):
                    try:
                        record = self._read(tenant, CheckpointPath(name or "", kind, file.stem), expired=expired)
                    except RequestRefusedError:
                        continue  # not one of our records
                    if record is not None:
                        yield record

    def _read(self, tenant: str, path: CheckpointPath, *, expired: bool = False) -> CheckpointRecord | None:
        directory = path.directory(self.root, tenant)
        try:
            values = json.loads(_record_file(directory).read_text("utf-8"))
            record = CheckpointRecord(**{**values, "path": path})
        # A directory: of a checkpoint that an earlier version saved under the name of another one's record.
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except (OSError, ValueError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"damaged: {error}"
            raise RequestRefusedError(f"the record of checkpoint {path} cannot be read: {reason}", 500) from None
        # An expired checkpoint is gone for clients at once; its files follow with the next sweep.
        over = record.expires is not None and record.expires < time.time()
        return None if (over and not expired) or not directory.is_dir() else record

    def _write(self, tenant: str, record: CheckpointRecord) -> None:
        file = _record_file(record.path.directory(self.root, tenant))
        # Durable: the client is told that the checkpoint is saved, which a power cut must not take back.
        try:
            with replacing(file, durable=True) as temporary:
                temporary.write_text(json.dumps({**asdict(record), "path": str(record.path)}, indent=1), "utf-8")
        except OSError as error:  # a full disk, for one
            raise CheckpointError(
                f"the record of checkpoint {record.path} cannot be written: {error.strerror}"
            ) from None


def _record_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}{RECORD_SUFFIX}")
