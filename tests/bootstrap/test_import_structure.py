"""transformers reads the folder of its models once, and knows the same names as without that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from megascend.bootstrap.patches import FUNCTION, IMPORT_UTILS, by_folder, cache_import_structure

PROGRAM = """
import json, sys
if sys.argv[1] == "once":
    import megascend
    megascend.bootstrap("cpu")
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


def test_no_file_is_read_twice_and_no_name_is_missing() -> None:
    """In processes where transformers has not been imported."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    found = {}
    for way in ("once", "as it is"):
        command = [sys.executable, "-c", PROGRAM, way]
        completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert completed.returncode == 0, completed.stderr
        found[way] = json.loads(completed.stdout.splitlines()[-1])
    count, twice, *names = found["once"]
    assert names == found["as it is"][2:]
    assert twice < 50
    assert count < 0.6 * found["as it is"][0]


def test_a_folder_and_a_file_in_it_are_the_same_and_other_versions_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    asked = []
    function = by_folder(lambda path: {"asked": asked.append(path)})
    for path in (tmp_path / "models", str(tmp_path / "models" / "__init__.py")):
        function(path)
    assert asked == 2 * [str(tmp_path / "models")]

    utils = import_module(IMPORT_UTILS)
    monkeypatch.setattr(utils, FUNCTION, plain := lambda path: {})
    cache_import_structure()
    assert getattr(utils, FUNCTION) is plain
    monkeypatch.delattr(utils, FUNCTION)
    cache_import_structure()
    assert not hasattr(utils, FUNCTION)
