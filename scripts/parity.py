"""Print tables of parity: layouts and families against Hugging Face + torch AdamW, on the installed stack.

    python scripts/parity.py [--only REGEX] [--json FILE]
    python scripts/parity.py --lora                       # one LoRA adapter against peft, the base model frozen
    python scripts/parity.py --platform cuda --jobs 4     # on GPUs, one for each process, four cases at a time
    megascend simnpu -- python scripts/parity.py --platform npu   # with MindSpeed on the path, on the simulated device
    python scripts/parity.py --store benchmarks/families/cpu.json  # families, trained weights too

Exits with 1 if a case fails or exceeds its bound; one that needs more GPUs than there are is skipped. The full
matrix takes a few minutes on the CPU. On CUDA the cases are those that Transformer Engine can run: fp32 on padded batches and
without CP, 16 bits packed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megascend.errors import DistributedTestError

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for its package support

LORA_LOGITS_BOUND = 2e-5
WORKER_TIMEOUT_S = 180
ADAPTERS_TIMEOUT_S = 300
PACKAGES = ("megatron-core", "mcore-bridge", "torch", "transformers", "peft", "torch_npu", "mindspeed")
FAMILY_STEPS = 3
"""As in tests/models: later steps show how much a family amplifies rounding, more than how exact its gradients are."""
MARKS = {True: "", False: " (failed or over its bound)", None: " (skipped)"}
REFUSAL = re.compile(r"megascend\.errors\.(?:ConfigError|TopologyError|VersionError): (.+)")


def measure(pattern: str, folder: Path, platform_name: str, lora: bool, jobs: int) -> list[dict[str, Any]]:
    """Measure one row a case whose name matches ``pattern``; ``jobs`` at a time, where each is a process of its own."""
    from megascend.runtime.platforms import choose
    from megascend.testing.parity import Differences, bounds, case_checkpoint, differences, hf_reference, token_lists
    from support.lora_parity import adapter_differences, case_adapter, peft_reference

    forks = prepare(platform_name)
    tokens, chosen = token_lists(), cases(pattern, platform_name, lora)
    unmeasured = {} if forks else missing_devices(chosen, choose(platform_name).device_count() or 1)
    # What forks a process is done before there are threads.
    checkpoints = {}
    for case in (case for case in chosen if case.name not in unmeasured):
        try:
            checkpoints[case.name] = case_checkpoint(folder, case.arch, **case.overrides)
        except DistributedTestError as error:  # the installed transformers may lack a family
            unmeasured[case.name] = {"error": str(error), "within_bounds": False}
    if lora and not forks:
        make_adapters(pattern, folder, platform_name)
    adapters = {
        case.name: case_adapter(checkpoints[case.name], case) for case in chosen if lora and case.name in checkpoints
    }
    blank = vars(Differences(None, None, None)) | ({"factors": None} if lora else {})

    def row(case: Any) -> dict[str, Any]:
        try:
            result = unmeasured.get(case.name) or compared(case)
        except (subprocess.SubprocessError, DistributedTestError) as error:
            result = {"error": str(error), "within_bounds": False}
        if reason := result.get("skipped"):
            print(f"{case.name}: skipped, {reason}", file=sys.stderr, flush=True)
        if reason := result.get("error"):
            print(f"{case.name}: FAILED, {reason}", file=sys.stderr, flush=True)
        return {"case": case.name, "processes": case.world_size, **blank, **result}

    def compared(case: Any) -> dict[str, Any]:
        checkpoint, steps = checkpoints[case.name], case_steps(case)
        loss_bound, norm_bound = case.loss_bound, case.norm_bound
        if lora:
            adapter = adapters[case.name]
            measured = run(case, checkpoint, tokens, platform_name, forks, adapter)
            errors: Any = adapter_differences(measured, peft_reference(folder, checkpoint, adapter, tokens))
        else:
            reference = hf_reference(folder, checkpoint, tokens, steps, case.aux_loss, aux_formula=case.aux_formula)
            errors = differences(run(case, checkpoint, tokens, platform_name, forks), reference)
            if steps == FAMILY_STEPS:
                loss_bound, norm_bound = bounds(case, folder, checkpoint, tokens, steps)
        within_bounds = errors.loss <= loss_bound and errors.grad_norm <= norm_bound
        if case.precision == "fp32" and errors.logits is not None:
            within_bounds = within_bounds and errors.logits <= (LORA_LOGITS_BOUND if lora else case.logits_bound)
        verdict = "ok" if within_bounds else "OVER ITS BOUND"
        print(f"{case.name}: {verdict}, {errors}", file=sys.stderr, flush=True)
        return {**vars(errors), "within_bounds": within_bounds}

    if forks or jobs == 1:
        return [row(case) for case in chosen]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(row, chosen))


def missing_devices(chosen: list[Any], count: int) -> dict[str, dict[str, Any]]:
    """Return rows of the cases that ``count`` devices cannot run: each of their processes has one of its own."""
    return {
        case.name: {"skipped": f"needs {case.world_size} devices, and there are {count}", "within_bounds": None}
        for case in chosen
        if case.world_size > count
    }


def case_steps(case: Any) -> int:
    """Return the steps of a case: few for families, whose names have a colon."""
    from megascend.testing.parity import STEPS

    return FAMILY_STEPS if ": " in case.name else STEPS


def cases(pattern: str, platform_name: str, lora: bool = False) -> list[Any]:
    """Return the matrix's cases whose name matches."""
    from support.lora_parity import lora_matrix
    from support.parity_matrix import family_matrix, matrix

    # The cases of a family begin with its model_type: "deepseek_v3: TP2 + SP".
    matrix_cases = lora_matrix(platform_name) if lora else [*matrix(platform_name), *family_matrix(platform_name)]
    return [case for case in matrix_cases if re.search(pattern, case.name)]


def store_families(path: Path, pattern: str, folder: Path, platform_name: str) -> bool:
    """Compare families with Hugging Face, trained weights too, and write each case into a file; return whether all are in bounds.

    A row has deviations relative to the reference, or the sentence with which the platform refuses the case. Other rows of the
    file stay, if they were measured with the same versions.
    """
    from megascend.testing.parity import (
        bounds,
        case_checkpoint,
        differences,
        hf_reference,
        relative_differences,
        token_lists,
        train_case,
    )
    from support.parity_matrix import family_matrix

    prepare(platform_name)
    tokens, versions = token_lists(), installed_versions()
    header = {"platform": platform_name, "machine": platform.machine(), "steps": FAMILY_STEPS, "versions": versions}
    rows: dict[str, Any] = {}
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        rows = stored.pop("rows") if {name: stored.get(name) for name in header} == header else {}
    chosen = [case for case in family_matrix(platform_name) if re.search(pattern, case.name)]
    if not chosen:
        raise SystemExit(f"no case of a family matches {pattern!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    within_bounds = True
    for case in chosen:
        try:
            checkpoint = case_checkpoint(folder, case.arch)
            trained = train_case(case, checkpoint, tokens, FAMILY_STEPS, weights=True)
        except DistributedTestError as error:
            refusals = REFUSAL.findall(str(error))
            if not refusals:
                print(f"{case.name}: FAILED, {error}", file=sys.stderr, flush=True)
                within_bounds = False
                continue
            rows[case.name] = {"refused": refusals[-1]}
        else:
            reference = hf_reference(folder, checkpoint, tokens, FAMILY_STEPS, weights=True)
            absolute = differences(trained, reference)
            loss_bound, norm_bound = bounds(case, folder, checkpoint, tokens, FAMILY_STEPS)
            bounded = absolute.loss <= loss_bound and absolute.grad_norm <= norm_bound
            rows[case.name] = vars(relative_differences(trained, reference)) | {"within_bounds": bounded}
            within_bounds = within_bounds and bounded
        print(case.name, rows[case.name], file=sys.stderr, flush=True)
        path.write_text(json.dumps(header | {"rows": dict(sorted(rows.items()))}, indent=1) + "\n", encoding="utf-8")
    return within_bounds


def installed_versions() -> dict[str, str]:
    """Return the versions of :data:`PACKAGES`, without those that are not installed."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def make_adapters(pattern: str, folder: Path, platform_name: str) -> None:
    """Make the adapters that the cases start from, all in one process on the CPU: there ranks are forked, which is fast."""
    command = [sys.executable, __file__, "--make-adapters", str(folder), "--only", pattern, "--platform", platform_name]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=ADAPTERS_TIMEOUT_S, env={**os.environ, **hidden})


def adapter_maker(pattern: str, folder: Path, platform_name: str) -> None:
    """Make adapters; the body of the process of :func:`make_adapters`."""
    from megascend.testing.parity import case_checkpoint
    from support.lora_parity import case_adapter

    prepare("cpu")
    for case in cases(pattern, platform_name, lora=True):
        with contextlib.suppress(DistributedTestError):  # measure() reports a checkpoint that cannot be built
            case_adapter(case_checkpoint(folder, case.arch, **case.overrides), case)


def prepare(platform_name: str) -> bool:
    """Import Megatron for forked ranks if devices are CPU memory; return whether ranks are forked."""
    import megascend
    import simnpu

    forks = platform_name == "cpu" or simnpu.is_active()
    if forks:
        megascend.bootstrap(platform_name).load_megatron()
    return forks


def run(
    case: Any,
    checkpoint: Path,
    tokens: list[list[int]],
    platform_name: str,
    forks: bool,
    adapter: Path | None = None,
) -> Any:
    """Return the trajectory of the case, or of ``adapter`` in it, on forked processes or torchrun's."""
    import torch

    from megascend.testing.parity import train_case
    from support.lora_parity import train_adapter

    if forks:
        if adapter is not None:
            return train_adapter(case, checkpoint, adapter, checkpoint.parent / "trained")
        return train_case(case, checkpoint, tokens, case_steps(case))
    result = checkpoint.parent / f"trajectory-{case.name.replace(' ', '_')}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.world_size}"]
    command += [__file__, "--worker", case.name, str(checkpoint), str(result), "--platform", platform_name]
    command += ["--lora"] if adapter is not None else []
    subprocess.run(command, check=True, timeout=WORKER_TIMEOUT_S)
    return torch.load(result, weights_only=False)


def worker(name: str, checkpoint: Path, result: Path, platform_name: str, lora: bool) -> None:
    """Run one rank under torchrun; rank 0 writes its trajectory."""
    import torch

    import megascend
    from megascend.testing.parity import STEPS, run_case, token_lists
    from support.lora_parity import case_adapter, run_adapter

    megascend.bootstrap(platform_name)
    (case,) = cases(f"^{re.escape(name)}$", platform_name, lora)
    if lora:
        adapter = case_adapter(checkpoint, case)
        trajectory: Any = run_adapter(case, checkpoint, adapter, STEPS, result.with_suffix(".trained"))
    else:
        trajectory = run_case(case, checkpoint, token_lists(), case_steps(case))
    if os.environ["RANK"] == "0":
        torch.save(trajectory, result)


def table(rows: list[dict[str, Any]], versions: dict[str, str], platform_name: str, lora: bool) -> str:
    """``rows`` as Markdown, with what they were measured on above."""

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}"

    lines = [
        ", ".join(f"{name} {number}" for name, number in versions.items())
        + f"; {platform.machine()}, platform {platform_name}",
        "",
        "| case | processes | max dLoss | max dGradNorm | " + ("factors | " if lora else "") + "logits |",
        "|---|---|---|---|---|" + ("---|" if lora else ""),
    ]
    columns = ("loss", "grad_norm", "factors", "logits") if lora else ("loss", "grad_norm", "logits")
    for row in rows:
        mark = MARKS[row["within_bounds"]]
        figures = " | ".join(figure(row[name]) for name in columns)
        lines.append(f"| {row['case']}{mark} | {row['processes']} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases whose name matches")
    parser.add_argument("--lora", action="store_true", help="train one adapter of all linear layers, against peft")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, besides the table")
    parser.add_argument("--platform", choices=("cpu", "cuda", "npu"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="CUDA: cases side by side; they share the GPUs")
    parser.add_argument("--store", type=Path, metavar="FILE", help="CPU, NPU: only families, written into a JSON file")
    parser.add_argument("--make-adapters", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=3, metavar=("CASE", "CHECKPOINT", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make_adapters:
        adapter_maker(arguments.only, arguments.make_adapters, arguments.platform)
        return 0
    if arguments.worker:
        name, checkpoint, result = arguments.worker
        worker(name, Path(checkpoint), Path(result), arguments.platform, arguments.lora)
        return 0
    with tempfile.TemporaryDirectory(prefix="megascend-parity-") as folder:
        if arguments.store:
            return 0 if store_families(arguments.store, arguments.only, Path(folder), arguments.platform) else 1
        rows = measure(arguments.only, Path(folder), arguments.platform, arguments.lora, arguments.jobs)
    if not rows:
        parser.error(f"no case matches {arguments.only!r}")
    versions = installed_versions()
    # A file, and not stdout: kernel compilers print there too.
    if arguments.json:
        arguments.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(table(rows, versions, arguments.platform, arguments.lora))
    return 1 if any(row["within_bounds"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
