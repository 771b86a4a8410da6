"""Images of samples before they are decoded. Without torch: data is read before it is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ImageSource:
    """An image that is not decoded yet: its file's path, or its bytes.

    Attributes:
        path: absolute, or relative to the file that names it.
    """

    path: str | None = None
    data: bytes | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Return what to call it in a message."""
        return repr(self.path) if self.path is not None else f"of {len(self.data or b'')} bytes"


@dataclass(frozen=True)
class ImageIdentity:
    """Identity of an image that has been read.

    Attributes:
        file: absolute path; None for an image that is no file.
        digest: digest of its bytes; fits int64.
        size: size of the file in bytes.
        modified: time of the file's last change in nanoseconds.
    """

    file: Path | None
    digest: int
    size: int
    modified: int


@dataclass(frozen=True)
class ImageSources:
    """Images of a sample that the data reader turns into :class:`megascend.SampleImages` when the sample is used.

    Attributes:
        folder: that their paths are relative to.
        identities: identities of the images when they were read; empty if they are not files.
        grids: frames, rows and columns of their patches; empty if they are not known.
    """

    sources: tuple[ImageSource, ...]
    folder: Path
    identities: tuple[ImageIdentity, ...] = ()
    grids: tuple[tuple[int, int, int], ...] = ()
