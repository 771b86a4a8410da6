"""The manifest ``megascend.json``: metadata of a checkpoint, and the digest of each of its files.

It is written last, so a directory with a manifest is complete. Later changes to any file, the manifest included, are detected.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megascend.config.documents import load_json
from megascend.errors import CheckpointError
from megascend.runtime.io.hashing import digest as digest_of

if TYPE_CHECKING:
    from megascend.runtime.distributed.process_groups import ProcessGroups

NAME = "megascend.json"
FORMAT = 2


@dataclass(frozen=True)
class CheckpointManifest:
    """Metadata of a checkpoint, stored as ``megascend.json``.

    Attributes:
        step: optimizer steps so far, skipped ones included.
        precision: precision of the parameters: fp32, fp16 or bf16.
        model: layers, hidden size and vocabulary, and how base weights are quantised; a checkpoint of another model is not read.
        layout: sizes of the topology's axes.
        optimizer: step counters and fp16 loss scale, or None if adapters are trained.
        adapters: their names; each has a directory under ``adapters/``.
        versions: versions of megascend and of the packages that it builds on.
        progress: data that the caller gets back when it loads, for example the position in the data. JSON.
        config: the run's settings, or None.
        engine: the kind of engine that saved it, which determines the tensors' names.
        files: relative path -> size in bytes and xxh3 digest (128 bits, hexadecimal).
    """

    step: int
    precision: str
    model: dict[str, int | str]
    layout: dict[str, int]
    optimizer: dict[str, Any] | None
    adapters: list[str]
    versions: dict[str, str]
    progress: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    engine: str = "megatron"
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    def to_text(self) -> str:
        """Serialise to JSON, ending with a digest of all that precedes it."""
        values = asdict(self)
        return _dump({**values, "digest": _digest_of(values)})


def parse(text: str, path: Path) -> CheckpointManifest:
    """Parse the manifest in ``text``."""
    try:
        values = load_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    digest = values.pop("digest", None)
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {values.get('format')!r}; this version of megascend reads {FORMAT}")
    # The text, too: another spelling of the same values is a change.
    if digest != _digest_of(values) or text != _dump({**values, "digest": digest}):
        raise CheckpointError(f"{path} is damaged: it has changed since it was written")
    return CheckpointManifest(**values)


def read(directory: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint directory."""
    path = directory / NAME
    # Bytes: reading as text would translate line ends, which the comparison must see.
    try:
        return parse(path.read_bytes().decode(), path)
    except FileNotFoundError:
        previous = directory.with_name(f".{directory.name}.old")  # see replace_directory
        advice = (
            f"; a process that was killed left the one before as {previous}: rename it" if previous.exists() else ""
        )
        raise CheckpointError(
            f"{path} is missing; the directory is not a complete megascend checkpoint{advice}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def digest(file: Path) -> dict[str, Any]:
    """Return size and digest of a file."""
    return entry(file.stat().st_size, digest_of(file, xxhash.xxh3_128))


def entry(size: int, xxh3: str) -> dict[str, Any]:
    """Return the entry of :attr:`CheckpointManifest.files` for a file of ``size`` bytes and this digest."""
    return {"bytes": size, "xxh3": xxh3}


def problems(directory: Path, files: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """Return a message for each of ``names`` that is missing, or differs in size or digest."""
    messages = []
    for name in names:
        expected = files[name]
        try:
            status = (directory / name).stat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):  # a named pipe would be waited for
                messages.append(f"{name} is not a file")
            elif size != expected["bytes"]:
                messages.append(f"{name} has {size} bytes instead of {expected['bytes']}")
            elif digest(directory / name) != expected:
                messages.append(f"{name} is damaged: its content is not what was written")
        except FileNotFoundError:
            messages.append(f"{name} is missing")
        except OSError as error:
            messages.append(f"{name} cannot be read: {error}")
    return messages


def verify(directory: Path, groups: ProcessGroups) -> CheckpointManifest:
    """Return the manifest of a checkpoint after comparing every file with it. Collective; each rank reads a share of the files.

    Raises:
        CheckpointError: on every rank: it is incomplete or damaged; the message names the files.
    """
    from megascend.runtime.distributed.objects import (
        gather_objects,  # here, because it imports torch, which listing checkpoints must not
    )

    problem, manifest = None, None
    try:
        manifest = read(directory)
        names = sorted(manifest.files)[groups.rank :: groups.world_size]
        problem = "; ".join(problems(directory, manifest.files, names)) or None
    except CheckpointError as error:
        problem = str(error)
    rank_problems = gather_objects(problem, "world", groups, f"the verification of {directory}")
    # Every rank reads the manifest, so many may report the same problem.
    texts = dict.fromkeys(text for text in rank_problems if text is not None)
    if texts or manifest is None:
        raise CheckpointError(f"{directory} cannot be loaded: {'; '.join(texts)}")
    return manifest


def check_fits(saved: CheckpointManifest, current: CheckpointManifest, directory: Path) -> None:
    """Raise CheckpointError for a checkpoint of another model, precision, or kind of training."""
    base = saved.model.get("base weights", "unquantised"), current.model.get("base weights", "unquantised")
    if base[0] != base[1]:
        raise CheckpointError(
            f"load: the adapters in {directory} were trained with base_weights: {base[0]}, this run has {base[1]}: set "
            f"base_weights: {base[0]}, or load them one by one (load_adapter)"
        )
    sizes = [
        f"{name} {saved.model.get(name, 'none')} in the checkpoint, {current.model.get(name, 'none')} in this run"
        for name in sorted({*saved.model, *current.model})
        if saved.model.get(name) != current.model.get(name)
    ]
    if sizes:
        raise CheckpointError(
            f"load: {directory} is of another model: {'; '.join(sizes)}; set model to the one that it was trained from"
        )
    if saved.precision != current.precision:
        raise CheckpointError(
            f"load: {directory} has precision {saved.precision}, this run {current.precision}; set precision: {saved.precision}"
        )
    if (saved.optimizer is None) != (current.optimizer is None):
        kinds = ("LoRA adapters on a frozen model", "all parameters of a model")
        stored, trained = kinds if saved.optimizer is None else kinds[::-1]
        raise CheckpointError(
            f"load: {directory} holds {stored}, and this run trains {trained}; set or leave out lora (of a backend: adapters) "
            "as the checkpoint's run did"
        )
    if saved.optimizer is not None and current.optimizer is not None:
        # Checkpoints of AdamW have no entry.
        kinds = saved.optimizer.get("kind", "adamw"), current.optimizer.get("kind", "adamw")
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"load: {directory} has the state of optimizer.kind: {kinds[0]}, this run is of kind {kinds[1]}: set "
                f"optimizer.kind: {kinds[0]}, or begin a run from its exported weights"
            )


def _dump(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1) + "\n"


def _digest_of(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(_dump(values).encode()).hexdigest()
