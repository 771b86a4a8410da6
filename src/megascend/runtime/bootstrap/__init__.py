"""Prepare a process for an engine: check versions, choose the platform, patch packages.

``megascend.bootstrap`` is both this package and the function that a program calls first. The package is callable, so that
``megascend.bootstrap()`` calls the function even if the package was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType

from megascend.runtime.bootstrap.providers import PatchProvider
from megascend.runtime.bootstrap.providers import register as register_provider
from megascend.runtime.bootstrap.runtime import Runtime, bootstrap, current_runtime

__all__ = ["PatchProvider", "Runtime", "bootstrap", "current_runtime", "register_provider"]


class _CallablePackage(ModuleType):
    __call__ = staticmethod(bootstrap)


# The package has the name of its function: ``megascend.bootstrap()`` must work for whichever of them an import has bound.
sys.modules[__name__].__class__ = _CallablePackage
