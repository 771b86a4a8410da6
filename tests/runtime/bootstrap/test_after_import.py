"""Hooks on the import of an upstream module; a plain Megatron program gets correct sums through one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascend.runtime.bootstrap.import_hooks import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of an importable package whose module ``user`` imports a name from its module ``inner``."""
    name = "imported_later"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "inner.py").write_text("value = 'upstream'\n")
    (tmp_path / name / "user.py").write_text(f"from {name}.inner import value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, finders = set(sys.modules), list(sys.meta_path)
    yield name
    sys.meta_path[:] = finders
    for module in set(sys.modules) - before:
        del sys.modules[module]


def test_calls_run_once_and_before_the_importer_gets_the_module(package: str) -> None:
    calls = []

    def patch_inner() -> None:
        calls.append("patched")
        sys.modules[f"{package}.inner"].value = "patched"  # type: ignore[attr-defined]

    finders = list(sys.meta_path)
    after_import(f"{package}.inner", patch_inner)
    after_import(f"{package}.inner", lambda: calls.append("second"))
    assert calls == []
    assert importlib.import_module(f"{package}.user").value == "patched"
    assert calls == ["patched", "second"]
    assert sys.meta_path == finders
    inner = sys.modules[f"{package}.inner"]
    assert type(inner.__loader__).__module__ == type(inner.__spec__.loader).__module__ != after_import.__module__
    after_import(f"{package}.inner", lambda: calls.append("at once"))
    assert calls == ["patched", "second", "at once"]


def test_find_spec_does_not_trigger_the_call(package: str) -> None:
    calls = []
    after_import(f"{package}.inner", lambda: calls.append("patched"))
    for _ in range(2):
        spec = importlib.util.find_spec(f"{package}.inner")
        assert spec is not None
        assert spec.loader.get_source(f"{package}.inner") == "value = 'upstream'\n"  # type: ignore[union-attr]
    assert calls == []
    importlib.import_module(f"{package}.inner")
    assert calls == ["patched"]


def test_error_in_the_call_fails_the_import(package: str) -> None:
    def fail() -> None:
        raise RuntimeError("cannot be patched")

    after_import(f"{package}.inner", fail)
    with pytest.raises(RuntimeError, match="cannot be patched"):
        importlib.import_module(f"{package}.user")
    assert f"{package}.inner" not in sys.modules
