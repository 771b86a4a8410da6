"""``megascend doctor``: check whether this machine can train, or report what happened to a run and what to do about it."""

from __future__ import annotations

import json
import platform
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    from megascend.errors import ConfigError

    if run is not None:
        from megascend.apps.cli.run_report import read_run
        from megascend.apps.cli.run_text import render_run, render_run_json

        report = read_run(run, verify=verify)
        typer.echo(render_run_json(report) if as_json else render_run(report))
        if not report.ok:
            raise typer.Exit(1)
        return
    if verify:
        raise ConfigError("--verify checks the checkpoints of a run: name it with --run DIR")

    from megascend.apps.cli.checks import run_checks

    checks = run_checks(timeout)
    typer.echo(render_json(checks) if as_json else render_table(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def render_json(checks: list[Check]) -> str:
    """Format the checks as one JSON object."""
    return json.dumps(
        {
            "ok": all(check.status != "fail" for check in checks),
            "host": headline(checks),
            "checks": [
                {"name": check.name, "status": check.status, "found": check.result, "hint": check.hint} | check.values
                for check in checks
            ],
        },
        indent=2,
    )


def render_table(checks: list[Check]) -> str:
    """Format the checks as plain text to paste into an issue; a hint follows the line it belongs to."""
    width = max(len(check.name) for check in checks)
    lines = [headline(checks), ""]
    for check in checks:
        status = typer.style(f"{check.status.upper() if check.status != 'ok' else 'ok':<4}", fg=COLOURS[check.status])
        lines.append(f"{status}  {check.name:<{width}}  {check.result}")
        if check.hint:
            indent = " " * (width + 8)
            lines += textwrap.wrap(
                check.hint,
                width + 98,
                initial_indent=indent + "-> ",
                subsequent_indent=indent + "   ",
                break_on_hyphens=False,  # paths and package names can be copied
                break_long_words=False,
            )
    return "\n".join([*lines, "", verdict(checks)])


def headline(checks: list[Check]) -> str:
    """Describe this host in a line: its name, devices, cores and memory, and the installed stack."""
    results = {check.name: check for check in checks}
    machine = results["python"].result.rpartition(" on ")[2] if "python" in results else platform.system()
    size = [_devices(results) or "no GPU or NPU"]
    if cores := _value(results, "threads", "cores"):
        size.append(f"{cores} core{'s' if cores > 1 else ''}")
    if total := _value(results, "memory", "total_bytes"):
        size.append(f"{total / 2**30:.0f} GiB of memory")
    packages = [f"{name} {results[name].result}" for name in ("megatron-core", "torch") if name in results]
    stack = _value(results, "bootstrap", "stack")
    installed = ", ".join(packages)
    software = f"stack {stack} ({installed})" if stack else f"no complete stack ({installed})"
    return f"{platform.node()} ({machine}): {', '.join(size)}; {software}"


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


def verdict(checks: list[Check]) -> str:
    """Summarize in one line the devices that this host can train on, and the missing packages."""
    from megascend.config.registry import ENGINES
    from megascend.runtime.bootstrap import engines

    results = {check.name: check for check in checks}
    failed = [check.name for check in checks if check.status == "fail"]
    device = _device(results)
    if not failed:
        return f"ready to train on {device}"
    broken = f"{len(failed)} failed: {', '.join(failed)}"
    # The bootstrap check is of engine megatron, which needs all packages; other engines need fewer.
    able = [name for name in ENGINES if not {*engines.needs(name).packages} & {*failed}]
    others_fine = {*failed} <= {*engines.needs(engines.DEFAULT).packages, "bootstrap"}
    if others_fine and able and engines.DEFAULT not in able:
        return f"{broken}; engine {engines.DEFAULT} cannot train here, and {' and '.join(able)} can, on {device}"
    return broken


def _device(results: dict[str, Check]) -> str:
    """Describe the default training device; for a CPU, say that no GPU or NPU is usable."""
    chosen, devices = _value(results, "platform", "chosen"), _devices(results)
    if devices is not None:
        return devices if "simulated device" in results else f"{devices} (platform {chosen})"
    if chosen != "cpu":
        return f"this host (platform {chosen})" if chosen else "this host"
    cores = _value(results, "threads", "cores")
    return f"this host's CPU{f' ({cores} cores)' if cores else ''}; it has no GPU or NPU that torch can use, and needs none"
