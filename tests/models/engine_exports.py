"""Export a checkpoint with a head for multi-token prediction from an engine that does not train it. A script:

python engine_exports.py ENGINE CHECKPOINT FOLDER

It prints, as JSON, the names of ``named_weights`` with ``mtp: keep`` and ``drop``, and what ``train`` raises on an engine without
Megatron.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import megascend


def main(engine: str, checkpoint: str, folder: str) -> None:
    report = {}
    for mtp in ("keep", "drop"):
        with megascend.make_backend(
            engine, model=Path(checkpoint), precision="fp32", platform="cpu", self_check=False, mtp=mtp
        ) as backend:
            backend.export_hf(Path(folder) / mtp)
            report[mtp] = [name for name, _ in backend.named_weights()]
    if engine != "megatron":
        try:
            megascend.make_backend(engine, model=Path(checkpoint), precision="fp32", platform="cpu", mtp="train")
        except megascend.ConfigError as error:
            report["train"] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
