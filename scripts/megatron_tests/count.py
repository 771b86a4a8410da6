"""Counts of a run of scripts/test_megatron.sh, with every failure under the first reason below whose text it has.

python scripts/megatron_tests/count.py FOLDER

FOLDER has a file for each rank. A test has passed if it passed on every rank; else the reason is that of the first other rank.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

NOT_RUN = "not run"
WORST_FIRST = ("failed", NOT_RUN, "skipped", "passed")

REASONS = (
    (
        "needs more ranks",
        r"world_size \(\d+\) is not divisible|Test requires world_size|[Nn]eeds? at least \d+ (GPUs|ranks)|over sized with world",
    ),
    (
        "a layout of world x world ranks is to be refused, and one rank has it",
        r"None = <function initialize_model_parallel",
    ),
    ("something is left over from the test before, which failed", r"is already initialized"),
    ("the simulated kernel refuses a dense mask with sparse_mode 2, as the real one does", r"set the atten_mask_shape"),
    ("compares a device's name with cuda", r"assert 'npu' == 'cuda'"),
    ("object collectives over HCCL, which megascend refuses", r"refuses object collectives"),
    ("the reference Transformer Engine refuses it by name", r"the reference Transformer Engine does not support"),
    (
        "MindSpeed's classes are others or lack an attribute",
        r"attribute '(rope_type|window_size|is_fp8_enabled|Format)'|mindspeed\.(dummy_module|te\.)",
    ),
    (
        "MindSpeed puts range_end, which needs an argument, in the place of nvtx.range_pop",
        r"mstx\.range_end\(\) missing",
    ),
    ("MindSpeed's norm has another shape than Transformer Engine's", r"doesn't match the broadcast shape \[1\]"),
    ("CUDA graphs", r"using cudagraphs"),
    ("CPU tensors on an HCCL group", r"No backend type associated with device type cpu"),
    ("the straggler detector's server starts only where CUDA is available", r"urlopen error"),
    ("expects a Transformer Engine below 1.7", r"DID NOT RAISE"),
    ("asks whether a tensor is_cuda", r"\.is_cuda$"),
    (
        "expects ranks that differ, and there are too few",
        r"assert \[\d\] != \[\d\]|check_param_hashes_across_dp_replicas",
    ),
)
NONE = "no reason is known"


def outcomes(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test (one of ``WORST_FIRST``) and its reason."""
    results: dict[str, tuple[str, str]] = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        for test, (outcome, reason) in read_rank(file).items():
            if test not in results or WORST_FIRST.index(outcome) < WORST_FIRST.index(results[test][0]):
                results[test] = outcome, reason
    return results


def read_rank(file: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test on one rank. "not run" is recorded at collection and stays if nothing follows."""
    results: dict[str, tuple[str, str]] = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        before = results.get(line["test"], (NOT_RUN, ""))[0]
        if before == NOT_RUN or WORST_FIRST.index(line["outcome"]) < WORST_FIRST.index(before):
            results[line["test"]] = line["outcome"], line["reason"]
    return results


def reason_of(text: str) -> str:
    """Return the name of the first of ``REASONS`` that matches a failure's text."""
    return next((name for name, pattern in REASONS if re.search(pattern, text)), NONE)


def main(folder: Path) -> None:
    """Print the counts, and failures by reason."""
    results = outcomes(folder)
    counts = Counter(outcome for outcome, _ in results.values())
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in reversed(WORST_FIRST)))
    failures: dict[str, list[tuple[str, str]]] = {}
    for test, (outcome, text) in results.items():
        if outcome in ("failed", NOT_RUN):
            failures.setdefault(reason_of(text), []).append((test, text))
    for name, tests in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(tests):4d}  {name}")
        for test, text in tests:
            print(f"      {test}: {' '.join(text.split())[:160]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
