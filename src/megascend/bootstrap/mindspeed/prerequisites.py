"""What must be there before MindSpeed's adaptor is imported. Each failure says what to install or to source.

Nothing here imports megatron, transformer_engine, triton or mcore_bridge: most questions are answered by ``find_spec``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from megascend import simnpu
from megascend.bootstrap.versions import Stack
from megascend.errors import PlatformError, VersionError

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
)


def torch_npu_problem() -> str | None:
    """Why torch_npu does not work here, or None. Imports torch and torch_npu."""
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install 'megascend[npu]' on a host with Ascend's driver and CANN"
    try:
        torch_npu = import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        return explain_torch_npu_failure(error)
    torch = import_module("torch")
    if not torch.npu.is_available():
        return (
            f"torch_npu {torch_npu.__version__} imports, but torch.npu.is_available() is False: no card is visible "
            "(npu-smi info; ASCEND_RT_VISIBLE_DEVICES; in a container, /dev/davinci* must be passed in)"
        )
    return None


def explain_torch_npu_failure(error: BaseException) -> str:
    """What the failed import of torch_npu (or, through its auto-loading, of torch) means, and what to do."""
    first = _root_cause(error)
    if re.search(r"lib(hccl|ascend|acl|ge_|graph|opapi|runtime)\S*\.so", first):
        return (
            f"torch_npu cannot load Ascend's libraries ({first}). On an NPU host: source CANN's set_env.sh "
            "(/usr/local/Ascend/ascend-toolkit/set_env.sh). Elsewhere: pip uninstall torch_npu, or run on the simulated "
            "device: megascend simnpu -- COMMAND. TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch start without torch_npu"
        )
    return f"torch_npu is installed but cannot be imported: {first}"


def _root_cause(error: BaseException) -> str:
    """The first line of the error at the beginning of the chain: torch wraps torch_npu's in one of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def check(stack: Stack, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a process in which MindSpeed would fail half-way, or patch the wrong thing.

    Raises:
        PlatformError: something is missing, or CUDA's Transformer Engine is in the way.
        VersionError: MindSpeed, torch_npu or the Megatron tree is not that of the stack.
    """
    problem = torch_npu_problem()
    if problem:
        raise PlatformError(f"platform 'npu' cannot be used here: {problem}")
    if not environment.get("ASCEND_HOME_PATH"):
        raise PlatformError(
            "ASCEND_HOME_PATH is not set, so CANN's compilers cannot be found: source its set_env.sh "
            "(/usr/local/Ascend/ascend-toolkit/set_env.sh) in the shell that starts the run"
        )
    _check_torch_npu(stack)
    _check_mindspeed(stack)
    for module, user, remedy, stacks in UNDECLARED:
        if module == "triton" and simnpu.is_active():
            continue  # the simulated device brings a stand-in, later: torch must have seen that there is no triton
        if stack.name in stacks and find_spec(module) is None:
            raise PlatformError(f"{user} needs {module} without declaring it, and it is not installed: {remedy}")
    _check_transformer_engine()
    check_megatron_tree(stack)


def _check_torch_npu(stack: Stack) -> None:
    import torch
    import torch_npu

    wanted = stack.requirement("torch-npu")
    if Version(torch_npu.__version__) not in wanted:
        raise VersionError(
            f"torch_npu {torch_npu.__version__} is installed; stack {stack.name} needs torch_npu{wanted} with the "
            f"torch of the same version. {stack}"
        )
    if Version(torch_npu.__version__).release[:2] != Version(torch.__version__).release[:2]:
        raise VersionError(
            f"torch_npu {torch_npu.__version__} is built for torch of the same version, but torch {torch.__version__} "
            "is installed: install the pair that torch_npu's release notes name"
        )


def mindspeed_version() -> Version | None:
    """Version of the ``mindspeed`` that would be imported, or None if it does not say.

    A checkout on PYTHONPATH has no metadata; its version then stands in ``setup.py`` beside the package.
    """
    package = import_module("mindspeed")  # holds a docstring only: importing it patches nothing
    stated = getattr(package, "__version__", None)
    if stated:
        return Version(stated)
    setup = Path(str(package.__file__)).parent.parent / "setup.py"
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", setup.read_text(), re.M) if setup.is_file() else None
    if found:
        return Version(found[1])
    try:
        return Version(metadata.version("mindspeed"))
    except metadata.PackageNotFoundError:
        return None


def _check_mindspeed(stack: Stack) -> None:
    if find_spec("mindspeed") is None:
        raise PlatformError(
            f"platform 'npu' needs MindSpeed ({stack.mindspeed}), which is not installed: "
            + HOW_MINDSPEED.format(branch=stack.mindspeed)
        )
    found = mindspeed_version()
    wanted = stack.mindspeed_version
    if found is None or found.release[:2] != wanted.release[:2]:
        raise VersionError(
            f"MindSpeed {found or 'of an unknown version'} is on the path "
            f"({import_module('mindspeed').__file__}); stack {stack.name} needs branch {stack.mindspeed}: "
            + HOW_MINDSPEED.format(branch=stack.mindspeed)
        )


def _check_transformer_engine() -> None:
    """MindSpeed puts a dummy in the place of ``transformer_engine``; a real one is imported instead, and crashes."""
    spec = find_spec("transformer_engine")
    if spec is None:
        return
    raise PlatformError(
        f"CUDA's Transformer Engine is installed ({spec.origin}). MindSpeed would import it instead of its own layers, and "
        "it cannot run on an NPU host: pip uninstall transformer-engine transformer-engine-torch transformer-engine-cu12"
    )


def check_megatron_tree(stack: Stack) -> None:
    """Is the ``megatron.core`` on the path the one that the version table saw? PYTHONPATH may put another first.

    Raises:
        VersionError: it is another version than the installed distribution.
    """
    megatron = find_spec("megatron")
    places = list(megatron.submodule_search_locations or []) if megatron else []
    spec = PathFinder.find_spec("core", places)
    folders = list(spec.submodule_search_locations or []) if spec else []
    info = Path(folders[0]) / "package_info.py" if folders else Path()
    if not info.is_file():
        raise VersionError(f"no megatron/core/package_info.py in {places or 'sys.path'}: is megatron-core installed?")
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", info.read_text(), re.M))
    version = Version(".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")))
    if version not in stack.requirement("megatron-core"):
        raise VersionError(
            f"megatron.core would be imported from {info.parent}, which is version {version}, while the installed "
            f"megatron-core is {metadata.version('megatron-core')}: another Megatron tree comes first on sys.path. "
            f"Remove it from PYTHONPATH. {stack}"
        )
