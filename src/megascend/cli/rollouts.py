"""``megascend rollouts``: read what the model did in a run of ``megascend rl``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


class RolloutOrder(str, Enum):
    """Figure by which trajectories are sorted."""

    step = "step"
    reward = "reward"
    advantage = "advantage"
    length = "length"
    lag = "lag"
    turns = "turns"


class RolloutOutcome(str, Enum):
    """Use of a trajectory's group: learned from, or dropped for a reason."""

    learned = "learned"
    equal = "equal"
    stale = "stale"


FIGURES: dict[RolloutOrder, Callable[[dict[str, Any]], float]] = {
    RolloutOrder.step: lambda row: row["step"],
    RolloutOrder.reward: lambda row: row["reward"],
    RolloutOrder.advantage: lambda row: -math.inf if row["advantage"] is None else row["advantage"],
    RolloutOrder.length: lambda row: row["sampled_tokens"],
    RolloutOrder.lag: lambda row: row["lag"],
    RolloutOrder.turns: lambda row: row["turns"],
}


def rollouts_command(
    run: Annotated[Path, typer.Argument(help="Run directory of `megascend rl`.")],
    step: Annotated[int | None, typer.Option("--step", help="Only of this step.")] = None,
    prompt: Annotated[int | None, typer.Option("--prompt", help="Only of the prompt with this number.")] = None,
    outcome: Annotated[
        RolloutOutcome | None, typer.Option("--outcome", help="Only learned ones, or those dropped as equal or stale.")
    ] = None,
    contains: Annotated[
        str | None, typer.Option("--contains", help="Only with this text in prompt or response.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Only with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Only with at most this reward.")] = None,
    sort: Annotated[
        RolloutOrder, typer.Option("--sort", help="Sort by this figure, largest first.")
    ] = RolloutOrder.step,
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
            and (outcome is None or row["outcome"] == outcome.value)
            and (min_reward is None or row["reward"] >= min_reward)
            and (max_reward is None or row["reward"] <= max_reward)
            and (contains is None or contains in row["prompt"] or contains in row["response"])
        )

    # All rows in memory: a file is bounded by rollout.records.max_bytes.
    rows = [row for row in read_rollouts(run) if matches(row)]
    rows.sort(key=FIGURES[sort], reverse=not ascending)
    page = rows[offset : offset + limit]
    for row in page:
        typer.echo(json.dumps(row) if as_json else trajectory_text(row, full=full))
    if not as_json:
        last = offset + len(page)
        hint = f"; the next with --offset {last}" if last < len(rows) else ""
        typer.echo(f"{len(page)} of {len(rows)} trajectories{hint}")


def read_rollouts(run: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a run's records, the older file first.

    Raises:
        ConfigError: the run has none.
    """
    from megascend.app.rl.rollout_log import EARLIER, ROLLOUTS
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


def trajectory_text(row: dict[str, Any], *, full: bool) -> str:
    """Describe a trajectory: a line of figures, the prompt, and the response."""
    from megascend.app.run_log import MAX_CHARACTERS, quoted

    parts = ", ".join(f"{name} {value:g}" for name, value in row["rewards"].items())
    first, last = row["versions"]
    versions = f"version {first}" if first == last else f"versions {first} to {last}"
    figures = [
        f"step {row['step']}",
        f"prompt {row['prompt_number']}",
        f"reward {row['reward']:g}{f' ({parts})' if parts else ''}",
        f"advantage {'-' if row['advantage'] is None else format(row['advantage'], '+.3g')}",
        f"lag {row['lag']}",
        versions,
        f"{row['turns']} turn{'s' * (row['turns'] != 1)}",
        f"{row['sampled_tokens']} tokens",
        "cut off" if row["finish_reason"] == "length" else "complete",
        *([] if row["outcome"] == "learned" else [f"dropped: {row['outcome']}"]),
        *([row["engine"]] if row["engine"] else []),
    ]
    characters = None if full else MAX_CHARACTERS
    return f"{'  '.join(figures)}\n{quoted(row['prompt'], row['response'], characters)}\n"
