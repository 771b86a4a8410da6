"""Section ``collectives``: what HCCL returns, value by value, and that objects travel over Gloo."""

from __future__ import annotations

from megascend.acceptance.ranks import last_error, run_ranks
from megascend.acceptance.records import Results, failed
from megascend.acceptance.settings import Settings

RANKS_TIMEOUT_S = 540.0


def run(settings: Settings, results: Results) -> None:
    """Run :mod:`collective_ranks` on all cards; its first rank writes the results."""
    job = {"results": str(results.path), "simulated": settings.simulated, "quick": settings.quick}
    factor = 2 if settings.simulated else 1
    ended = run_ranks(settings, settings.cards, "megascend.acceptance.collective_ranks", job, RANKS_TIMEOUT_S * factor)
    if problem := ended.problem(RANKS_TIMEOUT_S * factor):
        results.add(failed(f"all collectives on {settings.cards} cards", f"{problem}: {last_error(ended)}"))
