"""Parts shared by the providers for Ascend: prerequisites of a host with NPUs, and guards around imports that patch.

The prerequisites import none of megatron, transformer_engine, triton and mcore_bridge: most of them use ``find_spec``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

import simnpu
from megascend.changes import patch
from megascend.errors import PlatformError, VersionError
from megascend.runtime.bootstrap.providers import Finding
from megascend.runtime.bootstrap.runtime import suppress_logs_below
from megascend.runtime.bootstrap.versions import Stack, cann_for, installed_version, installed_versions
from megascend.runtime.platforms.npu import torch_npu_problem

BRIDGE = "mcore_bridge"
INSTALL_INFO = ("ascend_toolkit_install.info", "ascend_nnae_install.info")
"""Files with the version of a toolkit, and of nnae, its part that runs models: in a home, or in its folder of an architecture."""
_CANN = r"\d+\.\d+(?:\.\d+)?(?:\.RC\d+)?"
DROPS_FLOAT64 = "torch_all_reduce_double_dtype_bypass_wrapper"
"""Wrapper of ``all_reduce`` in MindSpeed that reduces a copy of a float64 tensor and discards the result."""


@dataclass(frozen=True)
class Prerequisite:
    """One condition of the imports that patch Megatron-Core.

    Attributes:
        name: name in reports.
        check: returns a short description of the state, or raises PlatformError or VersionError with the remedy.
    """

    name: str
    check: Callable[[Stack], str]


def check(prerequisites: Sequence[Prerequisite], stack: Stack) -> None:
    """Raise PlatformError or VersionError if the imports would fail half-way or patch the wrong package."""
    for prerequisite in prerequisites:
        prerequisite.check(stack)


def findings(
    prerequisites: Sequence[Prerequisite],
    stack: Stack,
    before_each: Callable[[str], object] = lambda name: None,
) -> list[Finding]:
    """Check every prerequisite, even if an earlier one fails; for ``megascend doctor``.

    ``before_each`` is called with the name of the next one, which identifies a check that ends the process.
    """
    result = []
    for prerequisite in prerequisites:
        before_each(prerequisite.name)
        try:
            result.append(Finding(prerequisite.name, prerequisite.check(stack)))
        except (PlatformError, VersionError) as error:
            result.append(Finding(prerequisite.name, "", str(error)))
    return result


def check_torch_npu(stack: Stack) -> str:
    problem = torch_npu_problem()
    if problem:
        raise PlatformError(f"platform 'npu' cannot be used here: {problem}")
    torch, torch_npu = import_module("torch"), import_module("torch_npu")
    count = torch.npu.device_count()
    return f"{torch_npu.__version__}, {count} x {torch.npu.get_device_name(0)}"


def check_cann(stack: Stack) -> str:
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        raise PlatformError(
            "ASCEND_HOME_PATH is not set, so CANN's compilers cannot be found: source set_env.sh "
            "(/usr/local/Ascend/ascend-toolkit/set_env.sh)"
        )
    version = cann_version(Path(home))
    if simnpu.is_active() or (version or "").endswith("+simnpu"):
        return f"{home}: the device is simulated, without CANN"
    if version is None:
        raise PlatformError(
            f"ASCEND_HOME_PATH={home} has no CANN (version.cfg, {', '.join(INSTALL_INFO)}): source the set_env.sh of one"
        )
    try:
        torch_npu = _version_of("torch_npu")
    except VersionError:  # another check's
        return f"{version} in {home}"
    released_with, oldest = cann_for(torch_npu) or (version, version)
    if _comparable(version) < _comparable(oldest):
        raise VersionError(
            f"CANN {version} is in {home}; torch_npu {torch_npu} was released with {released_with} and works from {oldest} on"
        )
    older = _comparable(version) < _comparable(released_with)
    return f"{version} in {home}" + (f"; torch_npu {torch_npu} was released with {released_with}" if older else "")


def cann_version(home: Path) -> str | None:
    """Return the version of the CANN toolkit in a folder such as ``ascend-toolkit/latest`` or ``cann-8.5.0``, as spelt there."""
    sources = [(home / "version.cfg", r"^toolkit_running_version=\[[^\]\n]*?:?([^:\]\n]+)\]")]
    files = [file for name in INSTALL_INFO for pattern in (name, f"*/{name}") for file in sorted(home.glob(pattern))]
    sources += [(file, r"^version=(\S+)") for file in files]
    for file, pattern in sources:
        with contextlib.suppress(OSError):
            found = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            if found and re.match(_CANN, found[1]):
                return found[1]
    return None


def _comparable(version: str) -> Version:
    # Beyond a release candidate's number CANN's versions (8.2.RC1.alpha003, 8.5.0.B160) are not of Python's form.
    match = re.match(_CANN, version)
    assert match is not None, version
    return Version(match[0])


def check_torch_pair(stack: Stack) -> str:
    torch, torch_npu = _version_of("torch"), _version_of("torch_npu")
    requirement = stack.requirement("torch-npu")
    if torch_npu not in requirement:
        raise VersionError(
            f"torch_npu {torch_npu} is installed; stack {stack.name} needs torch_npu{requirement} with the "
            f"torch of the same version. {stack}"
        )
    # torch_npu's extension links torch's C++ symbols, which change between minor versions.
    if torch_npu.release[:2] != torch.release[:2]:
        raise VersionError(
            f"torch_npu {torch_npu} is built for torch of the same version, but torch {torch} "
            "is installed: install the pair that torch_npu's release notes name"
        )
    return f"torch {torch}, torch_npu {torch_npu}"


def _version_of(package: str) -> Version:
    """Return a package's version from its metadata, which works for a torch_npu that cannot be imported, too."""
    version = installed_version(package) or getattr(sys.modules.get(package), "__version__", None)
    if version is None:
        raise VersionError(f"the version of {package} is not known: it has no metadata; install it with pip")
    return Version(version)


def check_undeclared(imports: Sequence[tuple[str, str, str]]) -> str:
    """Raise PlatformError for a missing module; ``imports``: the module, the package that imports it, and the remedy."""
    # The simulated device installs a stand-in for triton later, because torch must not detect a triton at its import.
    required = [row for row in imports if not (row[0] == "triton" and simnpu.is_active())]
    missing = [
        f"{user} needs {module} without declaring it, and it is not installed: {remedy}"
        for module, user, remedy in required
        if find_spec(module) is None
    ]
    if missing:
        raise PlatformError("; ".join(missing))
    return ", ".join(row[0] for row in required)


def is_for_npu(package: Path) -> bool:
    """Check whether the ``transformer_engine`` in folder ``package`` is Ascend's, whose code uses torch_npu."""
    return any("torch_npu" in path.read_text(errors="replace", encoding="utf-8") for path in package.rglob("*.py"))


def check_megatron(stack: Stack) -> str:
    """Check that the ``megatron.core`` on the path is the installed one; PYTHONPATH may put another tree first."""
    megatron = find_spec("megatron")
    search_path = list(megatron.submodule_search_locations or []) if megatron else []
    # Without importing megatron, which is only allowed after the patches; they are applied only if this check passes.
    spec = PathFinder.find_spec("core", search_path)
    folders = list(spec.submodule_search_locations or []) if spec else []
    info = Path(folders[0]) / "package_info.py" if folders else Path()
    if not info.is_file():
        raise VersionError(
            f"no megatron/core/package_info.py in {search_path or 'sys.path'}: is megatron-core installed?"
        )
    # Not pip's metadata, which describes the installed package, while this may be another tree.
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", info.read_text(encoding="utf-8"), re.M))
    version = Version(".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")))
    if version not in stack.requirement("megatron-core"):
        raise VersionError(
            f"megatron.core would be imported from {info.parent}, which is version {version}, not from megatron-core "
            f"{installed_versions()['megatron-core']}: remove it from PYTHONPATH. {stack}"
        )
    return f"megatron.core is the installed {installed_versions()['megatron-core']}"


TORCH_NPU = Prerequisite("torch_npu", check_torch_npu)
CANN = Prerequisite("CANN", check_cann)
TORCH_PAIR = Prerequisite("torch pair", check_torch_pair)
MEGATRON = Prerequisite("Megatron tree", check_megatron)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress Python warnings and log records below error within the context; restore the root logger at its end."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with warnings.catch_warnings(), suppress_logs_below(logging.ERROR):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def import_errors(package: str) -> Iterator[None]:
    """Raise PlatformError for any failure within the context, which imports ``package``."""
    try:
        yield
    except SystemExit as error:  # argparse, if the package parses the command line after all
        raise PlatformError(f"importing {package} tried to end the process ({error.code})") from error
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        raise PlatformError(
            f"importing {package} failed: {type(error).__name__}: {error}. This process is patched half-way; start another"
        ) from error


def guard_module_scan() -> None:
    """Prevent MindSpeed's scan of ``sys.modules`` from importing lazy modules.

    For every patch it calls ``hasattr(module, name)`` for every module. A lazy module (for example transformers) then imports the
    module that defines the name, and crashes if an optional package is missing. No patch concerns such attributes, so only those
    that exist already are considered.
    """
    patch_utils: Any = import_module("mindspeed.patch_utils")

    def present(owner: Any, name: str) -> bool:
        return name in vars(owner) if isinstance(owner, ModuleType) else hasattr(owner, name)

    patch(patch_utils, "hasattr", present, "its scan of sys.modules leaves lazy modules alone")


def refusing_float64_wrapper(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.distributed.all_reduce`` to reduce float64 on the CPU, and to raise PlatformError on a device."""

    @functools.wraps(all_reduce)
    def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if tensor.dtype == torch.float64 and tensor.device.type != "cpu":
            raise PlatformError(
                "all_reduce of a float64 tensor on an NPU: HCCL has no float64, and MindSpeed would leave it as it was: reduce "
                "it as float32, or on the CPU over Gloo"
            )
        return all_reduce(tensor, *args, **kwargs)

    return wrapper


def keep_float64() -> None:
    """Replace MindSpeed's wrapper for float64 if it is the outermost of ``torch.distributed.all_reduce``. Idempotent."""
    import torch.distributed as dist

    all_reduce: Any = dist.all_reduce
    if getattr(getattr(all_reduce, "__code__", None), "co_qualname", "").partition(".")[0] != DROPS_FLOAT64:
        return
    replacement = refusing_float64_wrapper(all_reduce.__wrapped__)
    for module in (dist, import_module("torch.distributed.distributed_c10d")):
        if module.all_reduce is all_reduce:
            patch(module, "all_reduce", replacement, "float64: reduced on the CPU, refused on the NPU")


def bridge_rotary() -> Callable[..., Any]:
    """Return the ``apply_rotary_pos_emb`` that mcore-bridge's modules hold. Call right after its import."""
    if BRIDGE not in sys.modules:
        raise PlatformError("mcore_bridge is not imported yet")
    return import_module("megatron.core.models.common.embeddings.rope_utils").apply_rotary_pos_emb


def modules_with_other_rotary(expected: Any) -> list[str]:
    """Return mcore-bridge's modules whose ``apply_rotary_pos_emb`` is no longer ``expected``."""
    return [
        name
        for name, module in sys.modules.copy().items()
        if name.startswith(f"{BRIDGE}.") and vars(module).get("apply_rotary_pos_emb", expected) is not expected
    ]


def qualified_name(value: Any) -> str:
    """Return the module and the name of a class or function, for messages."""
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', value)}"
