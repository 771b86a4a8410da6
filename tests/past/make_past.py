"""Keep this version's runs for the versions after it, once a release: python tests/past/make_past.py VERSION.

Writes ``tests/past/VERSION``: tiny models, the checkpoint of each run after half of its steps, an adapter, and ``figures.json``
with the losses and gradient norms of all steps. Then run tests/past, which compares the first of them with Hugging Face's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))
sys.path.insert(0, str(FOLDER))


def main() -> None:
    from past_runs import MODELS, RUNS, train

    import megascend
    from megascend.testing import write_tiny_checkpoint

    megascend.bootstrap("cpu").load_megatron()
    (FOLDER / sys.argv[1]).mkdir()
    os.chdir(FOLDER / sys.argv[1])  # relative paths: an adapter's files name its model
    for name, (arch, overrides) in MODELS.items():
        write_tiny_checkpoint(Path(name), arch, **overrides)
    figures = {
        run: train("megatron", run, Path(model), megascend.Parallel(), 1, save_to=Path(f"checkpoint-{run}"))
        for run, model in RUNS.items()
    }
    Path("figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
