"""The environment in which a child process finds the simulated ``torch_npu`` instead of a real one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from simnpu.errors import MissingDependencyError, PlatformError
from simnpu.settings import ACTIVE_VARIABLE, PYTHON_VARIABLE

PACKAGE = Path(__file__).resolve().parent
SITE = PACKAGE / "site_packages"  # what a program imports by Ascend's names: torch_npu, torchair, acl
ASCEND_HOME = PACKAGE / "ascend_home"  # stands for the CANN toolkit, of which programs read the version
PROGRAMS = PACKAGE / "bin"  # npu-smi

TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ATB_HOME_PATH")
ENTRY_POINTS = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
METADATA = """Metadata-Version: 2.1
Name: torch_npu
Version: {version}
Summary: Simulated Ascend device (simnpu); not Huawei's torch_npu
"""


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (the current environment by default) with the simulated device in it, for a child process.

    The child needs nothing else: ``import torch`` loads the device by itself, as it does with the real torch_npu.
    """
    refuse_beside_real_torch_npu(search_path())
    env = dict(os.environ if base is None else base)
    paths = [*map(str, own_paths()), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if (root := str(PACKAGE.parent)) not in installed_folders():  # simnpu itself runs from a source tree
        paths.append(root)
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    env[ACTIVE_VARIABLE] = "1"
    env.update(with_programs(env))
    for variable in TOOLKIT_VARIABLES:
        env.setdefault(variable, str(ASCEND_HOME))
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)  # set to 0, it would leave torch without the device
    return env


def with_programs(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put ``npu-smi`` on the path of a process with the environment ``env``."""
    path = [str(PROGRAMS), *filter(None, env.get("PATH", os.defpath).split(os.pathsep))]
    return {"PATH": os.pathsep.join(dict.fromkeys(path)), PYTHON_VARIABLE: sys.executable}


def own_paths() -> list[Path]:
    """Return the entries to put in front of ``sys.path``: the packages, and the folder with their metadata."""
    return [SITE, metadata_folder()]


def search_path() -> list[str]:
    """``sys.path`` without our own folders: where a real torch_npu would be found."""
    return [path for path in sys.path if path and Path(path) != SITE]


def installed_folders() -> set[str]:
    """Return the site-packages folders of this interpreter, which every child searches anyway."""
    return {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}


def simulated_version() -> str:
    """Version of the simulated torch_npu: torch's release and ``+simnpu``, since torch_npu's releases follow torch's."""
    from importlib.metadata import (  # late: a command line imports this package for its errors
        PackageNotFoundError,
        version,
    )

    from packaging.version import Version

    try:
        return f"{Version(version('torch')).base_version}+simnpu"
    except PackageNotFoundError:
        raise MissingDependencyError("simnpu needs torch, which is not installed: pip install torch") from None


def metadata_folder() -> Path:
    """Create a folder whose ``torch_npu-*.dist-info`` answers ``importlib.metadata`` and makes ``import torch`` load us.

    Made once per torch version in the user's cache: the version is only known here, and ``import torch`` looks for its
    backends through files alone, before any hook of ours could run.
    """
    release = simulated_version()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simnpu" / release
    info = cache / f"torch_npu-{release}.dist-info"
    files = {"entry_points.txt": ENTRY_POINTS, "METADATA": METADATA.format(version=release)}
    try:
        info.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            if not (info / name).is_file() or (info / name).read_text(encoding="utf-8") != text:
                write_at_once(info / name, text)
    except OSError as error:
        raise PlatformError(
            f"simnpu cannot write its package metadata to {info} ({error}); set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error
    return cache


def write_at_once(path: Path, text: str) -> None:
    """Write a file so that a rank starting at the same moment reads all of it or none."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


PROBE_S = 120.0


def refuse_beside_real_torch_npu(search_path: Iterable[str]) -> None:
    """Raise if a real torch_npu that can be imported lies on ``search_path``.

    A wheel whose import fails (without CANN: ``libhccl.so: cannot open shared object file``) is shadowed instead, with
    a line on stderr.
    """
    paths = list(search_path)
    spec = PathFinder.find_spec("torch_npu", paths)
    if spec is None or spec.origin is None:
        return
    failure = import_failure(tuple(paths))
    if failure is None:
        raise PlatformError(
            f"a real torch_npu is installed and works ({spec.origin}): simnpu does not replace it. Run the "
            "program without simnpu, or use an environment without torch_npu"
        )
    message = f"simnpu: the installed torch_npu ({spec.origin}) cannot be imported and is shadowed: {failure}"
    print(message, file=sys.stderr)


@cache  # a probe is a whole `import torch`
def import_failure(search_path: tuple[str, ...]) -> str | None:
    """Return why ``import torch_npu`` fails in a process of its own with this search path, or None if it works."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": os.pathsep.join(search_path)}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", "import torch_npu"],
            env=env,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(
            f"a torch_npu is installed and its import did not end within {PROBE_S:.0f} s, so whether it works is not "
            "known; simnpu needs an environment without it"
        ) from None
    if probe.returncode == 0:
        return None
    return (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
