"""Prerequisites of the import of MindSpeed's adaptor. Each error says what to install or to source.

Nothing here imports megatron, transformer_engine, triton or mcore_bridge: most checks use ``find_spec``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

import simnpu
from megascend.bootstrap.mindspeed import tree
from megascend.bootstrap.providers import Finding
from megascend.bootstrap.versions import Stack, installed_versions
from megascend.errors import PlatformError, VersionError
from megascend.platforms.npu import torch_npu_problem

HOW_MINDSPEED = (
    "git clone -b {branch} MindSpeed from its repository (it is not on PyPI), pip install --no-deps -e it, or put the "
    "checkout on PYTHONPATH; see docs/npu.md"
)

# Hard imports that MindSpeed does not declare: (module, who needs it, what to do, in which stacks).
UNDECLARED = (
    ("scipy", "MindSpeed", "pip install scipy", ("0.15", "0.16")),
    ("torchair", "MindSpeed", "it comes with torch_npu's wheel: reinstall torch_npu", ("0.15", "0.16")),
    ("triton", "MindSpeed", "pip install triton-ascend", ("0.16",)),
    ("einops", "MindSpeed", "pip install einops", ("0.15", "0.16")),
    ("acl", "MindSpeed", "it comes with CANN: source its set_env.sh, which extends PYTHONPATH", ("0.15", "0.16")),
)


@dataclass(frozen=True)
class Prerequisite:
    """One condition of the import.

    Attributes:
        name: name in reports.
        look: returns a short description of the state, or raises PlatformError or VersionError with the remedy.
    """

    name: str
    look: Callable[[Stack, Mapping[str, str]], str]


def check(stack: Stack, environment: Mapping[str, str] = os.environ) -> None:
    """Raise for a process in which MindSpeed would fail half-way or patch the wrong package."""
    for prerequisite in PREREQUISITES:
        prerequisite.look(stack, environment)


def findings(
    stack: Stack, environment: Mapping[str, str] = os.environ, before_each: Callable[[str], object] = lambda name: None
) -> list[Finding]:
    """Check every prerequisite, even if an earlier one fails; for ``megascend doctor``.

    ``before_each`` is called with the name of the next one, which identifies a check that ends the process.
    """
    result = []
    for prerequisite in PREREQUISITES:
        before_each(prerequisite.name)
        try:
            result.append(Finding(prerequisite.name, prerequisite.look(stack, environment)))
        except (PlatformError, VersionError) as error:
            result.append(Finding(prerequisite.name, "", str(error)))
    return result


def _check_torch_npu(stack: Stack, environment: Mapping[str, str]) -> str:
    problem = torch_npu_problem()
    if problem:
        raise PlatformError(f"platform 'npu' cannot be used here: {problem}")
    torch, torch_npu = import_module("torch"), import_module("torch_npu")
    count = torch.npu.device_count()
    return f"{torch_npu.__version__}, {count} x {torch.npu.get_device_name(0)}"


def _check_cann(stack: Stack, environment: Mapping[str, str]) -> str:
    home = environment.get("ASCEND_HOME_PATH")
    if not home:
        raise PlatformError(
            "ASCEND_HOME_PATH is not set, so CANN's compilers cannot be found: source its set_env.sh "
            "(/usr/local/Ascend/ascend-toolkit/set_env.sh) in the shell that starts the run"
        )
    return home


def _check_torch_pair(stack: Stack, environment: Mapping[str, str]) -> str:
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
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        module_version = getattr(sys.modules.get(package), "__version__", None)
    if module_version is None:
        raise VersionError(f"the version of {package} is not known: it has no metadata; install it with pip")
    return Version(module_version)


def _check_mindspeed(stack: Stack, environment: Mapping[str, str]) -> str:
    mindspeed, branch = tree.find(), tree.branch_of(stack)
    instructions = HOW_MINDSPEED.format(branch=branch)
    if mindspeed is None:
        raise PlatformError(f"platform 'npu' needs MindSpeed ({branch}), which is not installed: {instructions}")
    version = mindspeed.version_for(stack)
    if version is None:
        supported = " and ".join(tree.BRANCHES.values())
        raise VersionError(
            f"MindSpeed {mindspeed.name} is on the path ({mindspeed.folder / '__init__.py'}); stack {stack.name} needs branch "
            f"{branch}. {mindspeed.needs}Supported branches: {supported}. To get it: {instructions}"
        )
    return f"{version} ({mindspeed.folder})"


def _check_undeclared_imports(stack: Stack, environment: Mapping[str, str]) -> str:
    required = [row for row in UNDECLARED if stack.name in row[3]]
    if simnpu.is_active():
        # The simulated device installs a stand-in for triton later, because torch must not detect a triton at its import.
        required = [row for row in required if row[0] != "triton"]
    missing = [
        f"{user} needs {module} without declaring it, and it is not installed: {remedy}"
        for module, user, remedy, _ in required
        if find_spec(module) is None
    ]
    if missing:
        raise PlatformError("; ".join(missing))
    return ", ".join(row[0] for row in required)


def _check_transformer_engine(stack: Stack, environment: Mapping[str, str]) -> str:
    """Check that no Transformer Engine is installed: it would be imported instead of MindSpeed's dummy, and crash."""
    spec = find_spec("transformer_engine")
    if spec is None:
        return "none is installed, as it must be"
    if spec.origin is not None and is_for_npu(Path(spec.origin).parent):
        raise PlatformError(
            f"TransformerEngineNPU is installed as transformer_engine ({spec.origin}). It belongs to MindSpeed core_r0.17.0 "
            f"and later with MegatronAdaptor, which megascend does not support yet; other branches would import it "
            "instead of their own layers: pip uninstall transformer-engine"
        )
    raise PlatformError(
        f"CUDA's Transformer Engine is installed ({spec.origin}). MindSpeed would import it instead of its own layers, and "
        "it cannot run on an NPU host: pip uninstall transformer-engine transformer-engine-torch transformer-engine-cu12"
    )


def is_for_npu(package: Path) -> bool:
    """Check whether the ``transformer_engine`` in folder ``package`` is Ascend's, whose code uses torch_npu."""
    return any("torch_npu" in path.read_text(errors="replace", encoding="utf-8") for path in package.rglob("*.py"))


def _check_megatron(stack: Stack, environment: Mapping[str, str]) -> str:
    check_megatron_tree(stack)
    return f"megatron.core is the installed {installed_versions()['megatron-core']}"


def check_megatron_tree(stack: Stack) -> None:
    """Check that the ``megatron.core`` on the path is the installed one; PYTHONPATH may put another tree first."""
    megatron = find_spec("megatron")
    places = list(megatron.submodule_search_locations or []) if megatron else []
    # Without importing megatron: that is only allowed after the patches, and this check decides whether they come.
    spec = PathFinder.find_spec("core", places)
    folders = list(spec.submodule_search_locations or []) if spec else []
    info = Path(folders[0]) / "package_info.py" if folders else Path()
    if not info.is_file():
        raise VersionError(f"no megatron/core/package_info.py in {places or 'sys.path'}: is megatron-core installed?")
    # The file, not the metadata: pip's metadata describes the installed package, and this may be another tree.
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", info.read_text(encoding="utf-8"), re.M))
    version = Version(".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")))
    if version not in stack.requirement("megatron-core"):
        raise VersionError(
            f"megatron.core would be imported from {info.parent}, which is version {version}, while the installed "
            f"megatron-core is {installed_versions()['megatron-core']}: another Megatron tree comes first on sys.path. "
            f"Remove it from PYTHONPATH. {stack}"
        )


PREREQUISITES = (
    Prerequisite("torch_npu", _check_torch_npu),
    Prerequisite("CANN", _check_cann),
    Prerequisite("torch pair", _check_torch_pair),
    Prerequisite("MindSpeed", _check_mindspeed),
    Prerequisite("MindSpeed's imports", _check_undeclared_imports),
    Prerequisite("Transformer Engine", _check_transformer_engine),
    Prerequisite("Megatron tree", _check_megatron),
)
"""Prerequisites in the order of checking: the failure of one explains those of later ones."""
