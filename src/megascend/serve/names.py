"""Names of sessions, models and checkpoints, and where a checkpoint lies: the one way from a client to a path. Pure."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from megascend.serve.errors import RequestRefusedError

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODEL = re.compile(r"(s-[0-9a-f]{32}):train:(0|[1-9][0-9]{0,8})")


def new_session() -> str:
    """A session's name, which nobody can guess."""
    return f"s-{secrets.token_hex(16)}"


def model_name(session: str, number: int) -> str:
    """Name of a session's model; clients compute it, too."""
    return f"{session}:train:{number}"


def sampler_name(session: str, number: int) -> str:
    """Name of a session's sampler."""
    return f"{session}:sample:{number}"


@dataclass(frozen=True)
class CheckpointPath:
    """A checkpoint as clients name it: ``tinker://MODEL/KIND/NAME``.

    Attributes:
        model: the model that it was saved from.
        kind: ``weights`` can be trained on, ``sampler_weights`` are for sampling.
    """

    model: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        """Refuse whatever could be more than a file's name.

        Raises:
            RequestRefusedError: 400; a part is none of ours.
        """
        if not _MODEL.fullmatch(self.model) or self.kind not in KINDS:
            raise RequestRefusedError(f"there is no checkpoint {str(self)[:200]!r}", 404)
        if not _NAME.fullmatch(self.name) or ".." in self.name or self.name.endswith("."):
            raise RequestRefusedError(
                f"{self.name[:120]!r} cannot be a checkpoint's name: up to 100 letters, digits, '.', '_' and '-', beginning with "
                "a letter or digit, without '..'"
            )

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        """What a client calls a checkpoint.

        Raises:
            RequestRefusedError: it is no such path.
        """
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3:
            raise RequestRefusedError(f"{text[:200]!r} is no checkpoint: expected {SCHEME}MODEL/weights/NAME")
        return cls(parts[0], cast("Kind", parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """What listings call it, beside its model."""
        return f"{self.kind}/{self.name}"

    def directory(self, root: Path, tenant: str) -> Path:
        """Where it lies under the service's directory, if it is ``tenant``'s."""
        return run_directory(root, tenant, self.model) / self.kind / self.name


def run_directory(root: Path, tenant: str, model: str) -> Path:
    """Where a tenant's checkpoints of a model lie.

    Raises:
        RequestRefusedError: 404; this is no model's name.
    """
    match = _MODEL.fullmatch(model)
    if match is None:
        raise RequestRefusedError(f"there is no model {model[:200]!r}", 404)
    return root / tenant / f"{match[1]}.{match[2]}"


def model_of_run(directory: Path) -> str | None:
    """The model whose checkpoints lie in a directory that :func:`run_directory` names; None for others."""
    session, _, number = directory.name.rpartition(".")
    name = f"{session}:train:{number}"
    return name if _MODEL.fullmatch(name) else None
