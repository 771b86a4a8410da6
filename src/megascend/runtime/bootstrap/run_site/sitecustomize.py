"""Imported by Python at start-up in every process of ``megascend run``: install the hook, then run the user's sitecustomize."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import megascend_run

HERE = os.path.dirname(os.path.abspath(__file__))

megascend_run.arm(os.environ)

_spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != HERE])
if _spec is not None and _spec.loader is not None:
    sys.modules[__name__] = _module = module_from_spec(_spec)
    _spec.loader.exec_module(_module)
