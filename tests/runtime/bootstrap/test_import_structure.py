"""transformers reads the folder of its models once, with unchanged names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from megascend.runtime.bootstrap.patches import FUNCTION, IMPORT_UTILS, by_folder, cache_import_structure

PROGRAM = """
import json, sys
if sys.argv[1] == "once":
    import megascend
    megascend.bootstrap("cpu", engine="megatron")
from pathlib import PurePath
opened = []

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".py") and "/models/" in arguments[0]:
        opened.append(arguments[0])

sys.addaudithook(hook)
import transformers
from transformers import AutoConfig, AutoTokenizer
import transformers.models
twice = len(opened) - len(set(opened))
print(json.dumps([len(opened), twice, sorted(dir(transformers)), sorted(dir(transformers.models))]))
"""


@pytest.mark.nightly  # covered: every test that imports megascend
def test_model_files_are_read_once_and_names_unchanged() -> None:
    """Run in processes that have not imported transformers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    reports = {}
    for mode in ("once", "as it is"):
        command = [sys.executable, "-c", PROGRAM, mode]
        completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert completed.returncode == 0, completed.stderr
        reports[mode] = json.loads(completed.stdout.splitlines()[-1])
    count, twice, *names = reports["once"]
    assert names == reports["as it is"][2:]
    assert twice < 50
    assert count < 0.6 * reports["as it is"][0]


def test_structure_is_cached_by_folder_and_other_versions_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    paths = []
    function = by_folder(lambda path: {"asked": paths.append(path)})
    for path in (tmp_path / "models", str(tmp_path / "models" / "__init__.py")):
        function(path)
    assert paths == 2 * [str(tmp_path / "models")]

    utils = import_module(IMPORT_UTILS)
    monkeypatch.setattr(utils, FUNCTION, plain := lambda path: {})
    cache_import_structure()
    assert getattr(utils, FUNCTION) is plain
    monkeypatch.delattr(utils, FUNCTION)
    cache_import_structure()
    assert not hasattr(utils, FUNCTION)
