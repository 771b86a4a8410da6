"""What Python imports at its start in every process under ``megascend run``: the hook, then a sitecustomize of the user's."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import megascend_run

HERE = os.path.dirname(os.path.abspath(__file__))

megascend_run.arm(os.environ)

_others = PathFinder.find_spec("sitecustomize", [each for each in sys.path if os.path.abspath(each) != HERE])
if _others is not None and _others.loader is not None:
    sys.modules[__name__] = _module = module_from_spec(_others)
    _others.loader.exec_module(_module)
