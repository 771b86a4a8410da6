"""What an acceptance run is told: read once by the command, handed to every section as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Attributes:
    folder: where models, logs and results of this run go.
    cards: how many cards take part.
    simulated: on the simulated device: bounds are those of a CPU, and speed means nothing.
    stand_in: the stand-in of the tests takes MindSpeed's place.
    quick: a few cases of every section only.
    """

    folder: Path
    cards: int
    simulated: bool = False
    stand_in: bool = False
    quick: bool = False

    def to_json(self) -> str:
        """For the sections' processes."""
        return json.dumps(asdict(self) | {"folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """What :meth:`to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"folder": Path(values["folder"])})
