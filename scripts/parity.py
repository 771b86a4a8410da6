"""Print the parity table of docs/numerics.md: every layout against Hugging Face + torch AdamW, on the installed stack.

    python scripts/parity.py [--only REGEX] [--json]
    python scripts/parity.py --platform cuda --precision bf16     # on GPUs: the cases that have enough of them

Exits with 1 if a case is over its bound. On the CPU, all of it takes a few minutes. On CUDA use bf16: Transformer Engine
has no packed attention in fp32.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

LOGITS_BOUND = 1e-5
LOSS_BOUND_16, NORM_BOUND_16 = 0.15, 0.5
"""For all cases when --precision asks for 16 bits; routing that flips makes MoE models the worst."""
PACKAGES = ("megatron-core", "mcore-bridge", "torch", "transformers", "peft")


def measure(pattern: str, folder: Path, platform_name: str, precision: str | None) -> list[dict[str, Any]]:
    """One row a case whose name matches ``pattern``."""
    import torch

    import megascend

    runtime = megascend.bootstrap(platform_name)
    runtime.load_megatron()
    devices = torch.cuda.device_count() if platform_name == "cuda" else sys.maxsize
    from megascend.testing.parity import case_checkpoint, differences, matrix, oracle, token_lists, train_case

    tokens, rows = token_lists(), []
    for case in matrix():
        if not re.search(pattern, case.name) or case.world_size > devices:
            continue
        if precision is not None:
            case = replace(case, precision=precision, loss_bound=LOSS_BOUND_16, norm_bound=NORM_BOUND_16)
        checkpoint = case_checkpoint(folder, case.arch, **case.overrides)
        reference = oracle(folder, checkpoint, tokens, aux_loss=case.aux_loss)
        found = differences(train_case(case, checkpoint, tokens), reference)
        within = found.loss <= case.loss_bound and found.grad_norm <= case.norm_bound
        if case.precision == "fp32" and found.logits is not None:
            within = within and found.logits <= LOGITS_BOUND
        rows.append({"case": case.name, "processes": case.world_size, **vars(found), "within_bounds": within})
        print(f"{case.name}: {'ok' if within else 'OVER ITS BOUND'}", file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """``rows`` as Markdown, with what they were measured on above."""

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}"

    lines = [
        ", ".join(f"{name} {number}" for name, number in versions.items()) + f"; {platform.machine()} CPU",
        "",
        "| case | processes | max dLoss | max dGradNorm | logits |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        mark = "" if row["within_bounds"] else " (over its bound)"
        figures = " | ".join(figure(row[name]) for name in ("loss", "grad_norm", "logits"))
        lines.append(f"| {row['case']}{mark} | {row['processes']} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases whose name matches")
    parser.add_argument("--json", action="store_true", help="JSON instead of a Markdown table")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp16", "bf16"), help="run every case in this precision")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megascend-parity-") as folder:
        rows = measure(arguments.only, Path(folder), arguments.platform, arguments.precision)
    if not rows:
        parser.error(f"no case matches {arguments.only!r}")
    versions = {name: version(name) for name in PACKAGES}
    print(json.dumps({"versions": versions, "rows": rows}, indent=2) if arguments.json else table(rows, versions))
    return 0 if all(row["within_bounds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
