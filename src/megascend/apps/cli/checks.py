"""The checks of ``megascend doctor``. Each returns a :class:`Check`; :mod:`megascend.apps.cli.doctor` formats them.

Code that imports torch runs in a separate process, so that an import that crashes or hangs becomes the result of a check.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megascend.runtime.distributed.launch import child_environment
from megascend.surroundings import announce, is_installed

Status = Literal["ok", "warn", "fail", "skip"]
GIB = 1024**3
LOOKING_AT = "megascend doctor looks at: "
"""Prefix of the line in which the NPU helper names its next check, in case that check crashes it."""


@dataclass(frozen=True)
class Check:
    """Result of one check: its subject, the result, and a remedy if there is a problem."""

    name: str
    status: Status
    result: str
    hint: str = ""
    values: dict[str, Any] = field(default_factory=dict)


class HelperError(Exception):
    """A helper process gave no answer; the message is its error output or the reason."""


def run_checks(timeout: float) -> list[Check]:
    """Run all checks, in the order in which one explains the next."""
    announce("importing torch in another process")
    torch, npu = check_torch(timeout), check_npu(timeout)
    checks = [check_python(), *check_versions(), torch, *npu]
    if torch.status == "fail":
        checks += [Check(name, "skip", "needs torch") for name in ("platform", "bootstrap", "collectives")]
    else:
        checks.append(check_platform(timeout))
        # A bootstrap for the NPU would fail for the same reason, with a longer message.
        unmet = [check.name for check in npu if check.status == "fail"]
        if unmet and checks[-1].values.get("chosen") == "npu":
            checks.append(Check("bootstrap", "skip", f"needs {', '.join(unmet)}"))
        else:
            announce("importing Megatron-Core in another process")
            checks.append(check_bootstrap(timeout))
        announce("connecting two processes")
        checks.append(check_collectives(timeout))
    return [*checks, check_threads(os.environ), check_memory(), check_shared_memory(), check_disk(Path.cwd())]


def run_python(arguments: Sequence[str], timeout: float, **environment: str) -> dict[str, Any]:
    """Return the JSON object in the last line that this Python prints with ``arguments``; kill it after ``timeout`` seconds.

    Raises:
        HelperError: it printed none.
    """
    # The current sys.path, so that the helper imports the same packages as this process.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        completed = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            check=False,
            env=child_environment() | {"PYTHONPATH": path} | environment,
            encoding="utf-8",
            # A program that crashes may write bytes that are not UTF-8; its report must not fail for that.
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise HelperError(f"no answer within {timeout:g} s") from None
    text, code = completed.stderr.strip(), f"exit code {completed.returncode}"
    if completed.returncode < 0:  # by a signal, which its output cannot mention
        raise HelperError(f"{text}\n{code}".strip())
    if completed.returncode:
        raise HelperError(text or code)
    # The last line: packages may print on import.
    return json.loads(completed.stdout.strip().splitlines()[-1])


def explain_import_failure(text: str) -> tuple[str, str]:
    """Summarize a failed import's traceback and suggest a remedy."""
    from megascend.runtime.platforms.npu import ASCEND_LIBRARY, WITHOUT_CANN

    lines = text.strip().splitlines() or ["unknown error"]
    last = lines[-1]
    if library := next((line for line in lines if ASCEND_LIBRARY.search(line) and "Error: " in line), None):
        return (last if library == last else f"{last} ({library})"), WITHOUT_CANN
    if "Failed to load the backend extension" in text:
        return last, (
            "torch loads torch_npu by itself, and torch_npu fails: see 'torch_npu' below; "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch start without it"
        )
    if "No module named" in last:
        return last, "install it into this environment: pip install 'megascend[stack-0-16]'"
    return last, ""


def failed_import(name: str, problem: HelperError) -> Check:
    return Check(name, "fail", *explain_import_failure(str(problem)))


def asked(name: str, code: str, timeout: float, describe: Callable[[dict[str, Any]], str]) -> Check:
    """Run ``code`` in a helper process; ``describe`` makes the result of its answer."""
    try:
        answer = run_python(["-c", code], timeout)
    except HelperError as problem:
        return failed_import(name, problem)
    return Check(name, "ok", describe(answer), values=answer)


def warned(name: str, result: str, hint: str, values: dict[str, Any], *, low: bool) -> Check:
    """Return a check that warns with ``hint`` if something is ``low``; training still works."""
    return Check(name, "warn" if low else "ok", result, hint if low else "", values)


def check_python() -> Check:
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", "ok", version)


def check_versions() -> list[Check]:
    """Check installed packages against the version table, one line each."""
    from megascend.runtime.bootstrap.versions import findings, installed_versions

    return [
        Check(
            finding.package,
            "fail" if finding.problem else "ok",
            finding.installed or "not installed",
            finding.problem,
            {"wanted": finding.required},
        )
        for finding in findings(installed_versions())
    ]


def check_torch(timeout: float) -> Check:
    """Check that torch imports, and list the devices it sees."""
    code = (
        "import json, torch\n"
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if names else None\n"
        "print(json.dumps({'version': torch.__version__, 'devices': names, 'memory_gib': gib}))"
    )

    def describe(answer: dict[str, Any]) -> str:
        return f"{len(answer['devices'])} x {answer['devices'][0]}" if answer["devices"] else "no CUDA device"

    return asked("torch import", code, timeout, describe)


def check_npu(timeout: float) -> list[Check]:
    """Check the requirements of the platform ``npu``, one line each, if torch_npu is installed."""
    if not is_installed("torch_npu"):
        return [Check("torch_npu", "skip", "not installed")]
    code = (
        "import json, sys\n"
        "from dataclasses import asdict\n"
        "import simnpu\n"
        "from megascend.runtime.bootstrap.providers import provider_for\n"
        f"tell = lambda name: print({LOOKING_AT!r} + name, file=sys.stderr, flush=True)\n"
        "findings = [asdict(finding) for finding in provider_for('npu').findings(before_each=tell)]\n"
        "print(json.dumps({'findings': findings, 'simulated': simnpu.is_active()}))"
    )
    # Without autoload: torch itself would fail on a broken torch_npu before any check could name the cause.
    try:
        answer = run_python(["-c", code], timeout, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    except HelperError as problem:
        lines = str(problem).splitlines()
        looked_at = [line.removeprefix(LOOKING_AT) for line in lines if line.startswith(LOOKING_AT)]
        others = "\n".join(line for line in lines if not line.startswith(LOOKING_AT))
        return [failed_import(looked_at[-1] if looked_at else "torch_npu", HelperError(others))]
    checks = [
        Check(
            finding["name"], "fail" if finding["problem"] else "ok", finding["state"] or "not ready", finding["problem"]
        )
        for finding in answer["findings"]
    ]
    if answer["simulated"]:
        summary = "the npu device is SIMULATED on this machine's CPU and memory"
        hint = "numbers and refusals mean something here, speed and memory use do not; no card was checked"
        checks.insert(0, Check("simulated device", "warn", summary, hint, {"simulated": True}))
    return checks


def check_platform(timeout: float) -> Check:
    """Report the platform that ``auto`` selects here, and why the others are unavailable."""
    code = (
        "import json\n"
        "from megascend.errors import PlatformError\n"
        "from megascend.runtime.platforms import PLATFORMS, choose\n"
        "reasons = {}\n"
        "for name in PLATFORMS:\n"
        "    try: choose(name)\n"
        "    except PlatformError as error: reasons[name] = str(error)\n"
        "print(json.dumps({'chosen': choose().name, 'unavailable': reasons}))"
    )
    above = ["npu"] if is_installed("torch_npu") else []  # check_npu reports it already

    def describe(answer: dict[str, Any]) -> str:
        reasons = "; ".join(reason for name, reason in answer["unavailable"].items() if name not in above)
        return answer["chosen"] + (f"  ({reasons})" if reasons else "")

    return asked("platform", code, timeout, describe)


def check_bootstrap(timeout: float) -> Check:
    """Run the bootstrap, and import Megatron-Core and mcore-bridge after it."""
    code = (
        "import json, time\n"
        "start = time.monotonic()\n"
        "import megascend\n"
        "runtime = megascend.bootstrap()\n"
        "runtime.load_megatron()\n"
        "answer = {'stack': runtime.stack.name, 'platform': runtime.platform.name, 'changes': runtime.changes}\n"
        "print(json.dumps(answer | {'seconds': round(time.monotonic() - start, 2)}))"
    )

    def describe(answer: dict[str, Any]) -> str:
        return f"stack {answer['stack']} on {answer['platform']}, Megatron-Core imported in {answer['seconds']:.1f} s"

    return asked("bootstrap", code, timeout, describe)


def check_collectives(timeout: float) -> Check:
    """Run an all-reduce between two local processes over Gloo, on which every object collective relies."""
    with tempfile.TemporaryDirectory(prefix="megascend-doctor-") as folder, ThreadPoolExecutor(2) as pool:
        arguments = ["-m", "megascend.apps.cli.probe_collectives", str(Path(folder) / "store"), "2"]
        # One thread a rank: the figure should not depend on the number of cores.
        ranks = [pool.submit(run_python, [*arguments, str(rank)], timeout, OMP_NUM_THREADS="1") for rank in range(2)]
        try:
            answer, _ = [rank.result() for rank in ranks]
        except HelperError as problem:
            last = str(problem).splitlines()[-1]
            hint = "could Gloo not connect two processes? GLOO_SOCKET_IFNAME=lo pins it to the loopback interface"
            return Check("collectives", "fail", last, hint)
    latency, bandwidth = answer["latency_us"], answer["bandwidth_gb_s"]
    summary = f"gloo, 2 ranks: {latency:.0f} us for 8 bytes, {bandwidth:.2f} GB/s for 16 MiB"
    hint = "much slower than usual: is the machine overloaded?"
    return warned("collectives", summary, hint, answer, low=latency > 20_000 or bandwidth < 0.05)


def check_threads(environment: Mapping[str, str]) -> Check:
    """Report the cores this process may use, and the thread setting that decides how ranks share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = environment.get("OMP_NUM_THREADS")
    summary, values = (
        f"{cores} cores, OMP_NUM_THREADS={setting or 'not set'}",
        {"cores": cores, "omp_num_threads": setting},
    )
    # OMP_NUM_THREADS may also be a list for nested levels, which is left alone.
    low = setting is not None and setting.isdigit() and int(setting) > cores
    hint = f"OMP_NUM_THREADS={setting} exceeds the {cores} cores: ranks will wait for each other; set it to 1 on CPU"
    return warned("threads", summary, hint, values, low=low)


def check_memory() -> Check:
    """Check main memory; a rank needs about half a GiB before it holds any model."""
    import psutil

    memory = psutil.virtual_memory()
    summary = f"{memory.available / GIB:.1f} GiB of {memory.total / GIB:.1f} GiB free"
    values = {"available_bytes": memory.available, "total_bytes": memory.total}
    hint = "each rank takes about 0.5 GiB before it holds a model"
    return warned("memory", summary, hint, values, low=memory.available < 2 * GIB)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Check:
    """Check shared memory: NCCL, HCCL and data loaders use it; containers often get 64 MiB."""
    if not path.is_dir():
        return Check("shared memory", "warn", f"no {path}", "NCCL, HCCL and data loader workers need it")
    usage = shutil.disk_usage(path)
    summary, values = f"{usage.free / GIB:.2f} GiB of {usage.total / GIB:.2f} GiB free", {"free_bytes": usage.free}
    # Docker's default is 64 MiB, with which data loader workers end with a bus error.
    hint = f"under 1 GiB in {path}: give the container more, for example docker run --shm-size=8g (or --ipc=host)"
    return warned("shared memory", summary, hint, values, low=usage.free < GIB)


def check_disk(path: Path) -> Check:
    free = shutil.disk_usage(path).free
    hint = "a checkpoint with optimizer state takes 14 bytes a parameter"
    return warned("disk", f"{free / GIB:.1f} GiB free here", hint, {"free_bytes": free}, low=free < 5 * GIB)
