"""transformers reads the folder of its models once, with unchanged names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from megascend.runtime.bootstrap.patches import FUNCTION, IMPORT_UTILS, by_folder, cache_import_structure


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
