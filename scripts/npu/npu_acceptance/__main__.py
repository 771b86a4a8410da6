"""``python -m npu_acceptance``: the whole run. ``scripts/npu/acceptance.sh`` prepares its environment."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megascend.errors import ConfigError
from npu_acceptance import plan, privacy
from npu_acceptance.records import Report
from npu_acceptance.report import about, render, section_lines, write_bundle
from npu_acceptance.runner import run_sections
from simnpu.settings import ACTIVE_VARIABLE

MAX_CARDS = 8


def main(arguments: Sequence[str]) -> int:
    """Run the sections, print the summary, write the bundle; 1 if a section failed."""
    options = parse(arguments)
    simulated = bool(os.environ.get(ACTIVE_VARIABLE))
    cards = options.cards or (MAX_CARDS if simulated else count_cards(os.environ))
    sections = plan.select(options.only)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="megascend-acceptance-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = plan.Settings(folder, cards, simulated, options.stand_in, options.quick)
    scrub = privacy.machine_scrubber(os.environ)

    results = []
    for result in run_sections(
        sections,
        settings,
        options.deadline,
        on_start=lambda section: print(f"running  {section.name}: {section.title}", flush=True),
    ):
        results.append(result)
        print("\n".join(section_lines(result)), flush=True)
    report = Report(about(settings, os.environ), tuple(results))
    print(f"\n{render(report)}")
    bundle = write_bundle(Path(options.out), report, scrub)
    print(f"to send back: {bundle}   (logs, which stay here: {folder})")
    return 1 if report.failed else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="acceptance.sh", description="Measure everything about megascend on new Ascend cards, once."
    )
    parser.add_argument("--cards", type=int, default=0, help="cards that take part (default: all, at most 8)")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], metavar="SECTION,...", help=", ".join(plan.NAMES)
    )
    parser.add_argument("--quick", action="store_true", help="a few cases of every section")
    parser.add_argument(
        "--deadline", type=float, default=None, metavar="S", help="seconds of each section, for the plan's"
    )
    parser.add_argument("--out", default="npu_acceptance.tar.gz", metavar="FILE", help="the bundle (default: here)")
    parser.add_argument("--folder", default="", metavar="DIR", help="for models and logs (default: a temporary one)")
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0 <= options.cards <= MAX_CARDS:
        raise ConfigError(f"--cards {options.cards}: 1 to {MAX_CARDS} cards of one host can take part")
    return options


def count_cards(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Count the cards visible to this shell, at most 8.

    Raises:
        ConfigError: no card is visible.
    """
    if visible := environment.get("ASCEND_RT_VISIBLE_DEVICES"):
        count = len([part for part in visible.split(",") if part.strip()])
    else:
        count = len([path for path in devices.glob("davinci*") if path.name.removeprefix("davinci").isdigit()])
    if not count:
        raise ConfigError(
            "no card is visible (no /dev/davinci*, ASCEND_RT_VISIBLE_DEVICES is not set): pass --cards N, or "
            "use --simulated"
        )
    return min(count, MAX_CARDS)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        sys.exit(2)
