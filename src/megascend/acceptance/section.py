"""``python -m megascend.acceptance.section NAME``: one section, in the process that the runner has given it."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from megascend.acceptance.plan import chosen
from megascend.acceptance.records import Results
from megascend.acceptance.runner import SETTINGS_VARIABLE
from megascend.acceptance.settings import Settings


def main(name: str) -> None:
    """Run the section; its results go to a file of its folder."""
    settings = Settings.from_json(os.environ[SETTINGS_VARIABLE])
    (section,) = chosen([name])
    import_module(section.module).run(settings, Results(settings.folder / f"{name}.jsonl"))


if __name__ == "__main__":
    main(sys.argv[1])
