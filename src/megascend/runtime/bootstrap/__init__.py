"""Prepare a process for an engine: check versions, choose the platform, patch packages."""

from __future__ import annotations

from megascend.runtime.bootstrap.providers import PatchProvider
from megascend.runtime.bootstrap.providers import register as register_provider
from megascend.runtime.bootstrap.runtime import Runtime, bootstrap, current_runtime

__all__ = ["PatchProvider", "Runtime", "bootstrap", "current_runtime", "register_provider"]
