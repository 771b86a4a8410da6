"""``megascend doctor``: check whether this machine can train, or report what happened to a run and what to do about it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megascend.errors import ConfigError

if TYPE_CHECKING:
    from megascend.apps.cli.checks import Check

COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED, "skip": None}


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that any single check may take.")] = 120.0,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Report what happened to the run in DIR instead."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="With --run: compare every checkpoint file with its digest.")
    ] = False,
) -> None:
    """Check versions, NPU, platform, collectives, memory, threads and disk. Exits with 1 if a check fails.

    With --run: read a run's directory, and exit with 0 if the run has finished or was stopped, else with 1.
    """
    lines: Iterable[str]
    if run is not None:
        from megascend.apps.cli.run_text import run_json, run_lines
        from megascend.apps.train.run_report import read_run

        report = read_run(run, verify=verify)
        ok, lines = report.ok, [run_json(report)] if as_json else run_lines(report)
    elif verify:
        raise ConfigError("--verify checks the checkpoints of a run: name it with --run DIR")
    else:
        from megascend.apps.cli.checks import run_checks

        checks = run_checks(timeout)
        ok = not failed(checks)
        lines = [checks_json(checks)] if as_json else check_lines(checks)
    for line in lines:
        typer.echo(line)
    if not ok:
        raise typer.Exit(1)


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "fail"]


def checks_json(checks: list[Check]) -> str:
    rows = [
        {"name": check.name, "status": check.status, "found": check.result, "hint": check.hint} | check.values
        for check in checks
    ]
    return json.dumps({"ok": not failed(checks), "host": headline(checks), "checks": rows}, indent=2)


def check_lines(checks: list[Check]) -> Iterator[str]:
    """Yield the checks as lines to paste into an issue; a hint follows the line it belongs to."""
    width = max(len(check.name) for check in checks)
    yield headline(checks)
    yield ""
    for check in checks:
        status = check.status.upper() if check.status != "ok" else "ok"
        yield f"{typer.style(f'{status:<4}', fg=COLOURS[check.status])}  {check.name:<{width}}  {check.result}"
        if check.hint:
            yield f"{'':<{width + 8}}-> {check.hint}"
    yield ""
    yield verdict(checks)


def headline(checks: list[Check]) -> str:
    """Describe this host in a line: its name, devices, cores and memory, and the installed stack."""
    results = {check.name: check for check in checks}
    machine = results["python"].result.rpartition(" on ")[2] if "python" in results else platform.system()
    size = [_devices(results) or "no GPU or NPU"]
    if cores := _value(results, "threads", "cores"):
        size.append(f"{cores} core{'s' * (cores > 1)}")
    if total := _value(results, "memory", "total_bytes"):
        size.append(f"{total / 2**30:.0f} GiB of memory")
    installed = ", ".join(f"{name} {results[name].result}" for name in ("megatron-core", "torch") if name in results)
    stack = _value(results, "bootstrap", "stack")
    software = f"stack {stack}" if stack else "no complete stack"
    return f"{platform.node()} ({machine}): {', '.join(size)}; {software} ({installed})"


def verdict(checks: list[Check]) -> str:
    """Summarize in one line the devices that this host can train on, and the missing packages."""
    from megascend.config.registry import ENGINES
    from megascend.runtime.bootstrap import engines

    results, names = {check.name: check for check in checks}, failed(checks)
    chosen, device = _value(results, "platform", "chosen"), _devices(results)
    if device is None and chosen == "cpu":
        cores = _value(results, "threads", "cores")
        on = f"this host's CPU{f' ({cores} cores)' if cores else ''}; it has no GPU or NPU that torch can use, and needs none"
    else:
        on = device or "this host"
        on += f" (platform {chosen})" if chosen and "simulated device" not in results else ""
    if not names:
        return f"ready to train on {on}"
    broken = f"{len(names)} failed: {', '.join(names)}"
    # The bootstrap check is of engine megatron, which needs all packages; other engines need fewer.
    able = [name for name in ENGINES if not {*engines.needs(name).packages} & {*names}]
    others_fine = {*names} <= {*engines.needs(engines.DEFAULT).packages, "bootstrap"}
    if others_fine and able and engines.DEFAULT not in able:
        return f"{broken}; engine {engines.DEFAULT} cannot train here, and {' and '.join(able)} can, on {on}"
    return broken


def _value(results: dict[str, Check], name: str, key: str) -> Any:
    return results[name].values.get(key) if name in results else None


def _devices(results: dict[str, Check]) -> str | None:
    """Name the GPUs or NPUs with their number; None without any."""
    if "simulated device" in results:
        return "a simulated device"
    chosen = _value(results, "platform", "chosen")
    if chosen == "npu" and "torch_npu" in results and " x " in results["torch_npu"].result:
        return results["torch_npu"].result.rpartition(", ")[2]
    if chosen == "cuda" and "torch import" in results:
        gigabytes = _value(results, "torch import", "memory_gib")
        return results["torch import"].result + (f" ({gigabytes:.0f} GiB each)" if gigabytes else "")
    return None
