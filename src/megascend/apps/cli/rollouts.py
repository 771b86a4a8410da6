"""``megascend rollouts``: read the rollouts of a run of ``megascend rl``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

RolloutOutcome = Literal["learned", "equal", "stale", "evaluated"]
"""Use of a trajectory's group: learned from, dropped for a reason, or of an evaluation."""
FIGURES = {
    "step": "step",
    "reward": "reward",
    "advantage": "advantage",
    "length": "sampled_tokens",
    "lag": "lag",
    "turns": "turns",
}
"""Keys of rows by the name of the figure in ``--sort``."""


def rollouts_command(
    run: Annotated[Path, typer.Argument(help="Run directory of `megascend rl`.")],
    step: Annotated[int | None, typer.Option("--step", help="Only of this step.")] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", help="Only of the prompt with this number, in the order of sampling.")
    ] = None,
    outcome: Annotated[
        RolloutOutcome | None,
        typer.Option("--outcome", help="Only learned ones, those dropped as equal or stale, or those of evaluations."),
    ] = None,
    contains: Annotated[
        str | None, typer.Option("--contains", help="Only with this text in prompt or response.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Only with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Only with at most this reward.")] = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            help=f"Sort by {', '.join(FIGURES)} or a part of the reward, largest first; equal ones newest first.",
        ),
    ] = "step",
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Number of trajectories.")] = 20,
    offset: Annotated[int, typer.Option("--offset", min=0, help="Skip this many first.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Whole texts, not their beginnings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with all fields.")] = False,
) -> None:
    """Print trajectories of RUN: prompt, response, reward and its parts, advantage, lag, engine.

    The newest come first. Reads RUN/rollouts.1.jsonl and RUN/rollouts.jsonl, also while the run writes them.
    """

    def matches(row: dict[str, Any]) -> bool:
        return (
            (step is None or row["step"] == step)
            and (prompt is None or row["prompt_number"] == prompt)
            and (outcome is None or row["outcome"] == outcome)
            and (min_reward is None or row["reward"] >= min_reward)
            and (max_reward is None or row["reward"] <= max_reward)
            and (contains is None or contains in row["prompt"] or contains in row["response"])
        )

    from megascend.apps.rl.rollout_log import trajectory_text

    # All rows in memory: a file is bounded by rollout.records.max_bytes.
    rows = [row for row in read_rollouts(run) if matches(row)]
    # Newest first, also among equal figures: the sort below keeps their order.
    rows.sort(key=lambda row: row["step"], reverse=True)
    if sort in FIGURES:
        # Those of evaluations have no advantage.
        rows = [row for row in rows if row[FIGURES[sort]] is not None]
        rows.sort(key=lambda row: row[FIGURES[sort]], reverse=not ascending)
    else:
        rows = sorted_by_part(rows, sort, ascending)
    page = rows[offset : offset + limit]
    for row in page:
        prefix = f"step {row['step']}  prompt {row['prompt_number']}  "
        typer.echo(json.dumps(row) if as_json else f"{prefix}{trajectory_text(row, full=full)}")
    if not as_json:
        last = offset + len(page)
        hint = f"; the next with --offset {last}" if last < len(rows) else ""
        typer.echo(f"{len(page)} of {len(rows)} trajectories{hint}" if rows else "no trajectory matches")


def sorted_by_part(rows: list[dict[str, Any]], part: str, ascending: bool) -> list[dict[str, Any]]:
    """Return the rows that have a part of the reward, sorted by it."""
    from megascend.errors import ConfigError

    graded = [row for row in rows if part in row["rewards"]]
    if rows and not graded:
        parts = dict.fromkeys(name for row in rows for name in row["rewards"])
        raise ConfigError(
            f"--sort {part}: no such figure or part of the reward; available: {', '.join([*FIGURES, *parts])}"
        )
    return sorted(graded, key=lambda row: row["rewards"][part], reverse=not ascending)


def read_rollouts(run: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a run's records, the older file first."""
    from megascend.apps.rl.rollout_log import EARLIER, ROLLOUTS
    from megascend.errors import ConfigError

    paths = [run / name for name in (EARLIER, ROLLOUTS) if (run / name).is_file()]
    if not paths:
        raise ConfigError(
            f"{run.absolute()} has no {ROLLOUTS}: it is no run of megascend rl, has not taken a step, or has "
            "rollout.records.every: 0"
        )
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                # A run may be writing the last line.
                if line.endswith("\n"):
                    yield json.loads(line)
