"""The import-order guard: what must not be in ``sys.modules`` before the bootstrap has put its packages in place."""

from __future__ import annotations

from collections.abc import Iterable

from megascend.errors import ImportOrderError

PATCHED_FIRST = ("megatron.core", "transformer_engine", "mcore_bridge")


def imported_too_early(modules: Iterable[str]) -> list[str]:
    """Names of ``modules`` that belong to the packages the bootstrap must come before (top-level names only)."""
    loaded = set(modules)
    return [name for name in PATCHED_FIRST if name in loaded]


def require_clean(modules: Iterable[str], platform: str) -> None:
    """Raise ImportOrderError if any package that has to be patched first is already imported."""
    early = imported_too_early(modules)
    if early:
        raise ImportOrderError(
            f"{', '.join(early)} {'was' if len(early) == 1 else 'were'} imported before megascend.bootstrap(). On platform "
            f"{platform!r} these packages pick their implementations while they are imported, so they would compute "
            "with the wrong ones. Make megascend.bootstrap() the first lines of the program, above every import of "
            "megatron, transformer_engine, mcore_bridge or anything that imports them (swift, verl, twinkle)."
        )
