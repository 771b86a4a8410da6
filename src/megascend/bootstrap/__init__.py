"""Getting a process ready for Megatron: the platform chosen, versions checked, packages put in place, in that order.

``megascend.bootstrap`` is both this package and the function that a program calls first; the package is callable so
that ``megascend.bootstrap()`` means the function whichever of the two was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType

from megascend.bootstrap.runtime import Runtime, bootstrap, current_runtime

__all__ = ["Runtime", "bootstrap", "current_runtime"]


class _CallablePackage(ModuleType):
    def __call__(self, platform: str = "auto") -> Runtime:
        return bootstrap(platform)


_CallablePackage.__call__.__doc__ = bootstrap.__doc__
sys.modules[__name__].__class__ = _CallablePackage
