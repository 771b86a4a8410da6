"""Getting a process ready for an engine: the platform chosen, versions checked, packages put in place, in that order.

``megascend.bootstrap`` is both this package and the function that a program calls first; the package is callable so
that ``megascend.bootstrap()`` means the function whichever of the two was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from megascend.bootstrap.providers import PatchProvider
from megascend.bootstrap.providers import register as register_provider
from megascend.bootstrap.runtime import Runtime, bootstrap, current_runtime

if TYPE_CHECKING:
    from megascend.config import Affinity, Parallel, Precision

__all__ = ["PatchProvider", "Runtime", "bootstrap", "current_runtime", "register_provider"]


class _CallablePackage(ModuleType):
    def __call__(
        self,
        platform: str = "auto",
        parallel: Parallel | None = None,
        tf32: bool | None = None,
        engine: str | None = None,
        precision: Precision | None = None,
        provider: str | None = None,
        affinity: Affinity | None = None,
    ) -> Runtime:
        return bootstrap(platform, parallel, tf32, engine, precision, provider, affinity)


_CallablePackage.__call__.__doc__ = bootstrap.__doc__
sys.modules[__name__].__class__ = _CallablePackage
