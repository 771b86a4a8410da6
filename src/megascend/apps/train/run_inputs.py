"""Fingerprints of a resumed run's inputs besides settings and checkpoint: weights of other models, code and packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from megascend.config import TrainerConfig
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.files import tensor_headers

if TYPE_CHECKING:
    from megascend.backend import Backend

logger = logging.getLogger(__name__)
EDGE = 4096
"""Bytes at each end of a weight that its directory's fingerprint reads."""
INPUTS = "inputs"
"""Key of the fingerprints in the progress that a checkpoint stores."""
Inputs = dict[str, dict[str, str]]
"""Fingerprints of ``weights`` and ``code``, by setting; JSON."""


@dataclass(frozen=True)
class InputNames:
    """What a run reads besides its settings, data and checkpoint, by setting.

    Attributes:
        weights: checkpoint directories that a resumed run reads again; they must be unchanged.
        code: names of functions or modules (``path/to/file.py:name``, ``package.module:name``, ``package.module``) that determine
            what is learned.
        packages: installed packages that determine it.
    """

    weights: dict[str, Path]
    code: dict[str, str]
    packages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def common(cls, config: TrainerConfig) -> InputNames:
        """Return those that every kind of run has: plug-ins, and below an adapter the model, which no checkpoint contains."""
        weights = {} if config.lora is None else {"model": config.model}
        return cls(weights, {f"plugins: {name}": name for name in config.plugins})


def read_inputs(backend: Backend, names: InputNames) -> Inputs:
    """Return the fingerprints of a run's inputs, on rank 0, whose files decide: other hosts may have copies. Collective."""
    return backend.from_rank_0(
        lambda: {
            "weights": {setting: fingerprint(directory) for setting, directory in names.weights.items()},
            "code": {
                **{setting: source_digest(name) for setting, name in names.code.items()},
                **{setting: package_version(name) for setting, name in names.packages.items()},
            },
        }
    )


def compare_inputs(names: InputNames, now: Inputs, before: Inputs, rank: int) -> None:
    """Compare the fingerprints of a resumed run with those of its checkpoint.

    Changed code is only a warning. An input that only one of the two has follows from a changed setting, and is ignored.

    Raises:
        ConfigError: on every rank: a resumed run would learn from another model.
    """
    for setting, digest in now["weights"].items():
        if before["weights"].get(setting, digest) != digest:
            raise ConfigError(
                f"{setting}: the weights in {names.weights[setting]} are not those that the run began with (fingerprint "
                f"{digest}, in the checkpoint {before['weights'][setting]}): restore them, or begin a new run"
            )
    for setting, digest in now["code"].items():
        if before["code"].get(setting, digest) != digest and rank == 0:
            logger.warning(
                "%s: the code is not that of the checkpoint (%s, in the checkpoint %s): continuing with the present one",
                setting,
                digest,
                before["code"][setting],
            )


def fingerprint(model_dir: Path) -> str:
    """Return a digest of the weights in a directory: of all names, dtypes and shapes, and of both ends of every tensor's data."""
    state = xxhash.xxh3_64()
    for name, header in sorted(tensor_headers(model_dir).items()):
        state.update(f"{name} {header.dtype} {header.shape}".encode())
        assert header.file is not None
        start, stop = header.span
        with header.file.open("rb") as file:
            for first, last in ((start, min(start + EDGE, stop)), (max(start, stop - EDGE), stop)):
                file.seek(first)
                state.update(file.read(last - first))
    return state.hexdigest()


def source_digest(name: str) -> str:
    """Return a digest of the file with a function or module, without what it imports; that of the name if it has no file."""
    source = name.rpartition(":")[0] or name
    path: str | None = source
    if not source.endswith(".py"):
        spec = importlib.util.find_spec(source)
        path = None if spec is None else spec.origin
    if path is None or not Path(path).is_file():
        return xxhash.xxh3_64(name.encode()).hexdigest()
    return xxhash.xxh3_64(Path(path).read_bytes()).hexdigest()


def package_version(name: str) -> str:
    """Return the version of an installed package; a word for a module of another package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "without a version"
