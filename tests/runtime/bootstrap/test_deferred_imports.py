"""Deferred imports of upstream modules: at first use or never, and with the real objects."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascend.runtime.bootstrap.deferred_imports import DeferredCalls, DeferredNames, deferring

FILES = {
    "heavy/__init__.py": "",
    "heavy/leaf.py": "from heavy import large\nvalue = 7\ndef double(x, *, plus=0): return 2 * x + plus\nclass Kind: pass\n",
    "heavy/large.py": "",
    "user/__init__.py": "",
    "user/calls.py": "from heavy.leaf import double\ndef four(): return double(2)\n",
    "user/takes_more.py": "from heavy.leaf import Kind, double, value\nclass Mine(Kind): pass\n",
    "user/takes_all.py": "import heavy.leaf as leaf\nvalue = leaf.value\n",
    "user/fails.py": "from heavy.leaf import double\nraise RuntimeError('broken')\n",
    "user/passes_on.py": "from .passed import one, table\nown = 1\n",
    "user/passed.py": "from heavy import large\ntable = {'one': 1}\ndef one(): return table['one']\n",
    "user/passes_on_both.py": "from .passed import one\ndef __getattr__(name): return name.upper()\n",
    "framework/__init__.py": "try:\n    from . import other\nexcept ImportError:\n    pass\n",
    "framework/other.py": "from heavy import large\n",
}
CALLED = "user.calls", "heavy.leaf", ("double",)


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write packages that are not imported yet; check that the test leaves no finder behind."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    before, finders = set(sys.modules), list(sys.meta_path)
    yield
    assert sys.meta_path == finders
    for module in set(sys.modules) - before:
        del sys.modules[module]


def test_called_function_imports_its_module_at_first_call() -> None:
    with deferring((DeferredCalls(*CALLED),)):
        calls = importlib.import_module("user.calls")
    assert not {"heavy", "heavy.leaf"} & set(sys.modules)
    assert calls.four() == 4
    assert "heavy.large" in sys.modules
    assert sys.modules["heavy.leaf"].double is not calls.double
    assert calls.double(3, plus=1) == 7


def test_imported_module_is_not_replaced() -> None:
    leaf = importlib.import_module("heavy.leaf")
    with deferring((DeferredCalls(*CALLED),)):
        assert importlib.import_module("user.calls").double is leaf.double


def test_imports_are_normal_after_the_context() -> None:
    with deferring((DeferredCalls(*CALLED),)):
        pass
    assert importlib.import_module("user.calls").double is sys.modules["heavy.leaf"].double


def test_failed_import_removes_the_stand_in() -> None:
    with (
        deferring((DeferredCalls("user.fails", "heavy.leaf", ("double",)),)),
        pytest.raises(RuntimeError, match="broken"),
    ):
        importlib.import_module("user.fails")
    assert "heavy.leaf" not in sys.modules


def test_concurrent_import_gets_the_real_module() -> None:
    values = []

    def import_leaf() -> None:
        leaf = importlib.import_module("heavy.leaf")
        values.append((leaf.value, leaf.double(1)))

    (Path(importlib.util.find_spec("user").origin).parent / "calls.py").write_text(  # type: ignore[union-attr, arg-type]
        "import threads_of_test\nthreads_of_test.run()\nfrom heavy.leaf import double\n"
    )
    sys.modules["threads_of_test"] = module = type(sys)("threads_of_test")

    def run() -> None:
        thread = threading.Thread(target=import_leaf)
        thread.start()
        thread.join()

    module.run = run  # type: ignore[attr-defined]
    importlib.invalidate_caches()
    with deferring((DeferredCalls(*CALLED),)):
        assert importlib.import_module("user.calls").double(2) == 4
    assert values == [(7, 2)]


def test_reexported_names_are_imported_at_first_lookup() -> None:
    with deferring((DeferredNames("user.passes_on", "user.passed"),)):
        user = importlib.import_module("user.passes_on")
    assert not {"heavy", "user.passed"} & set(sys.modules)
    assert user.own == 1
    with pytest.raises(AttributeError, match=r"'user\.passes_on' has no attribute 'nothing'"):
        user.nothing  # noqa: B018
    from user.passes_on import table  # type: ignore[reportMissingImports]

    assert table == {"one": 1}
    assert user.one is sys.modules["user.passed"].one
