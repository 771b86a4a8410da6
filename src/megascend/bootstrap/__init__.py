"""Getting a process ready for an engine: the platform chosen, versions checked, packages put in place, in that order.

``megascend.bootstrap`` is both this package and the function that a program calls first; the package is callable so
that ``megascend.bootstrap()`` means the function whichever of the two was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType

from megascend.bootstrap.providers import PatchProvider
from megascend.bootstrap.providers import register as register_provider
from megascend.bootstrap.runtime import Runtime, bootstrap, current_runtime

__all__ = ["PatchProvider", "Runtime", "bootstrap", "current_runtime", "register_provider"]


class _CallablePackage(ModuleType):
    __call__ = staticmethod(bootstrap)


sys.modules[__name__].__class__ = _CallablePackage
